"""Measures whether and how soon a stuck process is named, and whether the run ends with the same reason on every process.

    python benchmarks/hangs.py [--places "data source" ...] [--missing] [--slow 100]

Combines every place of a run in which a process can get stuck (data source, decoder thread, writer, ...) with every manner
(asleep, in a lock, in garbage collection, opening a file on a disk that does not answer, in a loop, in native code that holds
the GIL), with one process and with two, of which a random one gets stuck. --slow: number of steps that take ten times as long
as usual, which must not be reported. Writes benchmarks/results/hangs.json and prints a table.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
STUCK_SECONDS, END_MINUTES, SILENCE_SECONDS = 3, 0.35, 6
LIMIT_SECONDS = 240
SINGLE_GIL_SECONDS = 40  # for a single process whose GIL is held: it prints its stacks, and cannot exit
TINY = [
    *("--model.name", "linear", "--epochs", "6", "--mesh.cpu-devices", "1"),
    *("--optimizer.name", "sgd", "--batch.0.until-epoch", "1"),
    *("--schedule.learning-rate", "0.002", "--schedule.warmup-epochs", "1", "--reduce.strategy", "psum"),
    *("--logging.no-tensorboard", "--logging.every-steps", "1"),
    *("--guard.stuck-seconds", str(STUCK_SECONDS), "--guard.step-minutes", str(END_MINUTES)),
    *("--guard.silence-seconds", str(SILENCE_SECONDS)),
]
# place -> (activity, number of calls of the patched function before it blocks, which rank can get stuck there)
PLACES = {
    "configuration": ("start", 0, "any"),
    "opening the data": ("load", 0, "any"),
    "compilation": ("compile", 0, "any"),
    "data source": ("load", 100, "any"),
    "decoder thread": ("load", 100, "any"),
    "collective": ("step", 6, "any"),
    "writer": ("step", 6, "first"),
    "callback": ("step", 6, "any"),
    "callback of the program": ("step", 6, "any"),
    "evaluation data": ("evaluate", 30, "any"),
    "save": ("save", 1, "any"),
    "result": ("finish", 0, "first"),
}
# place -> module:function that is patched
PATCHED = {
    "configuration": "jaxdp.training.consistency:fingerprint",
    "opening the data": "jaxdp.training.run_setup:open_datasets",
    "compilation": "jaxdp.training.step_compiler:trace_train_step",
    "decoder thread": "jaxdp.data.loader:decode",
    "collective": "jaxdp.training.step_compiler:StepCompiler._compile_train",
    "writer": "jaxdp.loggers.callbacks:MetricsFile._write",
    "save": "jaxdp.checkpoint.manager:CheckpointManager._write",
    "result": "jaxdp.training.loop:write_atomically",
    "slow step": "jaxdp.training.loop:_next_batch",
}
MANNERS = ("asleep", "lock", "garbage collection", "disk", "loop", "GIL")


class Blocker:
    """Blocks for ever once it has been called more than `after` times, and creates a file that records when."""

    def __init__(self, manner: str, after: int, folder: str):
        self.manner, self.after, self.folder, self.calls = manner, after, folder, 0

    def __call__(self, *_):
        self.calls += 1
        if self.calls > self.after:
            if self.calls == self.after + 1:
                os.mkdir(f"{self.folder}/stuck-{time.time()}")  # one system call: another thread may take the GIL
            getattr(self, self.manner.replace(" ", "_"))()

    def asleep(self):
        threading.Event().wait()

    def lock(self):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def garbage_collection(self):
        import gc

        class Garbage:
            def __del__(self):
                time.sleep(10_000)

        garbage = Garbage()
        garbage.cycle = garbage
        del garbage
        gc.collect()

    def disk(self):
        """Open a FIFO without a writer, which blocks like a mount whose server is gone."""
        path = Path(self.folder) / f"fifo{threading.get_ident()}"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path)
        open(path, "rb").read()

    def loop(self):
        while True:
            pass

    def GIL(self):
        import ctypes

        ctypes.PyDLL(None).sleep(10_000)


class Images:
    """Synthetic JPEGs. block: called for every image; seconds: time to read one."""

    classes = 10

    def __init__(self, examples: int, block=lambda: None, seconds: float = 0.0):
        import cv2
        import numpy as np

        self.examples, self.block, self.seconds = examples, block, seconds
        draw = np.random.default_rng(0)
        pixels = [draw.integers(0, 255, (80, 80, 3), np.uint8) for _ in range(10)]
        self.encoded = [cv2.imencode(".jpg", image)[1].tobytes() for image in pixels]

    def __len__(self):
        return self.examples

    def __getitem__(self, index):
        self.block()
        time.sleep(self.seconds)
        return self.encoded[index % 10], index % 10


def ignore(*_) -> None:
    pass


def call_before(owner, name: str, action) -> None:
    """Patch a function, given as an attribute of `owner`, to call `action` first."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, owner)
    original = getattr(owner, last)

    def patched(*arguments, **options):
        action()
        return original(*arguments, **options)

    setattr(owner, last, patched)


