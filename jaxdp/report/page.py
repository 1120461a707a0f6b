"""The report as files: one page that needs neither network nor JavaScript, and its pictures beside it."""

import base64
import dataclasses
import io
import re
import tempfile
import time
import warnings
from html import escape
from pathlib import Path

from jaxdp.config import ConfigError, Mesh
from jaxdp.errors import first_line
from jaxdp.report.classes import Classes, by_class, classes_csv, confusions_csv
from jaxdp.report.communication import measure
from jaxdp.report.curves import check_number, curves, settings, time_parts
from jaxdp.report.history import History, read_all
from jaxdp.report.tables import classes_table, differences, numbers, reached, times
from jaxdp.training.workdir import CHECKPOINTS

PAGE = "report.html"
MARK = '<meta name="generator" content="jaxdp report">'
FILES = '<meta name="files" content="{}">'
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
body { color: #111; background: #fff }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc } h3 { font-size: 1rem }
img { width: 100%; height: auto } .wide { overflow-x: auto } .quiet { color: #555 } summary { cursor: pointer }
table { border-collapse: collapse; font-size: 0.88rem } th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #ddd }
th { text-align: left; font-weight: 600; max-width: 24rem; overflow-wrap: anywhere }
thead th:not(:first-child) { text-align: right }
td { text-align: right; font-variant-numeric: tabular-nums }
"""


def write(
    workdirs,
    output=None,
    evaluate: bool = True,
    checkpoint: str = "newest",
    datasets=None,
    communication: bool = False,
    say=lambda text: None,
) -> Path:
    """Write the page report.html and its pictures about one run or several; returns the page's path.

    output: their directory; None: WORKDIR/report for one run, `report` in the current directory for several. evaluate: count
    the held-out images by class, with the checkpoint that `checkpoint` names (newest, best, or its samples), on the
    accelerators of this machine or one CPU device. datasets: as for `jaxdp.train`. communication: first measure how much of the
    steps' time is exposed communication, on devices like those of the runs, which must be free; it is kept in
    WORKDIR/communication.json for later reports; say is told of it. An earlier report there is replaced.

    Raises ConfigError for a directory without a run, or files in the way that no report has written.
    """
    workdirs = list(workdirs)
    if not workdirs:
        raise ConfigError("workdir: () is not allowed; give at least one run's directory")
    if len({Path(workdir).resolve() for workdir in workdirs}) < len(workdirs):
        raise ConfigError("workdir: a run is given twice, which is not allowed; give each once")
    if output == "":
        raise ConfigError("--output: '' is not allowed; give a directory")
    check_number(workdirs)
    runs = read_all(workdirs)
    default = Path(workdirs[0]) / "report" if len(workdirs) == 1 else Path("report")
    folder = default if output is None else Path(output)
    _made(folder)
    before = _own_files(folder)
    if communication:
        for run in sorted(runs, key=lambda run: -run.told.get("devices", 0)):  # a CPU is divided once, for the most devices
            measure(run, say=say)
    if evaluate:
        _check_checkpoint(runs, checkpoint)
    found = [_classes(run, evaluate, checkpoint, datasets) for run in runs]
    if evaluate:
        for run, one in zip(runs, found, strict=True):
            if isinstance(one, str):
                say(f"{run.label}: accuracy by class and confusion matrix {one}")
    files = _pictures(runs, found)
    for number, one in enumerate(found, 1):
        if isinstance(one, Classes):
            files |= {f"classes-{number}.csv": classes_csv(one), f"confusions-{number}.csv": confusions_csv(one)}
    files = {PAGE: _page(runs, found, files).encode()} | files  # first, as it lists those that are ours
    for name in files:
        if name not in before and (folder / name).exists():
            raise _in_the_way(folder, name)
    _replaced(folder, files)
    for name in before - files.keys():
        (folder / name).unlink(missing_ok=True)
    return folder / PAGE


def _replaced(folder: Path, files: dict[str, bytes]) -> None:
    """Write all files, then put them into the folder. Raises OSError, the folder being as it was, where there is no space."""
    with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as written:
        try:
            for name, data in files.items():
                (Path(written) / name).write_bytes(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from None
        for name in files:
            (Path(written) / name).replace(folder / name)


def _pictures(runs: list[History], found: list) -> dict[str, bytes]:
    """The PNGs by name. Names of runs and classes are text: what stands between dollars is no formula."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box stands for it; the tables have it
        figures = {"curves.png": curves(runs), "settings.png": settings(runs), "time.png": time_parts(runs)}
        for number, one in enumerate(found, 1):
            if isinstance(one, Classes):
                figures[f"classes-{number}.png"] = by_class(one)
        return {name: _png(figure) for name, figure in figures.items() if figure is not None}


def _check_checkpoint(runs: list[History], checkpoint: str) -> None:
    """Raise ConfigError for the name of a checkpoint that no run can have, or that none of these has."""
    folders = [run.path / CHECKPOINTS for run in runs]
    if checkpoint not in ("newest", "best") and not any((folder / checkpoint).is_dir() for folder in folders if checkpoint):
        raise ConfigError(f"--checkpoint: {checkpoint!r} is not allowed; give newest, best, or the samples of one")


def _made(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.exists() else error.strerror
        raise ConfigError(f"--output: {str(folder)!r} is not allowed; {reason}; give another directory") from None


def _own_files(folder: Path) -> set[str]:
    """The files there that an earlier report has written. Raises ConfigError for a page that is none of ours."""
    if not (folder / PAGE).exists():
        return set()
    text = (folder / PAGE).read_text(errors="replace")[:2000]
    if MARK not in text:
        raise _in_the_way(folder, PAGE)
    listed = re.search(FILES.format(r"([a-z0-9. -]*)"), text)
    return {PAGE, *(listed[1].split() if listed else ())}


def _in_the_way(folder: Path, name: str) -> ConfigError:
    return ConfigError(
        f"--output: {str(folder)!r} is not allowed; it holds a {name} that no report has written; give another directory"
    )


def _classes(run: History, evaluate: bool, checkpoint: str, datasets):
    """The run's classes, or in words why they are missing."""
    if not evaluate:
        return "left out: --no-evaluate"
    if run.state == "running":
        return "left out: the run is going on, and its devices are in use; make the report again when it is done"
    if run.config.data.source == "given" and datasets is None:
        return "missing: the run's images were handed over from Python; give them to jaxdp.report.write as datasets"
    from jaxdp.training.restored import confusion

    try:
        given = datasets if run.config.data.source == "given" else None
        config = dataclasses.replace(run.config, mesh=Mesh(keep_memory=False))
        told, counts, names = confusion(config, run.path, checkpoint, given)
    except (ConfigError, RuntimeError, OSError) as error:
        return f"missing: {first_line(error)}"
    words = f"{told['checkpoint']}, epoch {told['epoch']:.2f}: {100 * told['eval_accuracy']:.2f} % of "
    return Classes(counts, names, words + f"{told['eval_examples']} held-out images")


def _png(figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def _page(runs: list[History], found: list, files: dict[str, bytes]) -> str:
    def picture(name: str, alt: str) -> str:
        if name not in files:
            return ""
        data = base64.b64encode(files[name]).decode()
        return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'

    title = ", ".join(run.label for run in runs) if len(runs) <= 3 else f"{len(runs)} runs, {runs[0].label} the first"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in reached(runs)),
        "<h2>Loss and accuracy</h2>",
        picture("curves.png", "Loss and accuracy against epochs and against time"),
        "<h2>Learning rate, momentum, batch size and speed</h2>",
        picture("settings.png", "Learning rate, momentum, global batch and images a second against epochs"),
        "<h2>Where the time went</h2>",
        picture("time.png", "Shares of the wall time"),
        times(runs),
        "<h2>Classes</h2>",
    ]
    for number, (run, one) in enumerate(zip(runs, found, strict=True), 1):
        if len(runs) > 1:
            parts.append(f"<h3>{escape(run.label)}</h3>")
        if isinstance(one, str):
            parts.append(f"<p>Accuracy by class and confusion matrix: {escape(one)}.</p>")
            continue
        parts.append(f"<p>{escape(one.checkpoint)}.</p>")
        parts.append(picture(f"classes-{number}.png", f"Accuracy by class and mistakes of {run.label}"))
        parts.append(classes_table(one))
        parts.append(
            f'<p class="quiet">All classes, and all mistakes with their numbers of images, are in classes-{number}.csv and '
            f"confusions-{number}.csv beside this page.</p>"
        )
    if len(runs) > 1:
        parts += ["<h2>What differs</h2>", differences(runs)]
    parts += ["<h2>All numbers</h2>", numbers(runs)]
    parts.append(f'<p class="quiet">Made by jaxdp report at {time.strftime("%Y-%m-%d %H:%M:%S")}.</p>')
    head = f'<meta charset="utf-8">{MARK}{FILES.format(" ".join(files))}'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(filter(None, parts))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
