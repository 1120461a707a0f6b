"""Accuracy on the digits against the global batch, technique by technique, at the same number of epochs.

    python benchmarks/large_batch.py [--seeds 0 1 2]

A narrow ResNet-18 (8 channels in its first stage) so that the ladder fits into half an hour on two cores. Rates are chosen
on a validation split, on the smallest batch for SGD and for every batch for LARS; accuracy is measured on the held-out
digits. Writes benchmarks/results/large_batch.json and docs/large_batch.png.
"""

import dataclasses

from common import (
    ROOT,
    accuracy_of,
    arguments,
    draw_accuracies,
    made_on,
    markdown,
    mean_and_deviation,
    narrow_resnet,
    read,
    write,
)

from jaxdp.bench.environment import provenance
from jaxdp.config import Config, Mesh, Optimizer, Phase, Schedule

EPOCHS, WARM_UP, SMALLEST = 12.0, 3.0, 64
LADDER = (64, 356, 1424)  # up to the training set but for 13 images, so that four devices share it and its quarter evenly
SGD_RATES, LARS_RATES = (0.1, 0.2, 0.4, 0.8), (5.0, 10.0, 20.0, 40.0)
TECHNIQUES = {  # -> color
    "SGD alone": "#000000",
    "+ linear scaling, warm-up": "#0072B2",
    "+ LARS": "#D55E00",
    "+ label smoothing": "#009E73",
    "+ batch-size control": "#CC79A7",
}


def config_for(technique: str, batch: int, sgd_rate: float, lars_rate: float, seed=0, tuning=False) -> Config:
    """One run; every technique has those before it, LARS in place of SGD's scaled rate."""
    level = list(TECHNIQUES).index(technique)
    phases = (Phase(batch),)
    if level >= 4 and batch > SMALLEST:  # a quarter of the batch for the first half of the run
        phases = (Phase(batch // 4, until_epoch=EPOCHS / 2), Phase(batch))
    if level >= 2:
        optimizer = Optimizer("lars", weight_decay=1e-4, label_smoothing=0.1 if level >= 3 else 0.0)
        schedule = Schedule("polynomial", lars_rate, warmup_epochs=WARM_UP)
    else:
        optimizer = Optimizer("sgd", weight_decay=1e-4)
        schedule = Schedule("cosine", sgd_rate, warmup_epochs=0.0)
        if level == 1:
            schedule = Schedule("cosine", sgd_rate * batch / SMALLEST, warmup_epochs=WARM_UP, start=sgd_rate)
    return narrow_resnet(
        "large-batch",
        tuning,
        seed=seed,
        epochs=EPOCHS,
        batch=phases,
        optimizer=optimizer,
        schedule=schedule,
        mesh=Mesh(cpu_devices=4),
    )


def chosen(rates, make) -> float:
    """The rate with the best accuracy on the validation part of the training digits."""
    return max(rates, key=lambda rate: accuracy_of(make(rate)) or 0.0)


def percents_by_case(record: dict) -> dict[tuple[int, str], list[float | None]]:
    """(batch, technique) -> accuracies in %, None for a run that diverged."""
    return {(row["batch"], row["technique"]): [score and 100 * score for score in row["accuracies"]] for row in record["rows"]}


def table(record: dict) -> str:
    def cell(scores):
        real = [score for score in scores if score is not None]
        lost = f" ({len(scores) - len(real)} diverged)" if len(real) < len(scores) else ""
        return mean_and_deviation(real) + lost if real else "diverged"

    percents = percents_by_case(record)
    rows = [(str(batch), *(cell(percents[batch, technique]) for technique in TECHNIQUES)) for batch in LADDER]
    lars = ", ".join(f"{rate:g} at {batch}" for batch, rate in record["rates"]["lars"].items())
    return markdown(
        ("global batch", *TECHNIQUES),
        rows,
        f"Learning rates: SGD {record['rates']['sgd']:g} at {SMALLEST} images; LARS {lars}. By `benchmarks/large_batch.py` on "
        f"{made_on(record)}.",
    )


def draw(record: dict) -> None:
    percents = percents_by_case(record)
    series = {
        technique: (color, LADDER, [[score or 0.0 for score in percents[batch, technique]] for batch in LADDER])
        for technique, color in TECHNIQUES.items()
    }
    axis = {"xscale": "log", "xlabel": "global batch (images)", "xticks": LADDER, "xticklabels": LADDER}
    draw_accuracies(ROOT / "docs/large_batch.png", series, **axis)


def main():
    seeds = arguments(__doc__, seeds=[0, 1, 2]).seeds
    sgd = chosen(SGD_RATES, lambda rate: config_for("SGD alone", SMALLEST, rate, 0.0, tuning=True))
    lars = {
        batch: chosen(LARS_RATES, lambda rate, batch=batch: config_for("+ LARS", batch, sgd, rate, tuning=True))
        for batch in LADDER
    }
    print("rates", sgd, lars, flush=True)
    rows = []
    for batch in LADDER:
        for technique in TECHNIQUES:
            scores = [accuracy_of(config_for(technique, batch, sgd, lars[batch], seed)) for seed in seeds]
            rows.append({"batch": batch, "technique": technique, "accuracies": scores})
            print(batch, technique, scores, flush=True)
    settings = dataclasses.asdict(config_for("+ batch-size control", LADDER[-1], sgd, lars[LADDER[-1]]))
    record = {"provenance": provenance(), "rates": {"sgd": sgd, "lars": lars}, "rows": rows, "last_config": settings}
    write("large_batch", record, table)
    draw(read("large_batch"))


if __name__ == "__main__":
    main()
