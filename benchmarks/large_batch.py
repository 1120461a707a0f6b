"""Accuracy on the digits against the global batch, technique by technique, at the same number of epochs.

    python benchmarks/large_batch.py [--seeds 0 1 2]

A narrow ResNet-18 (8 channels in its first stage) so that the ladder fits into half an hour on two cores. Rates are chosen
on a validation split, on the smallest batch for SGD and for every batch for LARS; accuracy is that of the held-out
digits.
Writes benchmarks/results/large_batch.json and docs/large_batch.png.
"""

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from statistics import mean, stdev

import jaxdp
from jaxdp.bench.environment import provenance
from jaxdp.config import Config, Data, Evaluation, Logging, Mesh, Model, Optimizer, Phase, Schedule
from jaxdp.loggers.console import Quiet
from jaxdp.session import Command, run_session

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs/large_batch.png"
EPOCHS, WARM_UP, SMALLEST = 12.0, 3.0, 64
LADDER = (64, 356, 1424)  # up to the training set but for 13 images, so that four devices share it and its quarter evenly
SGD_RATES, LARS_RATES = (0.1, 0.2, 0.4, 0.8), (5.0, 10.0, 20.0, 40.0)
TECHNIQUES = ("SGD alone", "+ linear scaling, warm-up", "+ LARS", "+ label smoothing", "+ batch-size control")


def config_for(technique: str, batch: int, sgd_rate: float, lars_rate: float, seed=0, tuning=False) -> Config:
    """One run; every technique has those before it, LARS in place of SGD's scaled rate."""
    level = TECHNIQUES.index(technique)
    split = {"train_split": "fit", "eval_split": "validation"} if tuning else {}
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
    return Config(
        name="large-batch",
        seed=seed,
        epochs=EPOCHS,
        data=Data(augmentation="digits", **split),
        model=Model(depth=18, width=8, classes=10, norm_momentum=0.7),
        batch=phases,
        optimizer=optimizer,
        schedule=schedule,
        mesh=Mesh(cpu_devices=4),
        evaluation=Evaluation(every_epochs=None),
        logging=Logging(every_steps=1000, tensorboard=False),
    )


def accuracy_of(config: Config) -> float | None:
    """None for a run that diverged."""
    with tempfile.TemporaryDirectory() as workdir:
        try:
            return run_session(config, workdir, command=Command(screen=Quiet())).accuracy
        except jaxdp.TrainingError:
            return None


def chosen(rates, make) -> float:
    """The rate with the best accuracy on the validation part of the training digits."""
    return max(rates, key=lambda rate: accuracy_of(make(rate)) or 0.0)


def table(rows) -> str:
    lines = ["| global batch | " + " | ".join(TECHNIQUES) + " |", "|---" * (len(TECHNIQUES) + 1) + "|"]
    for batch in LADDER:
        cells = []
        for technique in TECHNIQUES:
            scores = next(r["accuracies"] for r in rows if (r["batch"], r["technique"]) == (batch, technique))
            real = [100 * score for score in scores if score is not None]
            lost = f" ({len(scores) - len(real)} diverged)" if len(real) < len(scores) else ""
            spread = f" +- {stdev(real):.2f}" if len(real) > 1 else ""
            cells.append(f"{mean(real):.2f}{spread}{lost}" if real else "diverged")
        lines.append(f"| {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows, path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    colors = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7")
    for technique, color in zip(TECHNIQUES, colors, strict=True):
        mine = [r for r in rows if r["technique"] == technique]
        scores = [[100 * (a or 0.0) for a in r["accuracies"]] for r in mine]
        spread = [stdev(s) if len(s) > 1 else 0.0 for s in scores]
        places = [r["batch"] for r in mine]
        axes.errorbar(places, [mean(s) for s in scores], spread, marker="o", capsize=3, label=technique, color=color)
    axes.set(xscale="log", xlabel="global batch (images)", ylabel="held-out accuracy (%)", xticks=LADDER, xticklabels=LADDER)
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def average(rows, batch, technique) -> float:
    scores = next(r["accuracies"] for r in rows if (r["batch"], r["technique"]) == (batch, technique))
    return 100 * mean(score or 0.0 for score in scores)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plot", action="store_true", help="only draw the plot from the results")
    arguments = parser.parse_args()
    results = ROOT / "benchmarks/results/large_batch.json"
    if arguments.plot:
        draw(json.loads(results.read_text())["rows"], PICTURE)
        return
    made = provenance()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        import jax

        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_compilation_cache_dir", cache)
        sgd = chosen(SGD_RATES, lambda rate: config_for("SGD alone", SMALLEST, rate, 0.0, tuning=True))
        lars = {
            batch: chosen(LARS_RATES, lambda rate, batch=batch: config_for("+ LARS", batch, sgd, rate, tuning=True))
            for batch in LADDER
        }
        rates = {"sgd": sgd, "lars": lars}
        print("rates", rates, flush=True)
        rows = []
        for batch in LADDER:
            for technique in TECHNIQUES:
                scores = [accuracy_of(config_for(technique, batch, sgd, lars[batch], seed)) for seed in arguments.seeds]
                rows.append({"batch": batch, "technique": technique, "accuracies": scores})
                print(batch, technique, scores, flush=True)
    settings = dataclasses.asdict(config_for(TECHNIQUES[-1], LADDER[-1], sgd, lars[LADDER[-1]]))
    record = {"provenance": made, "rates": rates, "rows": rows, "last_config": settings}
    results.write_text(json.dumps(record, indent=1) + "\n")
    draw(rows, PICTURE)
    print(table(rows))


if __name__ == "__main__":
    main()
