"""What the scripts of this folder share: their options, records in results/, Markdown tables, and runs for their accuracy."""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def options(text: str) -> argparse.ArgumentParser:
    """A parser whose help is the text of a script."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def read(name: str, default: object = None):
    """The record of a name, or `default` if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else default


def write(name: str, record: object) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def made_on(record: dict) -> str:
    """The machine and versions of a measurement."""
    made = record["provenance"]
    gpus = [gpu.split(",")[0] for gpu in made.get("gpus", ())]
    machine = f"{len(gpus)} {gpus[0]}" if gpus else f"{made['cores']} cores of an {made['processor']}"
    return f"{machine}, Python {made['python']}, JAX {made['versions']['jax']}"


def markdown(columns, rows, *below: str) -> str:
    """A Markdown table. below: the paragraphs after it."""
    columns, *rows = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    rule = "|---" * (columns.count("|") - 1) + "|"
    return "\n\n".join(["\n".join([columns, rule, *rows]), *below])


def mean_and_deviation(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f}" + (f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def trained(config, datasets: tuple | None = None):
    """The result of a run; None if its loss was not finite."""
    import jaxdp
    from jaxdp.loggers.console import Quiet
    from jaxdp.session import Command, run_session

    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_session(config, Path(folder) / "run", datasets=datasets, command=Command(screen=Quiet()))
        except jaxdp.TrainingError:
            return None


def draw_accuracies(path: Path, series: dict[str, tuple], *, baseline: tuple[float, str] | None = None, **axis) -> None:
    """Plot held-out accuracies with their standard deviations. series: label -> (color, places, lists of accuracies in %)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for label, (color, places, scores) in series.items():
        spread = [statistics.stdev(one) if len(one) > 1 else 0.0 for one in scores]
        axes.errorbar(places, list(map(statistics.mean, scores)), spread, marker="o", capsize=3, color=color, label=label)
    if baseline:
        axes.axhline(baseline[0], color="#999999", linestyle="--", label=baseline[1])
    axes.set(ylabel="held-out accuracy (%)", **axis)
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
