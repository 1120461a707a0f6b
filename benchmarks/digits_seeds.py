"""Accuracy and duration of the default run for ten seeds, with XLA's code for this processor and for an older one.

    python benchmarks/digits_seeds.py [--seeds 0 1 ...] [--kinds default ...]   # accuracy
    python benchmarks/digits_seeds.py --time                                   # seconds, on an idle machine

Other vector instructions add in another order, so the results differ as they do for another seed. --time measures
durations with an empty and with a full compilation cache. Adds to benchmarks/results/digits_seeds.json and skips runs already
there. The plot of seed 0 becomes docs/digits.png.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import ROOT, arguments, markdown, read, write

from jaxdp import load_config
from jaxdp.bench.environment import provenance
from jaxdp.validation import to_json

NAME = "digits_seeds"
ASKED_FOR = dict(os.environ)
NATIVE = "native"  # code for this processor
FIRST_VECTORS = "AVX-512"  # of the processor of rows without "vectors"
# What a run is measured as, its codes and flags: the default run; on the mesh of CI's run of two processes; on the split on
# which it was chosen.
KINDS = {
    "default": ((NATIVE, "AVX2"), []),
    "8 devices": ((NATIVE,), ["--mesh.cpu-devices", "8"]),
    "validation split": ((NATIVE,), ["--data.train-split", "fit", "--data.eval-split", "validation"]),
}
KEPT = ("accuracy", "top5", "loss", "eval_examples", "steps", "epochs", "devices", "device_kind", "mesh")
TIMED = ("accuracy", "wall_seconds", "seconds_to_first_step", "training_seconds", "evaluation_seconds", "images_per_second")


def started(flags: list[str], workdir: Path, cache: Path, code: str = NATIVE) -> dict:
    """The JSON result of `python train.py` with these flags."""
    environment = ASKED_FOR | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    if code != NATIVE:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_cpu_max_isa={code}".strip()
    command = [sys.executable, "train.py", "--json", "--workdir", str(workdir), *flags]
    return json.loads(subprocess.check_output(command, cwd=ROOT, text=True, env=environment))


def widest_vectors() -> str:
    """The widest vector instructions of this processor."""
    features = set(Path("/proc/cpuinfo").read_text().split())
    return next((name for name, feature in (("AVX-512", "avx512f"), ("AVX2", "avx2")) if feature in features), "none")


def vectors_of(row: dict) -> str:
    return row.get("vectors", FIRST_VECTORS)


def accuracies(record: dict, seeds: list[int], kinds: list[str], *, folder: Path, made: dict) -> None:
    """Add the runs that the record does not have yet."""
    for seed, kind, code in [(seed, each, code) for seed in seeds for each in kinds for code in KINDS[each][0]]:
        facts = {"as": kind, "seed": seed, "code": code, "vectors": widest_vectors()}
        if any(facts.items() <= (row | {"vectors": vectors_of(row)}).items() for row in record["runs"]):
            continue
        workdir = folder / f"{kind}-{seed}-{code}"
        result = started(["--seed", str(seed), *KINDS[kind][1]], workdir, folder / "cache", code)
        if (kind, seed, code) == ("default", 0, NATIVE):
            shutil.copy(workdir / "training.png", ROOT / "docs/digits.png")
        shutil.rmtree(workdir)
        facts["cores"] = len(os.sched_getaffinity(0))
        record["runs"].append(facts | {name: result[name] for name in KEPT} | {"provenance": made})
        write(NAME, record)
        print(f"{kind}, seed {seed}, code {code}: {100 * result['accuracy']:.2f} %, loss {result['loss']:.4f}", flush=True)


def times(record: dict, *, folder: Path, made: dict) -> None:
    """Add the duration with an empty compilation cache, and then with a full one."""
    for cache_state in ("empty", "filled"):
        result = started([], folder / cache_state, folder / "cache")
        row = {"recipe": "now", "cache": cache_state} | {key: result[key] for key in TIMED}
        record["timed"].append(row | {"provenance": made})
        write(NAME, record)
        print(f"{cache_state} cache: {row['wall_seconds']:.0f} s, accuracy {100 * row['accuracy']:.2f} %", flush=True)


def table(record: dict) -> str:
    groups: dict[str, list[dict]] = {}
    for row in record["runs"]:
        words = [] if row["as"] == "default" else [row["as"]]
        words += [f"processor with {vectors_of(row)}"] + [f"code for {row['code']}"] * (row["code"] != NATIVE)
        groups.setdefault(", ".join(words), []).append(row)
    rows = []
    for name, runs in groups.items():
        scores = sorted(100 * row["accuracy"] for row in runs)
        rows.append((name, str(len(runs)), *(f"{score:.2f} %" for score in (scores[0], median(scores), scores[-1]))))
    timed = [row for row in record["timed"] if row["recipe"] == "now"]
    made, epochs = record["runs"][0]["provenance"], record["config"]["epochs"]
    processors = " and an ".join(dict.fromkeys(row["provenance"]["processor"] for row in record["runs"]))
    first, cores = timed[0], ", ".join(sorted({str(row["provenance"]["cores"]) for row in timed}))
    one = first["seconds_to_first_step"] + (first["training_seconds"] + first["evaluation_seconds"]) / epochs
    durations = [
        (row["cache"], *(f"{row[key]:.0f} s" for key in TIMED[1:3]), f"{row['images_per_second']:.0f}") for row in timed
    ]
    return markdown(
        ("", "runs", "worst", "median", "best"),
        rows,
        markdown(("compilation cache", "whole command", "first step", "images/s in training"), durations),
        f"Held-out accuracy of runs with seeds from 0 to 9, by `benchmarks/digits_seeds.py`, on an {processors}, Python "
        f"{made['python']}, JAX {made['versions']['jax']}; durations on {cores} cores, compilation included (one of the "
        f"{epochs:g} epochs: about {one:.0f} s). The recipe was chosen on the validation split: 1,149 of the 1,437 training "
        "images to train, the other 288 to evaluate.",
    )


def main():
    given = arguments(__doc__, seeds=[*range(10)], kinds=[*KINDS], time=False)
    config = json.loads(to_json(load_config("digits")))
    record = read(NAME, {"command": "python train.py --seed S", "config": config, "runs": [], "timed": []})
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # this process only records the environment
    made = provenance()  # before the record itself changes
    with tempfile.TemporaryDirectory() as folder:
        if given.time:
            times(record, folder=Path(folder), made=made)
        else:
            accuracies(record, given.seeds, given.kinds, folder=Path(folder), made=made)
    print(table(record))


if __name__ == "__main__":
    main()