def patch_target(place: str) -> tuple[object, str]:
    """(module or class, attribute) of the function that a place patches."""
    module, _, attribute = PATCHED[place].partition(":")
    *owners, name = attribute.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def victim(workdir: str, place: str, *, manner: str, rank: int) -> None:
    """Train as a process of a run; the process of this rank gets stuck."""
    is_victim = int(os.environ.get("JAX_PROCESS_ID", "0")) == rank
    block = Blocker(manner, PLACES[place][1], str(Path(workdir).parent)) if is_victim else ignore
    if place == "collective":
        owner, name = patch_target(place)
        compile_train = getattr(owner, name)

        def compile_and_wrap(*arguments):
            step = compile_train(*arguments)

            def run(*step_arguments):
                block()
                return step(*step_arguments)

            run.as_text = step.as_text
            return run

        setattr(owner, name, compile_and_wrap)
    elif place == "callback":
        for screen in ("Quiet", "Screen"):
            call_before(importlib.import_module("jaxdp.loggers.console"), f"{screen}.step", block)
    elif place == "callback of the program":
        Linear.callback = staticmethod(block)
    elif place == "result":
        owner, name = patch_target(place)
        write = getattr(owner, name)

        def block_and_write(path, text):
            if path.name == "result.json":
                block()
            write(path, text)

        setattr(owner, name, block_and_write)
    elif place in PATCHED:
        call_before(*patch_target(place), block)
    training_block = block if place == "data source" else ignore
    evaluation_block = block if place == "evaluation data" else ignore
    train(workdir, (Images(64, training_block), Images(24, evaluation_block)))


def slow(workdir: str, *, rank: int, seconds: float, every: int, seed: int) -> None:
    """Train as a process of a run whose steps take `seconds`; every so many steps, one rank takes ten times as long."""
    processes, draw, calls = int(os.environ.get("JAX_NUM_PROCESSES", "1")), random.Random(seed), 0

    def sleep():
        nonlocal calls
        calls += 1
        is_late = calls % every == 0 and draw.randrange(processes) == rank
        time.sleep(10 * seconds if is_late else seconds)

    call_before(*patch_target("slow step"), sleep)
    train(workdir, (Images(64), Images(24)))


class Linear:
    """A model that compiles quickly. callback: called by the compiled training step."""

    callback = None

    def __init__(self, model):
        self.classes = model.classes

    def init(self, key, image_shape):
        import numpy as np

        return {"kernel": np.zeros((np.prod(image_shape), self.classes), np.float32)}, {}

    def apply(self, params, batch_stats, images, train):
        if train and self.callback:
            import jax

            jax.debug.callback(self.callback)
        return images.reshape(len(images), -1) @ params["kernel"], {}


def train(workdir: str, datasets) -> None:
    import dataclasses

    import jaxdp
    from jaxdp.config import Data, Phase
    from jaxdp.distributed.watchdog import watch
    from jaxdp.recipes import load_config

    with watch():
        jaxdp.register_model("linear", Linear)
        arguments = [*TINY, *json.loads(os.environ.get("HANGS_MORE", "[]"))]
        config = load_config("digits", arguments)
        data, batch = Data(image_size=80, threads=2), (Phase(global_batch=16, per_worker_batch=4),)
        config = dataclasses.replace(config, data=data, batch=batch)
        jaxdp.train(config, workdir, datasets=datasets)


