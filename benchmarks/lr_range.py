"""Whether the suggestion of `jaxdp bench lr` is a good learning rate: accuracy of runs with multiples of it.

    python benchmarks/lr_range.py [--seeds 0 1]   (about half an hour on two cores)

For each case: a range test on the training split `fit`, then runs with the suggested rate times 1/16, 1/4, 1, 4 and 16,
evaluated on the validation split. Writes benchmarks/results/lr_range.json, and the plot of the first case as docs/lr.png.
"""

import argparse
import json
import tempfile
from pathlib import Path

import jaxdp
from jaxdp.bench import lr
from jaxdp.bench.environment import provenance
from jaxdp.loggers.console import Quiet
from jaxdp.session import Command, run_session

ROOT = Path(__file__).parent.parent
COMMON = ["--model.depth", "18", "--model.width", "16", "--data.train-split", "fit", "--data.eval-split", "validation"]
COMMON += ["--logging.no-tensorboard", "--mesh.cpu-devices", "1", "--evaluation.every-epochs", "None"]
ONE_BATCH = ["--batch.0.global-batch", "256", "--batch.1.global-batch", "256"]
CASES = {
    "LARS, batch 64": ["--batch.1.global-batch", "64"],
    "SGD, batch 64": ["--optimizer.name", "sgd", "--batch.1.global-batch", "64"],
    "LARS, batch 256": ONE_BATCH,
    "SGD, batch 256": ["--optimizer.name", "sgd", *ONE_BATCH],
}
MULTIPLES = (1 / 16, 1 / 4, 1, 4, 16)


def accuracy(flags: list[str], seed: int, rate: float) -> float:
    config = jaxdp.load_config("digits", [*COMMON, *flags, "--seed", str(seed), "--schedule.learning-rate", f"{rate:g}"])
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_session(config, Path(folder) / "run", command=Command(screen=Quiet())).accuracy
        except jaxdp.TrainingError:  # the loss was not finite
            return 0.0


def measured(case: str, seeds: list[int]) -> dict:
    flags, tests, runs = CASES[case], [], []
    for seed in seeds:
        config = jaxdp.load_config("digits", [*COMMON, *flags, "--seed", str(seed)])
        tests.append(lr.run(config, lowest=1e-4, highest=1e2))
        if seed == seeds[0]:
            suggestion = tests[0]["suggested_field"]
        print(case, "seed", seed, {key: tests[-1][key] for key in ("smallest_loss", "suggested_field")}, flush=True)
    for multiple in MULTIPLES:
        found = [accuracy(flags, seed, multiple * suggestion) for seed in seeds]
        runs.append({"multiple": multiple, "learning_rate": multiple * suggestion, "accuracies": found})
        print(case, f"rate {multiple * suggestion:.3g}", [f"{100 * each:.2f} %" for each in found], flush=True)
    return {
        "case": case,
        "flags": flags,
        "suggestions": [test["suggested_field"] for test in tests],
        "runs": runs,
        "test": tests[0],
    }


def table(record: dict) -> str:
    named = [f"times {multiple:g}" if multiple >= 1 else f"times 1/{1 / multiple:g}" for multiple in MULTIPLES]
    named = ["suggestion" if name == "times 1" else name for name in named]
    lines = ["| digits, ResNet-18 with 16 channels | suggested | " + " | ".join(named) + " |", "|---" * (2 + len(named)) + "|"]
    for row in record["results"]:
        cells = [f"{100 * sum(run['accuracies']) / len(run['accuracies']):.1f} %" for run in row["runs"]]
        lines.append(f"| {row['case']} | {row['runs'][MULTIPLES.index(1)]['learning_rate']:.2g} | " + " | ".join(cells) + " |")
    lines += ["", f"Validation accuracy with multiples of the suggested rate; seeds {', '.join(map(str, record['seeds']))}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    seeds = parser.parse_args().seeds
    results = [measured(case, seeds) for case in CASES]
    record = {"provenance": provenance(), "common": COMMON, "seeds": seeds, "results": results}
    (ROOT / "benchmarks/results/lr_range.json").write_text(json.dumps(record, indent=1) + "\n")
    lr.draw(results[0]["test"], ROOT / "docs/lr.png")


if __name__ == "__main__":
    main()
