"""Measures how soon a run of several processes ends after one has failed or got stuck, and whether its last line says why.

    python benchmarks/process_failures.py [--cases killed ...] [--times 3] [--processes 3] [--load 4] [--suspend-seconds 150]

Each case starts real processes that train a small model and read their data from a slow source, lets one of them fail at a
step, and waits until the last process has ended. A line is complete if it names the rank at fault, its host, the step and
activity, and a place in a file. Prints a table, and writes benchmarks/results/process_failures.json.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
FAILS_AT = 20  # step
LIMIT_SECONDS = 90  # of a run that does not end
LIMITS = {"late_seconds": 4.0, "stuck_seconds": 12.0, "silence_seconds": 8.0, "start_seconds": 20.0}
# case -> (what the last line of the others must match; exit code of the run)
CASES = {
    "killed": (r"exited without a message|sent no sign of life", 1),
    "suspended": (r"sent no sign of life", 1),
    "GIL held": (r"sent no sign of life.*in hold_the_gil", 1),
    "stuck in data": (r"stuck: no progress.*in read", 1),
    "stuck in constructor": (r"stuck: no progress.*in __init__", 1),
    "exception in data": (r"the disk is on fire", 1),
    "other seed": (r"seed", 2),
    "missing": (r"did not start", 1),
    "port taken": (r"coordinator port.*choose another port", 2),
    "unequal devices": (r"devices: rank \d+ on \S+ has 1 and rank \d+ on \S+ has 2", 2),
    "SIGTERM": (r"stopped by SIGTERM at step \d+", 75),
    "all suspended": (r"trained 200 steps", 0),
    "slow directory": (r"trained 200 steps", 0),
    "killed, slow directory": (r"exited without a message|sent no sign of life", 1),
    "directory gone": (r"trained 200 steps", 0),
}
ANYWHERE = ("other seed", "missing", "port taken", "unequal devices", "SIGTERM")  # lines without a step


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(10_000)


class Images:
    """A data source that fails at a step, on one rank."""

    def __init__(self, case: str, workdir: Path):
        self.case, self.workdir = case, workdir
        if case == "stuck in constructor":
            self.happen()
            time.sleep(10_000)

    def happen(self) -> None:
        """Record when it happens; one system call, so that nothing can come in between."""
        os.mkdir(self.workdir / f"failed-{time.time()}")

    def read(self, step: int) -> np.ndarray:
        time.sleep(0.02)
        if step == FAILS_AT and self.case in FAILURES:
            self.happen()
            FAILURES[self.case]()
        return np.random.default_rng(step).integers(0, 255, (8, 8, 8, 3), dtype=np.uint8)


class Linear:
    def __init__(self, config):
        self.classes = config.classes

    def init(self, key, image_shape):
        return {"kernel": np.zeros((int(np.prod(image_shape)), self.classes), np.float32)}, {}

    def apply(self, params, batch_stats, images, train):
        return images.reshape(len(images), -1) @ params["kernel"], {}


def on_fire() -> None:
    raise RuntimeError("the disk is on fire")


FAILURES = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "killed, slow directory": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "suspended": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "GIL held": hold_the_gil,
    "stuck in data": lambda: time.sleep(10_000),
    "exception in data": on_fire,
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


def train(case: str, workdir: Path, is_at_fault: bool) -> None:
    """A process of the run."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxdp.config import Mesh
    from jaxdp.distributed import launchers, processes, runtime
    from jaxdp.distributed.stack_traces import place_of
    from jaxdp.distributed.status_files import Directory
    from jaxdp.distributed.verdict import Limits
    from jaxdp.errors import EXIT_STOPPED

    class SlowDirectory(Directory):
        def write(self, name: str, text: str) -> None:
            time.sleep(2)
            super().write(name, text)

        def read(self, name: str) -> str | None:
            time.sleep(2)
            return super().read(name)

    stop: list[str] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(signal.Signals(number).name))
    fault = case if is_at_fault else ""
    cluster = launchers.detect()
    assert cluster is not None
    board = (SlowDirectory if "slow directory" in case else Directory)(workdir / "processes")
    group = None
    try:
        group = processes.Processes.join(cluster, board, Limits(**LIMITS))
        runtime.start(Mesh(cpu_devices=2 if fault == "unequal devices" else 1), group)
        outcome = steps(group, Images(fault, workdir), seed=7 if fault == "other seed" else 0, stop=stop, case=case)
    except BaseException as error:
        if group is not None:
            failed = type(error).__name__ == "JaxRuntimeError"
            group.fail(str(error), getattr(error, "exit_code", 1), failed, place=place_of(error))
        print(f"jaxdp: rank {cluster.rank} on {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
        os._exit(getattr(error, "exit_code", 1))
    print(outcome, file=sys.stderr, flush=True)
    group.close()
    os._exit(EXIT_STOPPED if outcome.startswith("stopped") else 0)


def steps(group, images: Images, *, seed: int, stop: list[str], case: str) -> str:
    import jax

    import jaxdp
    from jaxdp import models
    from jaxdp.config import Config, Data, Model, Reduce
    from jaxdp.data import prefetch
    from jaxdp.errors import ConfigError
    from jaxdp.parallel.mesh import make_mesh
    from jaxdp.training import requests
    from jaxdp.training.state import create_state
    from jaxdp.training.step import make_train_step

    seeds = group.all_gather_object("seeds", seed)
    if len(set(seeds)) > 1:
        rank = next(rank for rank, value in enumerate(seeds) if value != seeds[0])
        raise ConfigError("seed", seeds[rank], reason=f"rank {rank} has another than rank 0, {seeds[0]}")
    group.set_activity("compile")
    jaxdp.register_model("linear", Linear)
    config = Config(
        data=Data(source="synthetic", image_size=8), model=Model(name="linear", classes=10), reduce=Reduce(strategy="psum")
    )
    mesh, model = make_mesh(group.num_processes, 1), models.create(config.model)
    step = make_train_step(config, model, mesh, pixel_stats=(127.0, 64.0), accumulation=1)
    state = create_state(config, model, mesh)
    rows = np.arange(8, dtype=np.int32)
    rates = {"learning_rate": np.float32(0.01), "momentum": np.float32(0.9), "seed": np.uint32(0)}
    for number in range(200):
        group.set_activity("load", number, "waiting for images")
        batch = prefetch.to_global({"images": images.read(number), "labels": rows, "positions": rows.astype(np.uint32)}, mesh)
        batch[requests.REQUESTS] = requests.on_devices(group.next_request(stop[0] if stop else None), mesh)
        group.set_activity("step", number, "waiting for the results")
        group.status.begin_iteration("step")
        state, metrics = step(state, batch, rates)
        group.agree(requests.NAMES[int(jax.device_get(metrics["request"]))])
        if agreed := group.sync_point(stop[0] if stop else None):
            return f"stopped by {agreed.reason} at step {number}"
        group.status.record_progress()
        if case == "directory gone" and number == FAILS_AT and group.is_rank0:
            folder = group.supervisor.board.path
            folder.rename(folder.with_name("gone"))
            folder.write_text("")
    return "trained 200 steps"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(case: str, count: int, rank: int, options: argparse.Namespace) -> dict:
    """Start the processes of a case, of which `rank` fails; how long the run took to end, and what it printed last."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        workdir, port = Path(folder), free_port()
        if case == "port taken":
            taken = stack.enter_context(socket.create_server(("127.0.0.1", port)))
            assert taken.fileno()
        running: dict[int, subprocess.Popen] = {}
        for each in range(count):
            if case == "missing" and each == rank:
                continue
            variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
            command = [sys.executable, __file__, "--process", case, str(workdir), str(int(each == rank))]
            running[each] = subprocess.Popen(
                command, env=os.environ | variables | {"JAX_PROCESS_ID": str(each)}, stderr=open(workdir / f"{each}.err", "w")
            )
        began = time.time()
        if case == "all suspended":
            suspend_all(list(running.values()), workdir, options.suspend_seconds)
            began = time.time()
        deadline = time.time() + LIMIT_SECONDS
        happened = None
        while time.time() < deadline and any(process.poll() is None for process in running.values()):
            time.sleep(0.05)
            if happened is None and (marks := list(workdir.glob("failed-*"))):
                happened = float(marks[0].name.partition("-")[2])
            ended = [each for each, process in running.items() if process.poll() is not None]
            if case in ("suspended", "GIL held") and len(ended) == count - 1 and rank not in ended:
                running[rank].kill()  # as a launcher does
        seconds = time.time() - (happened or began)
        for process in running.values():
            process.kill()
            process.wait()
        lines = {each: last_line((workdir / f"{each}.err").read_text()) for each in running}
        codes = {each: process.returncode for each, process in running.items()}
        return judge(case, rank, seconds, lines=lines, codes=codes)


def suspend_all(running, workdir: Path, seconds: float) -> None:
    """Suspend a whole run while it trains, and continue it."""
    while not all(f'"step": {FAILS_AT}' in text for text in status_texts(workdir, len(running))):
        if any(process.poll() is not None for process in running):
            return
        time.sleep(0.05)
    for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0)):
        for process in running:
            process.send_signal(number)
        time.sleep(pause)


def status_texts(workdir: Path, count: int) -> list[str]:
    files = [workdir / "processes" / f"{rank}.json" for rank in range(count)]
    return [re.sub(r'"step": [2-9]\d', f'"step": {FAILS_AT}', file.read_text()) if file.exists() else "" for file in files]


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if re.match("jaxdp: (?!progress|no progress|stack)|trained|stopped", line)]
    return lines[-1] if lines else (text.splitlines() or ["(nothing)"])[-1][:300]


def judge(case: str, rank: int, seconds: float, *, lines: dict[int, str], codes: dict[int, int]) -> dict:
    """Whether the lines of the processes that did not fail name the cause, and no healthy rank."""
    pattern, code = CASES[case]
    others = {each: line for each, line in lines.items() if each != rank or code in (0, 75, 2)} or lines
    named = all(re.search(pattern, line) for line in others.values())
    blamed = {int(found[1]) for line in others.values() for found in [re.search(r"rank (\d+) on \S+ failed", line)] if found}
    step = "" if case == "stuck in constructor" else ".*step"
    complete = all(re.search(rf"rank {rank} on \S+ failed {step}.*\.py:\d+ in ", line) for line in others.values())
    if case == "SIGTERM":
        named = len({re.sub(".* at", "", line) for line in lines.values()}) == 1 and "SIGTERM" in lines[rank] + lines.get(0, "")
    return {
        "case": case,
        "rank": rank,
        "seconds": round(seconds, 1),
        "named": named,
        "complete": complete or case in ANYWHERE or not CASES[case][1],
        "healthy rank blamed": bool(blamed - {rank}),
        "codes": codes,
        "code": all(each == code for other, each in codes.items() if other in others),
        "lines": lines,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--ranks", nargs="*", type=int)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the run")
    parser.add_argument("--suspend-seconds", type=float, default=150)
    options = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load)]
    from jaxdp.bench.environment import provenance

    rows = []
    try:
        for case in options.cases:
            for rank in options.ranks or range(options.processes):
                for _ in range(options.times):
                    rows.append(run(case, options.processes, rank, options))
                    print(json.dumps(rows[-1]), flush=True)
    finally:
        for process in busy:
            process.kill()
    kept = {name: getattr(options, name) for name in ("processes", "load", "suspend_seconds")}
    record = {"provenance": provenance(("jax", "numpy")), "rows": rows} | kept | {"limits": LIMITS}
    path = ROOT / "benchmarks" / "results" / "process_failures.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


def table(record: dict) -> str:
    """By case and by whether rank 0 fails: seconds until the last process has ended, and what the last lines say."""
    lines = ["| case | fails | runs | seconds, median | most | cause named | with step and place | healthy rank blamed |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    roles: dict[tuple[str, str], list[dict]] = {}
    for row in record["rows"]:
        roles.setdefault((row["case"], "another" if row["rank"] else "rank 0"), []).append(row)
    for (case, role), rows in roles.items():
        seconds = [row["seconds"] for row in rows]
        named, complete, wrong = (sum(row[name] for row in rows) for name in ("named", "complete", "healthy rank blamed"))
        shown = "-" if case in ANYWHERE or not CASES[case][1] else complete
        cells = [case, role, len(rows), f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}", named, shown, wrong]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        train(sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "1")
    else:
        main()
