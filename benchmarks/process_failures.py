"""Measures how soon a run of several processes ends after one has failed or got stuck, and whether its last line says why.

    python benchmarks/process_failures.py [--cases killed ...] [--processes 2 3] [--starters direct launch mpirun srun]
        [--times 1] [--load 2]

Each case trains a small model with `jaxdp.train` from a slow source, lets one process fail, and waits until the last one has
ended. Starters: `direct` starts the processes as ssh would; other starters are `jaxdp launch`, Open MPI's `mpirun` and Slurm's
`srun`; srun needs a Slurm (bash benchmarks/cluster/slurm.sh start FOLDER; SLURM_CONF=FOLDER/slurm.conf). Records whether the
last lines name the cause; the rank at fault, its host, step and activity; and a place in a file. Prints a table. Results are
kept in benchmarks/results/process_failures.json, by case, processes, starter and rank, so that parts can be run on their own.
"""

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from common import ROOT, arguments, markdown, read, write
from helpers.object_storage import free_port

FAILS_AT, EVERY_IMAGE = 200, 0.02  # images that a process has read; seconds for each
SECONDS = 600  # of a run that does not end
SUSPENDED_SECONDS = 150  # of a whole run
LATE_SECONDS = 6.0  # in place of the 30 s of jaxdp
GUARD = {"step_minutes": 0.25, "silence_seconds": 8.0, "start_minutes": 0.5}
SILENT = r"sent no sign of life"
LAUNCHER = r"rank \d+ failed first, by SIGKILL"  # by `jaxdp launch`, for processes that JAX has ended with rank 0
CUT_OFF = r"no answer of the status files in \S+/processes"  # of a process on itself
# case -> (what the last line must match; exit code of the processes that did not fail)
CASES = {
    "killed": (rf"exited without a message|{SILENT}|{LAUNCHER}", 1),
    "suspended": (SILENT, 1),
    "GIL held": (rf"{SILENT}.*in hold_the_gil", 1),
    "stuck in data": (r"stuck: no progress.*in __getitem__", 1),
    "stuck in constructor": (r"stuck: no progress.*in __init__", 1),
    "exception in data": (r"the disk is on fire.*in on_fire", 1),
    "other config": (r"optimizer\.momentum: 0\.9 on rank 0, 0\.8 on rank|optimizer\.momentum: 0\.8 on rank 0, 0\.9", 2),
    "other seed": (r"seed: \d+ on rank 0, \d+ on rank", 2),
    "missing": (r"did not start", 1),
    "port taken": (r"coordinator port.*choose another port", 2),
    "unequal devices": (r"mesh\.cpu_devices: \d on rank 0, \d on rank", 2),
    "SIGTERM": (r"stopped by SIGTERM.* after step \d+", 75),
    "all suspended": (r"trained", 0),
    "slow directory": (r"trained", 0),
    "killed, slow directory": (rf"exited without a message|{SILENT}", 1),
    "directory gone": (CUT_OFF, 1),  # for good: the next exchange of objects, at an evaluation, needs it
}
WITHOUT_STEP = ("missing", "directory gone")
HANGS = ("suspended", "GIL held", "missing")  # the process at fault does not end; a launcher or a person ends it


def hold_the_gil(workdir: Path) -> None:
    ctypes.PyDLL(None).sleep(10_000)


def on_fire(workdir: Path) -> None:
    raise RuntimeError("the disk is on fire")


def remove_directory(workdir: Path) -> None:
    folder = workdir / "run" / "processes"
    folder.rename(folder.with_name("gone"))
    folder.write_text("")


FAILURES = {
    "killed": lambda workdir: os.kill(os.getpid(), signal.SIGKILL),
    "killed, slow directory": lambda workdir: os.kill(os.getpid(), signal.SIGKILL),
    "suspended": lambda workdir: os.kill(os.getpid(), signal.SIGSTOP),
    "GIL held": hold_the_gil,
    "stuck in data": lambda workdir: time.sleep(10_000),
    "exception in data": on_fire,
    "SIGTERM": lambda workdir: os.kill(os.getpid(), signal.SIGTERM),
    "directory gone": remove_directory,
}


