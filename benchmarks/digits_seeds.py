"""Accuracy and duration of the default run for ten seeds, with XLA's code for this processor and for an older one.

    python benchmarks/digits_seeds.py [--seeds 0 1 ...] [--codes native AVX2] [--together 2]   # accuracy
    python benchmarks/digits_seeds.py --as "8 devices" --codes native                         # on another mesh, or split
    python benchmarks/digits_seeds.py --time [--pairs 2]                                      # seconds, on an idle machine

Other vector instructions add in another order, so the results differ as they do for another seed. Every run is a process;
several at a time share the cores, so only --time measures durations, alternately with the previous recipe. Adds to
benchmarks/results/digits_seeds.json and skips runs already there. The plot of seed 0 becomes docs/digits.png.
"""

import argparse
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path
from statistics import median

from jaxdp import load_config
from jaxdp.bench.environment import provenance
from jaxdp.validation import to_json

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks/results/digits_seeds.json"
ASKED_FOR = dict(os.environ)
NATIVE = "native"  # code for this processor
FIRST_VECTORS = "AVX-512"  # of the processor of rows without "vectors"
# What a run is measured as: the default run; on the mesh of CI's run of two processes; on the split on which it was chosen.
AS = {
    "default": [],
    "8 devices": ["--mesh.cpu-devices", "8"],
    "validation split": ["--data.train-split", "fit", "--data.eval-split", "validation"],
}
KEPT = ("accuracy", "top5", "loss", "eval_examples", "steps", "epochs", "devices", "device_kind", "mesh")
TIMED = ("accuracy", "wall_seconds", "seconds_to_first_step", "training_seconds", "evaluation_seconds", "images_per_second")
# What configs/digits.py was before: below 97 % for one seed of four on one machine.
BEFORE = shlex.split(
    "--epochs 10 --batch.0.global-batch 128 --batch.0.until-epoch 6 --batch.1.global-batch 256 --schedule.learning-rate 8 "
    "--optimizer.trust-coefficient 0.001 --schedule.warmup-epochs 2 --model.norm-momentum 0.7"
)


def started(flags: list[str], workdir: Path, cache: Path, code: str = NATIVE, cores: set | None = None) -> dict:
    """The JSON result of `python train.py` with these flags. cores: CPU cores of the run (default: those of this process)."""
    isa_flags = [] if code == NATIVE else [f"--xla_cpu_max_isa={code}"]
    environment = ASKED_FOR | {"XLA_FLAGS": " ".join([ASKED_FOR.get("XLA_FLAGS", ""), *isa_flags]).strip()}
    command = [sys.executable, "train.py", "--json", "--workdir", str(workdir), "--compile.cache", str(cache), *flags]
    pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=environment, preexec_fn=pin)
    return json.loads(done.stdout)


@cache
def widest_vectors() -> str:
    """The widest vector instructions of this processor."""
    features = set(Path("/proc/cpuinfo").read_text().split())
    return next((name for name, feature in (("AVX-512", "avx512f"), ("AVX2", "avx2")) if feature in features), "none")


def vectors_of(row: dict) -> str:
    return row.get("vectors", FIRST_VECTORS)


@cache
def made_with() -> dict:
    return provenance()


def record() -> dict:
    if OUT.exists():
        return json.loads(OUT.read_text())
    config = json.loads(to_json(load_config("digits")))
    return {"command": "python train.py --seed S", "config": config, "runs": [], "timed": []}


def add(part: str, row: dict) -> None:
    """Add a row to the record, which another process may be adding to."""
    with open(__file__) as lock:
        flock(lock, LOCK_EX)
        OUT.write_text(json.dumps(record() | {part: [*record()[part], row]}, indent=1) + "\n")


def accuracies(seeds: list[int], codes: list[str], kind: str, together: int, folder: Path) -> None:
    """The runs that the record does not have yet, `together` at a time."""
    wanted = [(seed, code) for seed in seeds for code in codes]
    here = [row for row in record()["runs"] if row["as"] == kind and vectors_of(row) == widest_vectors()]
    known = {(row["seed"], row["code"]) for row in here}
    missing = [one for one in wanted if one not in known]
    cores, free = sorted(os.sched_getaffinity(0)), queue.Queue()
    for place in range(together):
        free.put(set(cores[place::together]))

    def run(one):
        seed, code = one
        mine, workdir = free.get(), folder / f"{seed}-{code}"
        try:
            result = started(["--seed", str(seed), *AS[kind]], workdir, folder / "cache", code, mine)
        finally:
            free.put(mine)
        if (kind, *one) == ("default", 0, NATIVE):
            shutil.copy(workdir / "training.png", ROOT / "docs/digits.png")
        shutil.rmtree(workdir)
        facts = {"as": kind, "seed": seed, "code": code, "vectors": widest_vectors(), "cores": len(mine)}
        return facts | {name: result[name] for name in KEPT}

    with ThreadPoolExecutor(together) as pool:
        for row in pool.map(run, missing):
            add("runs", row | {"provenance": made_with()})
            print(f"seed {row['seed']}, code {row['code']}: {100 * row['accuracy']:.2f} %, loss {row['loss']:.4f}", flush=True)


def times(pairs: int, folder: Path) -> None:
    """Time this recipe and the previous one alternately: once with an empty cache, then `pairs` times with a full one."""
    for turn in range(pairs + 1):
        for name, flags in (("now", []), ("before", BEFORE)):
            cache = folder / f"cache-{name}"
            facts = {"recipe": name, "flags": flags, "cache": "filled" if cache.exists() else "empty"}
            result = started(flags, folder / f"{name}-{turn}", cache)
            row = facts | {key: result[key] for key in TIMED} | {"provenance": made_with()}
            add("timed", row)
            print(
                f"{name:6} {facts['cache']:6} {row['wall_seconds']:.0f} s, accuracy {100 * row['accuracy']:.2f} %", flush=True
            )


def spread(rows: list[dict]) -> dict:
    """The worst, the median and the best accuracy of some runs, in %."""
    values = sorted(100 * row["accuracy"] for row in rows)
    return {"runs": len(values), "worst": values[0], "median": median(values), "best": values[-1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--codes", nargs="+", default=[NATIVE, "AVX2"])
    parser.add_argument("--as", dest="kind", choices=AS, default="default")
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--pairs", type=int, default=2)
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # this process only records the environment
    made_with()  # before the record itself changes
    with tempfile.TemporaryDirectory() as directory:
        if arguments.time:
            times(arguments.pairs, Path(directory))
        else:
            accuracies(arguments.seeds, arguments.codes, arguments.kind, arguments.together, Path(directory))
    rows = record()["runs"]
    keys = [(row["as"], row["code"], vectors_of(row)) for row in rows]
    for key in dict.fromkeys(keys):
        print(*key, spread([row for row, its in zip(rows, keys, strict=True) if its == key]))


if __name__ == "__main__":
    main()
