"""Training to the end with both forms of batch normalization (`model.batch_norm`), in bfloat16: accuracy and loss by seed.

    python benchmarks/batch_norm_training.py [--cases digits ...] [--seeds 0 1 2]

The cases are the default run (ResNet-50 on handwritten digits) and a narrow ResNet-50 on the 60,000 images of Fashion-MNIST, of
Debian's package dataset-fashion-mnist. Adds to benchmarks/results/batch_norm_training.json and skips runs already there; prints
the table.
"""

import argparse
import gzip
import json
import math
import statistics
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

import jaxdp
from jaxdp.bench.environment import provenance
from jaxdp.loggers.console import Quiet
from jaxdp.session import Command, run_session

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/batch_norm_training.json"
FASHION = Path("/usr/share/datasets/fashion-mnist")
FORMS = "separate", "folded"
COMMON = ["--model.dtype", "bfloat16", "--model.batch-norm"]
CASES = {
    "digits": [],
    "fashion": [
        *("--model.width", "8", "--data.image-size", "32", "--data.augmentation", "pad_and_crop", "--epochs", "3"),
        *("--batch.0.global-batch", "128", "--batch.0.until-epoch", "2", "--batch.1.global-batch", "256"),
        *("--schedule.warmup-epochs", "0.5", "--mesh.cpu-devices", "2"),
    ],
}
TITLES = {
    "digits": "ResNet-50, handwritten digits, 1,437 images",
    "fashion": "ResNet-50 of width 8, Fashion-MNIST, 60,000 images",
}


@cache
def fashion() -> tuple:
    """((images, labels), (images, labels)): training and test images, uint8 [N, 32, 32, 3], padded with zeros.

    Raises SystemExit without the data set.
    """
    if not FASHION.is_dir():
        sys.exit(f"{FASHION} not found: install Debian's package dataset-fashion-mnist, then run this again")

    def read(name: str, header: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((FASHION / name).read_bytes()), np.uint8, offset=header)

    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        images = read(f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
        images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
        return np.repeat(images[..., None], 3, axis=-1), read(f"{name}-labels-idx1-ubyte.gz", 8).astype(np.int32)

    return part("train"), part("t10k")


def trained(case: str, form: str, seed: int, workdir: Path) -> dict:
    flags = [*COMMON, form, *CASES[case], "--seed", str(seed), "--name", f"{case}-{form}-{seed}"]
    config = jaxdp.load_config("digits", flags)
    result = run_session(config, workdir, datasets=fashion() if case == "fashion" else None, command=Command(screen=Quiet()))
    images = 360 if case == "digits" else 10_000
    facts = {"case": case, "form": form, "seed": seed, "flags": flags, "eval_examples": images}
    return facts | {"accuracy": result.accuracy, "loss": result.loss, "steps": result.steps}


def record() -> dict:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": []}


class Comparison(NamedTuple):
    """Accuracies in percent of two groups of runs, their means, and the difference of the means in standard errors."""

    groups: dict[str, list[float]]
    means: dict[str, float]
    error: float
    errors_apart: float

    def cells(self) -> list[str]:
        """The mean and range of each group, and the difference, as cells of a table."""
        shown = [f"{self.means[name]:.2f} % ({min(group):.2f} to {max(group):.2f})" for name, group in self.groups.items()]
        return [*shown, f"{self.errors_apart:.1f}"]


def compare(rows: list[dict], field: str, names: tuple[str, str]) -> Comparison:
    """Compare the runs whose `field` is the first of `names` with those of the second.

    The standard error of the difference is that of its runs or of the number of held-out images, whichever is larger.
    """
    groups = {name: [100 * row["accuracy"] for row in rows if row[field] == name] for name in names}
    means = {name: statistics.mean(values) for name, values in groups.items()}
    of_seeds = math.sqrt(sum(statistics.variance(values) / len(values) for values in groups.values()))
    share = statistics.mean(means.values()) / 100
    of_images = 100 * math.sqrt(2 * share * (1 - share) / rows[0]["eval_examples"])
    error = max(of_seeds, of_images)
    first, second = means.values()
    return Comparison(groups, means, error, abs(first - second) / error if error else 0.0)


def table(measured: dict) -> str:
    lines = ["| training in bfloat16 | separate | folded | difference in standard errors |", "|---" * 4 + "|"]
    for case, title in TITLES.items():
        rows = [row for row in measured["runs"] if row["case"] == case]
        if len({row["form"] for row in rows}) < len(FORMS):
            continue
        lines.append(f"| {title} | {' | '.join(compare(rows, 'form', FORMS).cells())} |")
    seeds = len({row["seed"] for row in measured["runs"]})
    return "\n".join([*lines, "", f"Held-out accuracy: mean and range of {seeds} seeds."])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    done = {(row["case"], row["form"], row["seed"]) for row in record()["runs"]}
    for case in args.cases:
        for seed in args.seeds:
            for form in FORMS:
                if (case, form, seed) in done:
                    continue
                with tempfile.TemporaryDirectory() as workdir:
                    row = trained(case, form, seed, Path(workdir) / "run") | {"provenance": provenance()}
                RESULT.write_text(json.dumps({"runs": [*record()["runs"], row]}, indent=1) + "\n")
                print(f"{case}, seed {seed}, {form}: {100 * row['accuracy']:.2f} %, loss {row['loss']:.4f}", flush=True)
    print(table(record()))


if __name__ == "__main__":
    main()
