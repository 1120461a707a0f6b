"""What the scripts of this folder share: their arguments, records in results/, Markdown tables, and runs."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
sys.path.insert(0, str(ROOT / "tests"))  # for its helpers


def arguments(text: str, **defaults) -> argparse.Namespace:
    """The arguments of a script, whose help is its text. defaults: by name; what stands there says what an argument takes."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        match default:
            case dict():  # the name of a value
                parser.add_argument(name, choices=default)
            case tuple():  # any number of values without a flag
                parser.add_argument(name, nargs="*", type=type(default[0]), default=default)
            case list():  # several values; texts of the list
                kind = type(default[0])
                parser.add_argument(flag, nargs="+", type=kind, choices=default if kind is str else None, default=default)
            case bool():  # nothing
                parser.add_argument(flag, action="store_true")
            case type():  # a value, without a default
                parser.add_argument(flag, type=default)
            case _:
                parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()


def read(name: str, default: object = None):
    """The record of a name, or `default` if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else default


def write(name: str, record: object, table: Callable | None = None) -> None:
    """Write a record, and print the table of it."""
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    if table:
        print(table(read(name)))


def commit_of(checkout: Path, name: str = "HEAD") -> str:
    return subprocess.check_output(["git", "-C", checkout, "rev-parse", "--short", name], text=True).strip()


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


def alternate(calls: dict[str, Callable], rounds: int) -> dict[str, list]:
    """The results of each call, by name, of rounds that call all of them one after the other."""
    results: dict[str, list] = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in calls.items():
            results[name].append(call())
            print(number, name, results[name][-1], flush=True)
    return results


def trained(config, datasets: tuple | None = None):
    """The result of a run; None if its loss was not finite."""
    import jaxdp
    from jaxdp.loggers.console import Screen
    from jaxdp.session.job import Job
    from jaxdp.session.train import train_job

    with tempfile.TemporaryDirectory() as folder:
        try:
            return train_job(Job(config, Path(folder) / "run", datasets=datasets, screen=Screen(quiet=True)))
        except jaxdp.TrainingError:
            return None


def accuracy_of(config) -> float | None:
    """The accuracy of a run; None if it diverged."""
    result = trained(config)
    return result.accuracy if result else None


def narrow_resnet(name: str, tuning: bool, **fields):
    """The config of a narrow ResNet-18 (8 channels in its first stage) on the digits, evaluated once, at the end.

    tuning: trained and evaluated on parts of the training digits.
    """
    from jaxdp.config import Config, Data, Evaluation, Logging, Model

    split = {"train_split": "fit", "eval_split": "validation"} if tuning else {}
    return Config(
        name=name,
        data=Data(augmentation="digits", **split),
        model=Model(depth=18, width=8, classes=10, norm_momentum=0.7),
        evaluation=Evaluation(every_epochs=None),
        logging=Logging(every_steps=1000, tensorboard=False),
        **fields,
    )


def started(command: list[str], out: Path, start=subprocess.Popen, **environment: str) -> subprocess.Popen:
    """A process whose programs are all cached and whose output goes to a file. start: makes it."""
    with open(out, "w") as file:
        variables = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} | environment
        return start(command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT)


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
