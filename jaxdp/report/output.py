"""The report as files: the page without external files, and tables as CSV."""

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from jaxdp.checkpoint.listing import CHECKPOINT_NAMES
from jaxdp.choices import SOURCES, kind_of_task
from jaxdp.config import Mesh
from jaxdp.errors import ConfigError, first_line, printable
from jaxdp.files import NotRegularError, check_local, expand_user, is_url, no_directory_reason, read_regular
from jaxdp.metrics import COUNT, METRICS, PREFIX, bare
from jaxdp.report.cards import Seen
from jaxdp.report.confusion import ConfusionReport, classes_csv, confusions_csv
from jaxdp.report.page import SCRIPT, page
from jaxdp.report.plots import data
from jaxdp.report.run_history import History, read_all

PAGE = "report.html"
GENERATOR = '<meta name="generator" content="jaxdp report">'
MAX_HEAD = 2**14  # bytes of a page that are searched for its head

PathLike = str | os.PathLike


def write(
    workdirs: PathLike | Sequence[PathLike] | Sequence[History],
    output: PathLike | None = None,
    *,
    evaluate: bool = True,
    checkpoint: str = "result",
    datasets: tuple | None = None,
    info: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write report.html with its CSV files for one or more runs; returns the path of the page.

    workdirs: the directory or URL of a run, or a list of them, or of runs that `read_all` has read. output: directory of the
    page; None: WORKDIR/report for one run, ./report for several or a URL. evaluate: evaluate the held-out images by class, on
    the accelerators of this machine or on one CPU device. checkpoint: the checkpoint for it: result (the newest, or with early
    stopping the best), newest, best, or its number of samples. datasets: as for `jaxdp.train`, for runs that were given theirs.
    info: receives progress lines. Replaces an earlier report in the directory.

    Raises ConfigError for a directory without a run, and for files that no report has written and this one would overwrite.
    """
    given: list[Any] = [workdirs] if isinstance(workdirs, PathLike) else list(workdirs)
    is_read = bool(given) and all(isinstance(each, History) for each in given)
    runs = given if is_read else read_all([expand_user(workdir, "WORKDIR") for workdir in given])
    output = None if output is None else expand_user(output, "--output")
    if output == "":
        raise ConfigError("--output", "", reason="must not be empty", hint="give a directory")
    check_local(output, "--output")
    if output is not None and Path(output).suffix == Path(PAGE).suffix and not Path(output).is_dir():
        reason = f"must be a directory, which receives {PAGE} and its tables"
        raise ConfigError("--output", str(output), reason=reason, hint="give the name without .html")
    first = runs[0].workdir
    default = Path(first) / "report" if len(runs) == 1 and not is_url(first) else Path("report")
    folder = default if output is None else Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = no_directory_reason(folder, error)
        raise ConfigError("--output", str(folder), reason=reason, hint="give another directory") from None
    confusions: list[ConfusionReport | str] = [
        "skipped: --no-evaluate" * (kind_of_task(run.config.task) == "classes") for run in runs
    ]
    if evaluate:
        _check_checkpoint(runs, checkpoint)
        confusions = [of and _evaluate(run, checkpoint, datasets) for run, of in zip(runs, confusions, strict=True)]
        for run, confusion in zip(runs, confusions, strict=True):
            if isinstance(confusion, str) and confusion:
                info(f"{run.label}: accuracy by class {confusion}")
    for run in runs:
        fields = {name for record in run.evaluations for name in record if name.startswith(PREFIX)}
        if unknown := sorted(map(bare, fields - {*METRICS, COUNT})):
            info(f"{run.label}: give the recipe that registers the metrics {', '.join(unknown)} with --config")
    files = {}
    for number, confusion in enumerate(confusions, 1):
        if isinstance(confusion, ConfusionReport):
            files[f"classes-{number}.csv"] = classes_csv(confusion)
            files[f"confusions-{number}.csv"] = confusions_csv(confusion)
    seen = [Seen(run.label, run) for run in runs]
    foot = f"Written by jaxdp report on {time.strftime('%Y-%m-%d at %H:%M:%S')}."
    scripts = f"<script>{get_plotlyjs()}</script>\n<script>{SCRIPT}</script>"
    html = page(seen, data(runs, confusions), scripts, confusions=confusions, head=GENERATOR, foot=foot)
    files = {PAGE: html.encode("utf-8", "backslashreplace")} | files  # whatever the run's files hold
    _check_no_foreign_files(folder, files)
    _replace_files(folder, files)
    return folder / PAGE


def _check_no_foreign_files(folder: Path, names: Iterable[str]) -> None:
    """Raise ConfigError if the directory has files of these names, unless it has the page of an earlier report."""
    with suppress(FileNotFoundError, NotRegularError):
        if GENERATOR.encode() in read_regular(folder / PAGE)[:MAX_HEAD]:
            return
    for name in names:
        if (folder / name).exists():
            reason = f"contains a {name} that no report has written"
            raise ConfigError("--output", str(folder), reason=reason, hint="give another directory")


def _check_checkpoint(runs: list[History], checkpoint: str) -> None:
    """Raise ConfigError if no run has a checkpoint of this name."""
    known = {str(samples) for run in runs for samples in run.checkpoints}
    if checkpoint not in (*CHECKPOINT_NAMES, *known):
        hint = f"give {', '.join(CHECKPOINT_NAMES)}, or its number of samples"
        raise ConfigError("--checkpoint", checkpoint, reason="not found", hint=hint)


def _evaluate(run: History, checkpoint: str, datasets: tuple | None) -> ConfusionReport | str:
    """The run's confusion matrix, or why it is missing."""
    if run.status == "running":
        return "skipped: the run is still training and uses its devices; write the report again when it has finished"
    is_given = SOURCES[run.config.data.source].from_python
    if is_given and datasets is None:
        return "missing: the run was given its images from Python; pass them to jaxdp.report.write as datasets"
    from jaxdp.inference.evaluate import confusion_matrix

    try:
        config = dataclasses.replace(run.config, mesh=Mesh())
        given = datasets if is_given else None
        found, counts, names = confusion_matrix(config, run.workdir, checkpoint, datasets=given)
    except (ConfigError, RuntimeError, OSError) as error:
        return f"missing: {printable(first_line(error), 4096)}"
    name = config.first_metric
    shown = METRICS[name].shown(found[name])
    caption = f"{found['checkpoint']}, epoch {found['epoch']:.2f}: {shown} of {found[COUNT]} held-out images"
    return ConfusionReport(counts, [printable(name, 4096) for name in names], printable(caption, 4096))


def _replace_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write all files to a temporary directory, then move them. Raises OSError before any is moved if the disk is full."""
    with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as temporary:
        try:
            for name, data in files.items():
                (Path(temporary) / name).write_bytes(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from None
        for name in files:
            (Path(temporary) / name).replace(folder / name)