def start(workdir: Path, processes: int, *arguments: str, more=()) -> list[subprocess.Popen]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    running = []
    for rank in range(processes):
        place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}
        place = place | {"JAX_PROCESS_ID": str(rank)} if processes > 1 else {}
        there = os.environ | place | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "HANGS_MORE": json.dumps(more)}
        command = [sys.executable, "-u", __file__, "--process", str(workdir), *arguments]
        running.append(
            subprocess.Popen(command, cwd=ROOT, env=there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return running


def collect_output(running) -> list[list[tuple[float, str]]]:
    """The lines that each process prints, with the time of each; grows while the processes run."""
    output = [[] for _ in running]

    def read(process, lines):
        for line in process.stdout:
            lines.append((time.time(), line.rstrip("\n")))

    for process, lines in zip(running, output, strict=True):
        threading.Thread(target=read, args=(process, lines), daemon=True).start()
    return output


def wait_for_all(running, seconds: float) -> list[int | None]:
    deadline, first = time.monotonic() + seconds, None
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        if first is None and any(process.poll() is not None for process in running):
            deadline = min(deadline, time.monotonic() + 30)
        time.sleep(0.1)
    codes = [process.poll() for process in running]
    for process in running:
        process.kill()
        process.wait()
    time.sleep(0.3)  # to read the rest of the output
    return codes


def run_trial(place: str, manner: str, *, processes: int, rank: int) -> dict:
    """Run until the processes exit or the time limit; returns the reports."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        running = start(workdir, processes, "victim", place, manner, str(rank))
        output = collect_output(running)
        codes = wait_for_all(running, SINGLE_GIL_SECONDS if (manner, processes) == ("GIL", 1) else LIMIT_SECONDS)
        began = next((float(path.name.removeprefix("stuck-")) for path in Path(folder).glob("stuck-*")), None)
    trial = {
        "place": place,
        "activity": PLACES[place][0],
        "manner": manner,
        "processes": processes,
        "rank": rank,
        "codes": codes,
    }
    return trial | evaluate_trial(trial, output, began=began, folder=folder)


def evaluate_trial(trial: dict, output: list[list[tuple[float, str]]], *, began: float | None, folder: str) -> dict:
    """Whether the right rank was named, when, with its stack, and whether the run ended as it must.

    output: lines with times, by rank. began: when the victim got stuck.
    """
    manner, processes, rank, codes = (trial[name] for name in ("manner", "processes", "rank", "codes"))
    if began is None:
        return {"named": False, "right": False, "ended": False, "why": "never stuck", "said": output[0][-1:]}
    gil = manner == "GIL"
    if processes > 1:
        failed, stuck = r"jaxdp: rank (\d+) \S* ?\S* ?failed.*sent no heartbeat", r"jaxdp: no progress for .*?: rank (\d+) on"
    else:
        failed, stuck = r"Timeout \(", r"jaxdp: no progress for"
    pattern = failed if gil else stuck
    witnesses = [lines for number, lines in enumerate(output) if not (gil and number == rank and processes > 1)]
    reports = [[(when - began, re.search(pattern, line)) for when, line in lines if when > began] for lines in witnesses]
    reports = [[(when, match) for when, match in lines if match] for lines in reports]
    named = all(reports)
    right = named and (processes == 1 or all(lines[-1][1][1] == str(rank) for lines in reports))
    last = [[line for _, line in lines if line.startswith("jaxdp: ")][-1:] for lines in witnesses]
    same = len({line for lines in last for line in lines}) == 1
    stack = any(re.search(r"hangs\.py.* in (asleep|lock|__del__|disk|loop|GIL)", line) for lines in output for _, line in lines)
    over = all(code not in (None, 0) for number, code in enumerate(codes) if not (gil and processes == 1))
    return {
        "named": named,
        "right": right,
        "seconds": round(max(lines[0][0] for lines in reports), 1) if named else None,
        "stack": stack,
        "ended": over and (same or (gil and processes == 1)),
        "last": (last[0] or [""])[0].replace(folder, "..."),
    }


def run_slow_trial(processes: int, seed: int, *, seconds: float = 0.5, every: int = 8) -> dict:
    """Train 48 steps, of which every eighth takes ten times as long on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        more = ["--epochs", "12", "--evaluation.every-epochs", "12", "--checkpoint.every-epochs", "12"]
        running = start(Path(folder) / "run", processes, "slow", str(seconds), str(every), str(seed), more=more)
        output = collect_output(running)
        codes = wait_for_all(running, LIMIT_SECONDS)
        log = Path(folder) / "run/metrics.jsonl"
        steps = sum("learning_rate" in line for line in log.read_text().splitlines()) if log.exists() else 0
    alarms = [
        line for lines in output for _, line in lines if re.search("no progress for .*(while loading, step|in step)", line)
    ]
    row = {"processes": processes, "seed": seed, "codes": codes, "steps": steps, "slow": steps // every, "alarms": alarms}
    failed = [[line for _, line in lines[-3:]] for lines, code in zip(output, codes, strict=True) if code]
    return row | ({"last": failed} if failed else {})


def table(record: dict) -> str:
    lines = [
        "| stuck in | activity | trials | the right rank named | seconds | with its stack | ended |",
        "|---|---|---|---|---|---|---|",
    ]
    places = collections.defaultdict(list)
    for row in record["rows"]:
        places[row["place"], row["activity"]].append(row)
    for (place, activity), rows in places.items():
        seconds = [row["seconds"] for row in rows if row.get("seconds") is not None]
        counts = [sum(bool(row.get(name)) for row in rows) for name in ("right", "stack", "ended")]
        most = f"{min(seconds):.0f} to {max(seconds):.0f}" if seconds else ""
        lines.append(f"| {place} | {activity} | {len(rows)} | {counts[0]} | {most} | {counts[1]} | {counts[2]} |")
    alarms = sum(len(run["alarms"]) for run in record["slow"])
    slow = sum(run["slow"] for run in record["slow"])
    settings = record["settings"]
    named = f"`stuck_seconds` {settings['stuck_seconds']}, `silence_seconds` {settings['silence_seconds']}"
    return "\n".join([*lines, "", f"{named}. {slow} steps of ten times the usual time: {alarms} false alarms."])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--places", nargs="*", default=list(PLACES))
    parser.add_argument("--manners", nargs="+", default=list(MANNERS))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--slow", type=int, default=100, help="number of slow steps; 0 keeps the recorded results")
    parser.add_argument("--process", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--missing", action="store_true", help="run only the cases without recorded results")
    parser.add_argument("--output", default="benchmarks/results/hangs.json")
    arguments = parser.parse_args()
    if arguments.process:
        workdir, role, *options = arguments.process
        if role == "victim":
            return victim(workdir, options[0], manner=options[1], rank=int(options[2]))
        rank = int(os.environ.get("JAX_PROCESS_ID", "0"))
        return slow(workdir, rank=rank, seconds=float(options[0]), every=int(options[1]), seed=int(options[2]))
    from jaxdp.bench.environment import provenance

    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp())
    draw, path = random.Random(0), ROOT / arguments.output
    record = json.loads(path.read_text()) if path.exists() else {"rows": [], "slow": []}
    cases = []
    for place in arguments.places:
        for manner in arguments.manners:
            for processes in arguments.processes:
                if (place, processes) == ("configuration", 1):  # only several processes compare their configuration
                    continue
                cases.append((place, manner, processes, draw.randrange(processes) if PLACES[place][2] == "any" else 0))

    if arguments.missing:
        known = {tuple(row[name] for name in ("place", "manner", "processes")) for row in record["rows"]}
        cases = [case for case in cases if case[:3] not in known]

    def run(case):
        place, manner, processes, rank = case
        row = run_trial(place, manner, processes=processes, rank=rank)
        print(json.dumps(row), flush=True)
        return row

    record["settings"] = {"stuck_seconds": STUCK_SECONDS, "step_minutes": END_MINUTES, "silence_seconds": SILENCE_SECONDS}
    with ThreadPoolExecutor(arguments.at_once) as threads:
        rows = list(threads.map(run, cases))
        again = {tuple(row[name] for name in ("place", "manner", "processes")) for row in rows}
        kept = [row for row in record["rows"] if tuple(row[name] for name in ("place", "manner", "processes")) not in again]
        record["rows"] = kept + rows
        if arguments.slow:
            runs = -(-arguments.slow // 6)
            record["slow"] = list(threads.map(lambda seed: run_slow_trial(1 + seed % 2, seed), range(runs)))
    path.write_text(json.dumps(record | {"provenance": provenance(("jax", "numpy"))}, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
