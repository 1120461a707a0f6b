"""The report as files: an HTML page without external files, its figures as PNG, and tables as CSV."""

import base64
import dataclasses
import io
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdp.checkpoint.listing import CHECKPOINT_NAMES
from jaxdp.choices import SOURCES
from jaxdp.config import Mesh
from jaxdp.errors import ConfigError, first_line
from jaxdp.files import NotRegularError, check_local, expand_user, is_url, no_directory_reason, read_regular
from jaxdp.report.communication import measure_communication
from jaxdp.report.confusion import Confusion, classes_csv, confusions_csv
from jaxdp.report.run_history import History, check_workdirs, read_all
from jaxdp.report.tables import (
    classes_table,
    curves_note,
    differences_table,
    numbers_table,
    remarks,
    results_table,
    time_table,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"
GENERATOR = '<meta name="generator" content="jaxdp report">'
FILES = '<meta name="files" content="{}">'
STYLE = """
:root { color-scheme: light dark; --text: #111; --page: #fff; --quiet: #555; --line: #ccc; --link: #0b57a4 }
@media (prefers-color-scheme: dark) {
  :root { --text: #eee; --page: #111; --quiet: #b0b0b0; --line: #444; --link: #8ab8ff }
  .plot img { filter: invert(0.93) hue-rotate(180deg) }
}
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
body { color: var(--text); background: var(--page) } h1, h3, p { overflow-wrap: anywhere }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line) }
h3 { font-size: 1rem } a { color: var(--link) } :focus-visible { outline: 3px solid var(--link); outline-offset: 2px }
img { width: 100%; height: auto } .wide { overflow-x: auto } .quiet { color: var(--quiet) } summary { cursor: pointer }
table { border-collapse: collapse; font-size: 0.88rem } th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid var(--line) }
th { text-align: left; font-weight: 600; max-width: 24rem; overflow-wrap: anywhere }
thead th:not(:first-child) { text-align: right }
td { text-align: right; font-variant-numeric: tabular-nums }
tbody th { min-width: 9rem } .results th, .results td { padding: 0.2rem 0.5rem }
.results td, .results thead th { white-space: nowrap }
.plot { position: relative; min-width: 46rem } .plot svg { position: absolute; inset: 0; width: 100%; height: 100% }
circle { fill: transparent } circle:hover, .shown { fill: #8885; stroke: var(--text); stroke-width: 2 }
output { position: absolute; padding: 0.15rem 0.5rem; border-radius: 4px; font-size: 0.85rem }
output { width: max-content; max-width: 22rem; color: #fff; background: #111d; pointer-events: none }
"""


PathLike = str | os.PathLike


def write(
    workdirs: PathLike | Sequence[PathLike],
    output: PathLike | None = None,
    *,
    evaluate: bool = True,
    checkpoint: str = "result",
    datasets: tuple | None = None,
    communication: bool = False,
    info: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write report.html with its figures and CSV files for one or more runs; returns the path of the page.

    workdirs: the directory or URL of a run, or a list of them. output: directory of the page; None: WORKDIR/report for one run,
    ./report for several or a URL. evaluate: evaluate the held-out images by class, on the accelerators of this machine or on
    one CPU device. checkpoint: the checkpoint for it: result (the newest, or with early stopping the best), newest, best, or
    its number of samples. datasets: as for `jaxdp.train`, for runs that were given theirs. communication: first measure exposed
    communication on devices like those of the runs, which must be idle, and keep it in WORKDIR/communication.json, unless
    WORKDIR is a URL. info: receives progress lines. Replaces an earlier report in the directory.

    Raises ConfigError for a directory without a run, and for files that no report has written and this one would overwrite.
    """
    from jaxdp.report.plots import check_number

    workdirs = [workdirs] if isinstance(workdirs, PathLike) else list(workdirs)
    workdirs = [expand_user(workdir, "WORKDIR") for workdir in workdirs]
    output = None if output is None else expand_user(output, "--output")
    check_workdirs(workdirs)
    if output == "":
        raise ConfigError("--output", "", reason="must not be empty", hint="give a directory")
    check_local(output, "--output")
    if output is not None and Path(output).suffix == Path(PAGE).suffix and not Path(output).is_dir():
        reason = f"must be a directory, which receives {PAGE} and its figures"
        raise ConfigError("--output", str(output), reason=reason, hint="give the name without .html")
    check_number(workdirs)
    runs = read_all(workdirs)
    default = Path(workdirs[0]) / "report" if len(workdirs) == 1 and not is_url(workdirs[0]) else Path("report")
    folder = default if output is None else Path(output)
    _make_directory(folder)
    old_files = _files_of_earlier_report(folder)
    if communication:
        # Most devices first: the number of virtual CPU devices is fixed when JAX starts.
        for run in sorted(runs, key=lambda run: -run.result.get("devices", 0)):
            measure_communication(run, info=info)
    if evaluate:
        _check_checkpoint(runs, checkpoint)
    confusions = [_evaluate(run, checkpoint, datasets) if evaluate else "skipped: --no-evaluate" for run in runs]
    if evaluate:
        for run, confusion in zip(runs, confusions, strict=True):
            if isinstance(confusion, str):
                info(f"{run.label}: accuracy by class {confusion}")
    files, layers = draw(runs, confusions)
    for number, confusion in enumerate(confusions, 1):
        if isinstance(confusion, Confusion):
            files[f"classes-{number}.csv"] = classes_csv(confusion)
            files[f"confusions-{number}.csv"] = confusions_csv(confusion)
    files = {
        PAGE: _page(runs, confusions, files=files, layers=layers).encode()
    } | files  # first: it lists the files of the report
    for name in files:
        if name not in old_files and (folder / name).exists():
            raise _foreign_file(folder, name)
    _replace_files(folder, files)
    for name in old_files - files.keys():
        (folder / name).unlink(missing_ok=True)
    return folder / PAGE


def _make_directory(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = no_directory_reason(folder, error)
        raise ConfigError("--output", str(folder), reason=reason, hint="give another directory") from None


def _files_of_earlier_report(folder: Path) -> set[str]:
    """The files in the directory that an earlier report has written. Raises ConfigError for a foreign report.html."""
    if not (folder / PAGE).exists():
        return set()
    try:
        text = read_regular(folder / PAGE)[:2000].decode(errors="replace")
    except NotRegularError:
        raise _foreign_file(folder, PAGE) from None
    if GENERATOR not in text:
        raise _foreign_file(folder, PAGE)
    names = re.search(FILES.format(r"([a-z0-9. -]*)"), text)
    return {PAGE, *(names[1].split() if names else ())}


def _foreign_file(folder: Path, name: str) -> ConfigError:
    reason = f"contains a {name} that no report has written"
    return ConfigError("--output", str(folder), reason=reason, hint="give another directory")


def _check_checkpoint(runs: list[History], checkpoint: str) -> None:
    """Raise ConfigError if no run has a checkpoint of this name."""
    known = {str(samples) for run in runs for samples in run.files.samples}
    if checkpoint not in (*CHECKPOINT_NAMES, *known):
        hint = f"give {', '.join(CHECKPOINT_NAMES)}, or its number of samples"
        raise ConfigError("--checkpoint", checkpoint, reason="not found", hint=hint)


def _evaluate(run: History, checkpoint: str, datasets: tuple | None) -> Confusion | str:
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
        metrics, counts, names = confusion_matrix(config, run.files.workdir, checkpoint, datasets=given)
    except (ConfigError, RuntimeError, OSError) as error:
        return f"missing: {first_line(error)}"
    caption = f"{metrics['checkpoint']}, epoch {metrics['epoch']:.2f}: {100 * metrics['eval_accuracy']:.2f} % of "
    return Confusion(counts, names, caption + f"{metrics['eval_examples']} held-out images")


def draw(runs: list[History], confusions: Sequence[Confusion | str] = ()) -> tuple[dict[str, bytes], dict[str, str]]:
    """(PNG files, layers with the values on hover), both by file name."""
    import matplotlib

    from jaxdp.report.hover import layer
    from jaxdp.report.plots import Plot, confusion_figure, curves_figure, settings_figure, time_figure

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():  # no formulas: "$" may be in a name
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the tables show such names
        figures = {
            "curves.png": curves_figure(runs),
            "settings.png": settings_figure(runs),
            "time.png": time_figure(runs),
        }
        for number, confusion in enumerate(confusions, 1):
            if isinstance(confusion, Confusion):
                figures[f"classes-{number}.png"] = confusion_figure(confusion)
        files = {name: _png(figure) for name, figure in figures.items() if figure is not None}
        return files, {name: layer(figure) for name, figure in figures.items() if isinstance(figure, Plot)}


def _png(figure: "Figure") -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


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


def _page(runs: list[History], confusions: list[Confusion | str], *, files: dict[str, bytes], layers: dict[str, str]) -> str:
    from jaxdp.report.hover import SCRIPT, picture

    def image(name: str, alt: str) -> str:
        if name not in files:
            return ""
        source = f"data:image/png;base64,{base64.b64encode(files[name]).decode()}"
        return picture(source, alt, layers.get(name, ""))

    title = ", ".join(run.label for run in runs) if len(runs) <= 3 else f"{runs[0].label} and {len(runs) - 1} more runs"
    parts = [
        f"<h1>{escape(title)}</h1>",
        results_table(runs),
        *(f"<p>{escape(line)}</p>" for line in remarks(runs)),
        "<h2>Loss and accuracy</h2>",
        image("curves.png", "Loss and accuracy against epochs and against time"),
        curves_note(runs),
        "<h2>Learning rate, momentum, batch size and speed</h2>",
        image("settings.png", "Learning rate, momentum, global batch and images per second against epochs"),
        "<h2>Wall time</h2>",
        image("time.png", "Shares of the wall time"),
        time_table(runs),
        "<h2>Classes</h2>",
    ]
    for number, (run, confusion) in enumerate(zip(runs, confusions, strict=True), 1):
        if len(runs) > 1:
            parts.append(f"<h3>{escape(run.label)}</h3>")
        if isinstance(confusion, str):
            parts.append(f"<p>Accuracy by class and confusion matrix {escape(confusion)}.</p>")
            continue
        parts.append(f"<p>{escape(confusion.caption)}.</p>")
        parts.append(image(f"classes-{number}.png", f"Accuracy by class and confusion matrix of {run.label}"))
        parts.append(classes_table(confusion))
        parts.append(
            f'<p class="quiet">Next to this page, classes-{number}.csv lists all classes, and confusions-{number}.csv all '
            "pairs of label and prediction with their numbers of images.</p>"
        )
    if len(runs) > 1:
        parts += ["<h2>Differences between the configurations</h2>", differences_table(runs)]
    parts += ["<h2>All numbers</h2>", numbers_table(runs)]
    parts.append(f'<p class="quiet">Written by jaxdp report on {time.strftime("%Y-%m-%d at %H:%M:%S")}.</p>')
    head = f'<meta charset="utf-8">{GENERATOR}{FILES.format(" ".join(files))}'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style>'
    parts.append(f"<script>{SCRIPT}\nshowValues(document);</script>")
    body = "\n".join(filter(None, parts))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