def mark(workdir: Path, name: str) -> None:
    """Record when something happens; one system call, so that nothing can come in between."""
    os.mkdir(workdir / f"{name}-{time.time()}")


class Images:
    """Data that fail after FAILS_AT images, on one rank."""

    classes = 10

    def __init__(self, case: str, workdir: Path, fails: bool = False):
        self.case, self.workdir, self.fails, self.read = case, workdir, fails, 0
        if fails and case == "stuck in constructor":
            mark(workdir, "failed")
            time.sleep(10_000)

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int):
        self.read += 1
        if self.read == FAILS_AT:
            mark(self.workdir, "reached")
        if self.fails and self.read >= FAILS_AT and self.case in FAILURES:
            self.fails = False
            mark(self.workdir, "failed")
            FAILURES[self.case](self.workdir)
        time.sleep(EVERY_IMAGE)
        return np.full((80, 80, 3), index % 256, np.uint8), index % 10


def train(case: str, workdir: Path, faulty: int) -> None:
    """A process of the run. Its output goes to RANK.err of workdir, with any starter."""
    from jaxdp.distributed import launchers

    cluster = launchers.detect()
    assert cluster is not None
    os.dup2(os.open(workdir / f"{cluster.rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    (workdir / f"{cluster.rank}.pid").write_text(str(os.getpid()))
    fails = cluster.rank == faulty
    if fails and case == "missing":
        mark(workdir, "failed")
        time.sleep(10_000)
    from helpers.linear import NormalizedLinear

    import jaxdp
    from jaxdp.config import Config, Data, Guard, Logging, Mesh, Model, Optimizer, Phase, Schedule
    from jaxdp.distributed import supervisor

    supervisor.LATE_SECONDS = LATE_SECONDS
    if "slow directory" in case:
        slow_down()
    jaxdp.register_model("linear", NormalizedLinear)
    jaxdp.register_dataset("slow", lambda data: (Images(case, workdir, fails), Images("", workdir)))
    config = Config(
        name="fails",
        epochs=0.4 if CASES[case][1] == 0 else 4.0,
        seed=7 if fails and case == "other seed" else 0,
        data=Data(source="slow", image_size=80, threads=1, augmentation="none"),
        batch=(Phase(12),),
        model=Model(name="linear"),
        optimizer=Optimizer(name="sgd", momentum=0.8 if fails and case == "other config" else 0.9),
        schedule=Schedule(learning_rate=0.01, warmup_epochs=0.1),
        mesh=Mesh(cpu_devices=2 if fails and case == "unequal devices" else 1),
        logging=Logging(tensorboard=False),
        guard=Guard(**GUARD),
    )
    try:
        result = jaxdp.train(config, workdir / "run")
        print(f"trained {result.steps} steps", file=sys.stderr, flush=True)
    except Exception as error:
        print(f"jaxdp: {error}", file=sys.stderr, flush=True)
        code = 2 if isinstance(error, jaxdp.ConfigError) else getattr(error, "exit_code", 1)
        raise SystemExit(code) from None


def slow_down() -> None:
    """Let every access to a status file take 2 s."""
    from jaxdp.distributed.status import Directory

    for name in ("read", "write"):
        original = getattr(Directory, name)

        def slow(*arguments, original=original):
            time.sleep(2)
            return original(*arguments)

        slow.__code__ = slow.__code__.replace(co_filename=original.__code__.co_filename)  # in stacks: who waits there reads
        setattr(Directory, name, slow)


def start(starter: str, count: int, arguments: list[str], port: int) -> list[subprocess.Popen]:
    """The processes of a run, or their launcher, whose output goes to launcher.err of the folder in `arguments[1]`."""
    command = [sys.executable, __file__, "--process", *arguments]
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if starter == "direct":
        own = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
        ranks = [variables | own | {"JAX_PROCESS_ID": str(rank)} for rank in range(count)]
        return [subprocess.Popen(command, env=each, **quiet) for each in ranks]
    prefix = {
        "launch": [sys.executable, "-m", "jaxdp", "launch", "--processes", str(count), "--"],
        "srun": ["srun", "--overcommit", "--kill-on-bad-exit", "--wait=10", "-n", str(count)],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(count)],
    }[starter]
    with open(Path(arguments[1]) / "launcher.err", "w") as output:
        return [subprocess.Popen([*prefix, *command], env=variables, cwd=ROOT, stdout=output, stderr=output)]


def run(case: str, count: int, rank: int, *, starter: str) -> dict:
    """Start the processes of a case, where `rank` fails; how long the run took to end, and what it printed last."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        workdir, port = Path(folder), free_port()
        if case == "port taken":
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        running = start(starter, count, [case, str(workdir), str(rank)], port)
        if case == "all suspended":
            suspend_all(running, workdir, count)
        began, failed = time.time(), None
        while time.time() < began + SECONDS and any(process.poll() is None for process in running):
            time.sleep(0.05)
            if failed is None and (marks := list(workdir.glob("failed-*"))):
                failed = float(marks[0].name.partition("-")[2])
            ended = [each for each, process in enumerate(running) if process.poll() is not None]
            if case in HANGS and starter == "direct" and len(ended) == count - 1 and rank not in ended:
                running[rank].kill()
        seconds = time.time() - (failed or began)
        for process in running:
            process.kill()
            process.wait()
        for path in workdir.glob("*.pid"):
            with contextlib.suppress(OSError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        lines = {each: last_line(workdir / f"{each}.err", workdir / "launcher.err") for each in range(count)}
        codes = [process.returncode for process in running]
        row = judge(case, rank, lines, codes, starter) | {"seconds": round(seconds, 1), "processes": count, "starter": starter}
        return row | ({"suspend_seconds": SUSPENDED_SECONDS} if case == "all suspended" else {})


def suspend_all(running: list[subprocess.Popen], workdir: Path, count: int) -> None:
    """Suspend a whole run while it trains, and continue it."""
    while len(list(workdir.glob("reached-*"))) < count:
        if any(process.poll() is not None for process in running):
            return
        time.sleep(0.05)
    everyone = [process.pid for process in running] + [int(path.read_text()) for path in workdir.glob("*.pid")]
    for number, pause in ((signal.SIGSTOP, SUSPENDED_SECONDS), (signal.SIGCONT, 0)):
        for pid in set(everyone):
            os.kill(pid, number)
        time.sleep(pause)


def last_line(file: Path, launcher: Path) -> str:
    """The last line of jaxdp that a process has printed; without one the line of `jaxdp launch`, or the last line of all."""
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    own = [line for line in lines if re.match("jaxdp: (?!progress|no progress|ending|waiting|no thread|/)|trained", line)]
    if launcher.exists() and not own:
        own = [line for line in launcher.read_text(errors="replace").splitlines() if re.search(LAUNCHER, line)]
    return (own or lines or ["(nothing)"])[-1][:600]


def judge(case: str, rank: int, lines: dict[int, str], codes: list[int], starter: str) -> dict:
    """Whether the lines of the processes that did not fail name the cause, and no healthy rank.

    A launcher shows the lines of all processes, and may end all once the first one has printed its line.
    """
    needed = all if starter == "direct" else any
    pattern, code = CASES[case]
    expected = (code, -signal.SIGABRT) if code == 1 else (code,)  # JAX aborts processes that outlive rank 0
    others = {each: line for each, line in lines.items() if each != rank or code != 1}
    blaming = [re.search(r"rank (\d+) on \S+ failed", line) for line in others.values() if not re.search(CUT_OFF, line)]
    blamed = {int(match[1]) for match in blaming if match}
    step = "" if case == "stuck in constructor" else r"\bstep \d+"
    parts = {"located": rf"rank {rank} on \S+ failed (in|while|during) [^:]*{step}", "place": r"\.py:\d+ in "}
    has_step = code == 1 and case not in WITHOUT_STEP
    once = code in (2, 75) or case == "directory gone"  # by rank 0, or by the one at fault
    named = [re.search(pattern, line) for line in others.values()]
    found = {
        name: needed(re.search(part, line) for line in others.values()) if has_step else None for name, part in parts.items()
    }
    return {
        "case": case,
        "rank": rank,
        "named": (any if once else needed)(named),
        **found,
        "healthy rank blamed": code == 1 and bool(blamed - {rank}),
        "exit codes": all(codes[each] in expected for each in others) if len(codes) == len(lines) else None,
        "codes": codes,
        "lines": lines,
    }


def table(record: dict) -> str:
    """Seconds until the last process has ended, and what the last lines say, on 2 and on 3 processes together."""
    columns = "case", "started by", "fails", "runs", "seconds, median", "most", "cause named"
    columns += "rank, host, step, activity named", "place named", "healthy rank blamed", "exit code as documented"
    rows = []
    groups: dict[tuple, list[dict]] = {}
    for row in record["rows"]:
        role = "another" if row["rank"] else "rank 0"
        groups.setdefault((row["case"], row["starter"], role), []).append(row)
    for key, each in groups.items():
        seconds = [row["seconds"] for row in each]
        named, wrong = (sum(row[name] for row in each) for name in ("named", "healthy rank blamed"))
        located, place, codes = (_count(row[name] for row in each) for name in ("located", "place", "exit codes"))
        times = f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"
        rows.append((*key, str(len(each)), *times, str(named), located, place, str(wrong), codes))
    busy = ", ".join(sorted({str(row["load"]) for row in record["rows"]}))
    averages = [row["load_average"] for row in record["rows"]]
    pauses = ", ".join(sorted({f"{row['suspend_seconds']:g} s" for row in record["rows"] if "suspend_seconds" in row}))
    average = f"{min(averages):.0f} to {max(averages):.0f}"
    text = f"Busy processes beside each run: {busy}; load average {average}. All suspended: for {pauses}."
    return markdown(columns, rows, text)


def _count(values: Iterable[bool | None]) -> str:
    """How many are true; "-" where there is nothing to count."""
    known = list(values)
    return "-" if None in known else str(sum(known))


def identity(row: dict) -> tuple:
    return list(CASES).index(row["case"]), row["starter"], row["processes"], row["rank"]


def keep(rows: list[dict], provenance: dict) -> list[dict]:
    """Put the rows of a case into the record, in place of older ones; returns all. Another part may run at the same time."""
    kept = read("process_failures", {"rows": []})["rows"]
    rows = sorted([row for row in kept if identity(row) != identity(rows[0])] + rows, key=identity)
    write("process_failures", {"provenance": provenance, "limits": GUARD, "rows": rows})
    return rows


def is_available(starter: str) -> bool:
    has_slurm = "SLURM_CONF" in os.environ or Path("/etc/slurm/slurm.conf").exists()
    return starter in ("direct", "launch") or (shutil.which(starter) is not None and (starter != "srun" or has_slurm))


def main() -> None:
    given = arguments(
        __doc__, cases=[*CASES], processes=[2, 3], starters=["direct", "launch", "srun", "mpirun"], times=1, load=0
    )
    from jaxdp.bench.environment import provenance

    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(given.load)]
    selected = [
        (case, count, starter, rank)
        for case, count, starter in itertools.product(given.cases, given.processes, given.starters)
        for rank in range(count)
        if is_available(starter)
        if starter == "direct" or case != "port taken"  # a launcher chooses the port
    ]
    rows: list[dict] = []
    try:
        for case, count, starter, rank in selected:
            made, new = provenance(("jax", "numpy")), list[dict]()
            for _ in range(given.times):
                row = run(case, count, rank, starter=starter)
                state = {"load": given.load, "load_average": round(os.getloadavg()[0], 1), "commit": made["commit"]}
                new.append(row | state)
                print(json.dumps(new[-1]), flush=True)
            rows = keep(new, made)
    finally:
        for process in busy:
            process.kill()
    print(table({"rows": rows}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        train(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
