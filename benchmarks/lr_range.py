"""Whether the suggestion of `jaxdp bench lr` is a good learning rate: accuracy of runs with multiples of it.

    python benchmarks/lr_range.py [--seeds 0 1]   (about half an hour on two cores)

For each case: a range test on the training split `fit`, then runs with the suggested rate times 1/16, 1/4, 1, 4 and 16,
evaluated on the validation split. Writes benchmarks/results/lr_range.json, and the plot of the first case as docs/lr.png.
"""

from statistics import mean

from common import ROOT, accuracy_of, arguments, markdown, write

import jaxdp
from jaxdp.bench import lr
from jaxdp.bench.environment import provenance

COMMON = ["--model.depth", "18", "--model.width", "16", "--data.train-split", "fit", "--data.eval-split", "validation"]
COMMON += ["--logging.no-tensorboard", "--mesh.cpu-devices", "1", "--evaluation.every-epochs", "None"]
ONE_BATCH = ["--batch.0.global-batch", "256", "--batch.1.global-batch", "256"]
CASES = {
    "LARS, batch 64": ["--batch.1.global-batch", "64"],
    "SGD, batch 64": ["--optimizer.name", "sgd", "--batch.1.global-batch", "64"],
    "LARS, batch 256": ONE_BATCH,
    "SGD, batch 256": ["--optimizer.name", "sgd", *ONE_BATCH],
}
MULTIPLES = {1 / 16: "times 1/16", 1 / 4: "times 1/4", 1: "suggestion", 4: "times 4", 16: "times 16"}


def accuracy(flags: list[str], seed: int, rate: float) -> float:
    flags = [*flags, "--seed", str(seed), "--schedule.learning-rate", f"{rate:g}"]
    return accuracy_of(jaxdp.load_config("digits", flags)) or 0.0


def measured(case: str, seeds: list[int]) -> dict:
    flags, runs = [*COMMON, *CASES[case]], []
    configs = [jaxdp.load_config("digits", [*flags, "--seed", str(seed)]) for seed in seeds]
    tests = [lr.run(config, lowest=1e-4, highest=1e2) for config in configs]
    suggestions = [test["suggested_field"] for test in tests]
    for multiple in MULTIPLES:
        rate = multiple * suggestions[0]
        found = [accuracy(flags, seed, rate) for seed in seeds]
        runs.append({"multiple": multiple, "learning_rate": rate, "accuracies": found})
        print(case, f"rate {rate:.3g}", [f"{100 * each:.2f} %" for each in found], flush=True)
    return {"case": case, "flags": CASES[case], "suggestions": suggestions, "runs": runs, "test": tests[0]}


def table(record: dict) -> str:
    rows = []
    for row in record["results"]:
        suggestion = next(run["learning_rate"] for run in row["runs"] if run["multiple"] == 1)
        rows.append((row["case"], f"{suggestion:.2g}", *(f"{100 * mean(run['accuracies']):.1f} %" for run in row["runs"])))
    below = f"Validation accuracy with multiples of the suggested rate; seeds {', '.join(map(str, record['seeds']))}."
    return markdown(("digits, ResNet-18 with 16 channels", "suggested", *MULTIPLES.values()), rows, below)


def main() -> None:
    seeds = arguments(__doc__, seeds=[0, 1]).seeds
    results = [measured(case, seeds) for case in CASES]
    write("lr_range", {"provenance": provenance(), "common": COMMON, "seeds": seeds, "results": results}, table)
    lr.draw(results[0]["test"], ROOT / "docs/lr.png")


if __name__ == "__main__":
    main()
