"""Measures link failures, and training steps over limited links, on four virtual hosts with two CPU devices each.

    python benchmarks/cluster/network.py [--only cuts|steps]

cuts: one host of a run loses its link while the run starts, compiles, steps or saves; records how long the rest take to exit,
and whether they name the host. steps: steps with each all-reduce strategy over links of 100 Mbit/s to 1 Gbit/s, in meshes whose
rows lie inside hosts and span hosts; compares their times and their ranking with `jaxdp plan --network`, and the bytes at each
host's interface with `jaxdp plan --wire`. The threads of the steps have real-time priority, so that other programs do not delay
them. Writes benchmarks/results/network.json and prints tables. Needs root.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from hosts import Hosts

sys.path.insert(0, str(Path(__file__).parent.parent))
from chaos import TRAINING, stage
from common import ROOT, markdown, read, started, write

from jaxdp.strategies import STRATEGIES

HOSTS, DEVICES = 4, 2
PORT = 29_400
GUARD = {"silence_seconds": 10, "step_minutes": 0.3, "start_minutes": 0.5}
LONG = ("--epochs", "400", "--batch.0.until-epoch", "200", "--batch.0.per-worker-batch", "1")
WAIT_SECONDS = 150  # for all processes to end
DIRECTORY = ("hangs", "answers")  # what the directory of the run does on a host that is cut off
STAGES = {"starting": 3.0, "compiling": 1.0, "stepping": 0.02, "saving": 0.0}  # latest time of the cut in each, in seconds
RATES = {"100mbit": 12.5e6, "300mbit": 37.5e6, "1gbit": 125e6}  # bytes a second
PAYLOAD = 1448 / 1514  # of an Ethernet frame that carries TCP with time stamps
MESHES = (4, 2), (2, 4)  # rows inside a host, and across two hosts
FORMS = [
    {"wire_dtype": "float32", "overlap": True},
    {"wire_dtype": "bfloat16", "overlap": True},
    {"wire_dtype": "float32", "overlap": False},
]
STEP_IMAGES, IMAGE_SIZE, WIDTH, LAYERS = 64, 8, 1024, 6
REPEATS, SECONDS = 3, 2.0  # steps in a row for so long, repeatedly; a step that is predicted to take longer is made once
SMALL, LARGE = 1024, 1_048_576  # elements of the all-reduces that measure latency, and bandwidth inside a host
GOAL = 0.15  # relative error of a predicted step time
TIE = 0.02  # relative difference of equal times, as repeated steps have it in the median


def place(rank: int) -> list[str]:
    return ["--coordinator", f"jaxdp-h0:{PORT}", "--processes", str(HOSTS), "--rank", str(rank)]


def cut(hosts: Hosts, victim: int, *, chosen: str, directory: str, folder: Path, draw: random.Random) -> dict:
    """Cut the link of one host in the chosen stage of a run; returns when and how the processes exited."""
    workdir = folder / "run"
    outputs = [workdir.with_suffix(".out" if rank == 0 else f".{rank}.out") for rank in range(HOSTS)]
    command = [sys.executable, "-u", "-m", "jaxdp", "train", "--workdir", str(workdir), *TRAINING, *LONG]
    command += [part for name, value in GUARD.items() for part in (f"--guard.{name.replace('_', '-')}", str(value))]
    running = [started([*command, *place(rank)], out, partial(hosts.popen, rank)) for rank, out in enumerate(outputs)]
    with contextlib.ExitStack() as stack:
        try:
            began = time.monotonic()
            while stage(workdir) != chosen:
                ended = [rank for rank, process in enumerate(running) if process.poll() is not None]
                assert not ended, outputs[ended[0]].read_text()
                assert time.monotonic() - began < 300, outputs[0].read_text()
                time.sleep(0.002)
            time.sleep(draw.random() * STAGES[chosen])
            cut_in = stage(workdir)
            hosts.cut(victim)
            if directory == "hangs":
                stack.enter_context(hosts.without_directory(running[victim], folder))
            failed, seconds = time.monotonic(), {}
            while len(seconds) < HOSTS and time.monotonic() - failed < WAIT_SECONDS:
                for rank, process in enumerate(running):
                    if rank not in seconds and process.poll() is not None:
                        seconds[rank] = round(time.monotonic() - failed, 2)
                time.sleep(0.02)
            codes = [process.poll() for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
            hosts.reconnect(victim)
    others = [rank for rank in range(HOSTS) if rank != victim]
    lines = [out.read_text().splitlines() for out in outputs]
    last = [([line for line in each if line.startswith("jaxdp:")] or [""])[-1].replace(str(folder), "...") for each in lines]
    named = rf"rank {victim} "
    naming = re.compile(rf"{named}on \S+ (failed|reported nothing)|{named}did not start|did not start within \S+ s: {named}")
    blamed = {int(rank) for line in last for rank in re.findall(r"rank (\d+) on \S+ failed", line)}
    return {
        "cut": victim,
        "stage": cut_in,
        "directory": directory,
        "seconds": max((seconds[rank] for rank in others), default=None) if seconds.keys() >= set(others) else None,
        "own_seconds": seconds.get(victim),
        "codes": codes,
        "named": sum(naming.search(last[rank]) is not None for rank in others),
        "healthy rank blamed": bool(blamed - {victim}),
        "last_lines": last,
    }


def cuts(times: int, stages: list[str], directories: list[str], kept: list[dict]) -> Iterator[dict]:
    """The record after each cut: first of rank 0's host, then of others. kept: earlier rows, which stay for other cases."""
    from jaxdp.bench.environment import provenance

    draw, rows = random.Random(0), [row for row in kept if row.get("directory") in set(DIRECTORY) - set(directories)]
    with tempfile.TemporaryDirectory() as cache, Hosts(HOSTS, rate="1gbit") as hosts:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        for number, directory, chosen in itertools.product(range(times), directories, stages):
            victim = draw.randrange(1, HOSTS) if number else 0
            with tempfile.TemporaryDirectory() as made:
                row = cut(hosts, victim, chosen=chosen, directory=directory, folder=Path(made), draw=draw)
            made_with = provenance(("jax", "numpy"))
            rows.append(row | {"commit": made_with["commit"]})
            print(json.dumps(row), flush=True)
            yield {"provenance": made_with, "hosts": HOSTS, "rate": "1gbit", "limits": GUARD, "rows": rows}


def cuts_table(record: dict) -> str:
    """By stage, directory and host: seconds until all processes have ended, on other hosts and on the host itself."""
    columns = "cut off while", "its directory", "host", "runs", "the others end after, median", "most", "itself, most"
    columns += "all name the host", "a healthy rank blamed", "exit codes other than 1"
    cases: dict[tuple, list[dict]] = {}
    for row in record["cuts"]["rows"]:
        cases.setdefault((row["stage"], row["directory"], "another" if row["cut"] else "of rank 0"), []).append(row)
    lines = []
    for case, rows in sorted(cases.items(), key=lambda one: [list(STAGES).index(one[0][0]), DIRECTORY.index(one[0][1])]):
        seconds, own = ([row[name] or float("inf") for row in rows] for name in ("seconds", "own_seconds"))
        times = (f"{value:.0f} s" for value in (statistics.median(seconds), max(seconds), max(own)))
        counts = [sum(row["named"] == HOSTS - 1 for row in rows), sum(row["healthy rank blamed"] for row in rows)]
        counts.append(sum(code != 1 for row in rows for code in row["codes"]))
        lines.append((*case, str(len(rows)), *times, *map(str, counts)))
    return markdown(columns, lines)


def register_layers() -> None:
    """Register the model of the steps: dense layers, each a segment, with many parameters and little computation."""
    import flax.linen as nn

    import jaxdp

    class Layer(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x):  # [B, ...] -> [B, features]
            return nn.relu(nn.Dense(self.features)(x.reshape(len(x), -1)))

    class Layers(nn.Module):
        classes: int

        def setup(self):
            self.layers = [*(Layer(WIDTH) for _ in range(LAYERS)), nn.Dense(self.classes)]

        def stages(self):
            return self.layers

    jaxdp.register_model("layers", Layers)


def step_config(mesh_shape: tuple[int, int], form: dict):
    """A run whose devices each train eight images a step. form: values of the section `reduce`."""
    from jaxdp.config import Config, Data, Mesh, Model, Phase, Reduce

    return Config(
        data=Data(source="synthetic", image_size=IMAGE_SIZE),
        model=Model(name="layers", classes=10),
        batch=(Phase(global_batch=STEP_IMAGES, per_worker_batch=STEP_IMAGES // HOSTS // DEVICES),),
        mesh=Mesh(vertical=mesh_shape[0], horizontal=mesh_shape[1], cpu_devices=DEVICES),
        reduce=Reduce(**form),
    )


def step_plan(mesh_shape: tuple[int, int], form: dict):
    from jaxdp.planning import make_plan

    return make_plan(step_config(mesh_shape, form), examples=STEP_IMAGES, devices=HOSTS * DEVICES)


def expected_bytes(mesh_shape: tuple[int, int], form: dict) -> tuple[list[float], list[float]]:
    """Bytes that each host (sends, receives) over its link in a step, from the account of `jaxdp plan --wire`.

    The devices of a row, a column or the mesh form a ring in their order; in an all-to-all each device sends to all others, and
    a permute with one sender goes from the server to each worker in turn, or from a worker to the server. The account has a
    reduce-scatter where the step over gloo has an all-to-all, of the same bytes, and two bytes of a bfloat16 where it has four.
    """
    import numpy as np

    from jaxdp.analysis.wire import step_traffic
    from jaxdp.parallel.allreduce import SERVER
    from jaxdp.parallel.mesh import AXES, HORIZONTAL, VERTICAL

    plan, devices = step_plan(mesh_shape, form), np.arange(HOSTS * DEVICES).reshape(mesh_shape)
    groups = {(HORIZONTAL,): devices, (VERTICAL,): devices.T, AXES: devices.reshape(1, -1)}
    sent, received = [0.0] * HOSTS, [0.0] * HOSTS
    for one in step_traffic(plan.config, plan.phases[0]).collectives:
        size = one.sent_bytes * (2 if one.dtype == "bfloat16" else 1)
        for group in groups[one.axes].tolist():
            if one.senders == (SERVER,):
                pairs = [(SERVER, worker, size / (one.group - 1)) for worker in group[1:]]
            elif one.senders:
                pairs = [(sender, SERVER, size) for sender in one.senders]
            elif one.operation == "reduce-scatter":
                pairs = [(a, b, size / (one.group - 1)) for a, b in itertools.permutations(group, 2)]
            else:
                pairs = [(a, b, size) for a, b in zip(group, [*group[1:], group[0]], strict=True)]
            for source, target, each in pairs:
                crosses = source // DEVICES != target // DEVICES
                sent[source // DEVICES] += each * crosses
                received[target // DEVICES] += each * crosses
    return sent, received


def pack_only(vector):
    """A strategy without communication, which XLA cannot remove: tensors are packed and unpacked as for other strategies."""
    from jax import lax

    return lax.optimization_barrier(vector)


def process_of_host(rank: int) -> None:
    """Run as one process of the job: execute the requests on stdin, one JSON object a line, and answer each on stdout."""
    import jax

    from jaxdp.bench.step_runner import build_step
    from jaxdp.config import Mesh
    from jaxdp.distributed import runtime
    from jaxdp.parallel import allreduce, timing
    from jaxdp.parallel.mesh import make_mesh

    directory = Path(tempfile.gettempdir()) / "jaxdp-network"  # the hosts are namespaces of one machine
    group = runtime.join(coordinator=f"jaxdp-h0:{PORT}", processes=HOSTS, rank=rank, directory=directory)
    mesh = make_mesh(HOSTS, DEVICES, runtime.start(Mesh(cpu_devices=DEVICES), group))
    register_layers()
    call = None
    for line in sys.stdin:
        answer = None
        match json.loads(line):
            case {"reduction": name, "elements": elements}:
                shape = jax.ShapeDtypeStruct((elements,), "float32")
                call = timing.Reduction(mesh, shape, getattr(allreduce, name), bucket_bytes=None)
                jax.block_until_ready(call())
            case {"mesh": shape, "form": form}:
                config = step_config(tuple(shape), form or {})
                strategy = config.reduce.strategy if form else pack_only
                step_mesh = make_mesh(*shape, list(mesh.devices.flat))
                call = build_step(config, step_mesh, global_batch=STEP_IMAGES, strategy=strategy)
                jax.block_until_ready(call())
            case {"times": times}:
                began = time.monotonic()
                for _ in range(times):
                    jax.block_until_ready(call())
                answer = [began, time.monotonic()]
        print(json.dumps({"answer": answer}), flush=True)
    group.close()


class Job:
    """A process on every host; all execute the same requests at the same time."""

    def __init__(self, hosts: Hosts):
        piped = {"cwd": ROOT, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, __file__, "--rank"]
        self.processes = [hosts.popen(rank, [*command, str(rank)], **piped) for rank in range(HOSTS)]

    def request(self, **request) -> list:
        """Send a request to all processes; returns their answers, by rank."""
        for process in self.processes:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self.processes]

    @staticmethod
    def _answer(process):
        for line in process.stdout:
            if line.startswith('{"answer"'):  # gloo prints to stdout too
                return json.loads(line)["answer"]
        raise RuntimeError(f"a process of the job exited with {process.wait()}")

    def seconds(self, times: int) -> float:
        """Seconds of a call, from the first process's begin to the last one's end; real-time priority while it runs."""
        self._schedule(os.SCHED_RR, 1)
        moments = self.request(times=times)
        self._schedule(os.SCHED_OTHER, 0)
        return (max(ended for _, ended in moments) - min(began for began, _ in moments)) / times

    def _schedule(self, policy: int, priority: int) -> None:
        for process in self.processes:
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))

    def close(self):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(60)


def measure_hosts(job: Job) -> dict:
    """What the prediction needs to know of the hosts, measured without a limit: seconds per round, bytes a second of a device,
    and seconds of a step without communication, when all devices share the processors."""

    def median(times: int, **request) -> float:
        job.request(**request)
        return statistics.median(job.seconds(times) for _ in range(REPEATS))

    rounds = 2 * (HOSTS * DEVICES - 1)  # of the ring
    sent = 4 * LARGE * 2 * (DEVICES - 1) / DEVICES  # bytes of a device in an all-reduce of its row
    return {
        "latency": median(20, reduction="ring", elements=SMALL) / rounds,
        "device_bandwidth": sent / median(5, reduction="all_reduce_rows", elements=LARGE),
        "computation": median(5, mesh=MESHES[0], form=None),
    }


@cache
def planned(mesh: tuple[int, int], wire_dtype: str, overlap: bool, update: str) -> tuple:
    """The plan of a step, and the summary of its model."""
    from jaxdp.sizes import model_summary

    plan = step_plan(mesh, {"wire_dtype": wire_dtype, "overlap": overlap, "update": update})
    return plan, model_summary(plan.config)


def predicted_seconds(row: dict, measured: dict) -> float:
    """Seconds of the step of a row of the record, as `jaxdp plan --hosts 4 --network` predicts them."""
    from jaxdp.analysis.network_model import SHARDED, Links, predict

    plan, summary = planned(tuple(row["mesh"]), *(row[name] for name in ("wire_dtype", "overlap", "update")))
    bandwidth = PAYLOAD * RATES[row["rate"]]
    links = Links(measured["latency"], bandwidth, measured["device_bandwidth"], devices_per_host=DEVICES, gloo=True)
    images_per_second = STEP_IMAGES / HOSTS / DEVICES / measured["computation"]
    (phase,) = predict(plan, summary, links, rate=images_per_second)["phases"]
    return phase["strategies"][row["strategy"] + SHARDED * (row["update"] == "sharded")]["step_seconds"]


def steps() -> Iterator[dict]:
    """The record after the steps of each strategy."""
    from jaxdp.bench.environment import provenance

    register_layers()
    rows: list[dict] = []
    with Hosts(HOSTS) as hosts:
        job = Job(hosts)
        measured = measure_hosts(job)
        for shape, form in itertools.product(MESHES, FORMS):
            for strategy, update in [*((name, "replicated") for name in STRATEGIES), ("torus", "sharded")]:
                reduce = {**form, "strategy": strategy, "update": update}
                hosts.rate(None)
                job.request(mesh=shape, form=reduce)
                accounted = expected_bytes(shape, reduce)
                for rate in RATES:
                    hosts.rate(rate)
                    row = {"mesh": shape, "rate": rate, **reduce}
                    predicted = predicted_seconds(row, measured)
                    before, seconds = [hosts.bytes(host) for host in range(HOSTS)], []
                    in_a_row, repeats = (1, 1) if predicted > SECONDS else (round(SECONDS / predicted), REPEATS)
                    for _ in range(repeats):
                        seconds.append(job.seconds(in_a_row))
                    after = [hosts.bytes(host) for host in range(HOSTS)]
                    received, sent = (
                        max((b[i] - a[i]) / repeats / in_a_row for a, b in zip(before, after, strict=True)) for i in (0, 1)
                    )
                    rows.append(row | {"seconds": seconds})
                    rows[-1] |= {"sent": sent, "accounted_sent": max(accounted[0])}
                    rows[-1] |= {"received": received, "accounted_received": max(accounted[1])}
                    print(json.dumps(rows[-1]), flush=True)
                yield {"provenance": provenance(("jax", "numpy")), "hosts": measured, "rows": rows}
        job.close()


def ranking_tau(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau-b between the two values of each pair; values that differ by at most `TIE` are equal."""

    def order(first: float, second: float) -> int:
        return 0 if math.isclose(first, second, rel_tol=TIE) else 1 if first > second else -1

    orders = [(order(a[0], b[0]), order(a[1], b[1])) for a, b in itertools.combinations(pairs, 2)]
    untied = [sum(one[side] != 0 for one in orders) for side in (0, 1)]
    return sum(first * second for first, second in orders) / math.sqrt(untied[0] * untied[1])


def steps_table(record: dict) -> str:
    """Seconds of a step by mesh, form, link and strategy, with the error of the prediction, and the ranking of each case."""
    register_layers()
    hosts, cases = record["steps"]["hosts"], dict[tuple, dict[str, tuple[float, float]]]()
    for row in record["steps"]["rows"]:
        case = f"{row['mesh'][0]}x{row['mesh'][1]}", row["wire_dtype"], "yes" if row["overlap"] else "no", row["rate"]
        name = row["strategy"] + ", sharded" * (row["update"] == "sharded")
        cases.setdefault(case, {})[name] = statistics.median(row["seconds"]), predicted_seconds(row, hosts)
    names = list(dict.fromkeys(name for times in cases.values() for name in times))
    lines = []
    for case, times in cases.items():
        cells = [f"{times[name][0]:.3g} s, {_error(*times[name]):+.0%}".replace("%", " %") for name in names]
        lines.append((*case, *cells, f"{ranking_tau(list(times.values())):.2f}"))
    below = []
    for rate in [*RATES, None]:
        chosen = [list(times.values()) for case, times in cases.items() if rate in (None, case[-1])]
        pairs = [pair for times in chosen for pair in times]
        errors = [abs(_error(*pair)) for pair in pairs]
        below.append(
            f"{rate or 'All links'}: tau of all steps {ranking_tau(pairs):.2f}, of a row at least "
            f"{min(map(ranking_tau, chosen)):.2f}; an error of at most {100 * GOAL:.0f} % in "
            f"{sum(error <= GOAL for error in errors)} of {len(errors)} steps, mean {100 * statistics.mean(errors):.1f} %, "
            f"largest {100 * max(errors):.0f} %."
        )
    below.append(
        f"Measured for the prediction: {1e6 * hosts['latency']:.0f} us per round, "
        f"{hosts['device_bandwidth'] / 1e6:.0f} MB/s of a device, {1e3 * hosts['computation']:.0f} ms of computation a step."
    )
    return markdown(("mesh", "wire", "overlap", "link", *names, "tau"), lines, *below)


def _error(measured: float, predicted: float) -> float:
    return predicted / measured - 1


def bytes_table(record: dict) -> str:
    """By mesh, dtype and strategy: bytes that the busiest host sends in a step, counted at the fastest link, and accounted."""
    lines = []
    for row in record["steps"]["rows"]:
        if row["rate"] == list(RATES)[-1] and row["overlap"]:
            counted, accounted = row["sent"], row["accounted_sent"]
            name = row["strategy"] + ", sharded" * (row["update"] == "sharded")
            mesh = f"{row['mesh'][0]}x{row['mesh'][1]}"
            sizes = f"{counted / 1e6:.1f} MB", f"{accounted / 1e6:.1f} MB", f"{counted / accounted:.3f}"
            lines.append((mesh, row["wire_dtype"], name, *sizes))
    return markdown(("mesh", "wire", "strategy", "the busiest host sends", "accounted", "ratio"), lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("cuts", "steps"))
    parser.add_argument("--times", type=int, default=1, help="trials of each cut")
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=list(STAGES), help="when a link is cut")
    parser.add_argument("--directory", nargs="*", choices=DIRECTORY, default=DIRECTORY, help="on the host that is cut off")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return process_of_host(arguments.rank)
    record = read("network", {})
    if arguments.only in (None, "steps"):
        for part in steps():
            record["steps"] = part
            write("network", record)
    if arguments.only in (None, "cuts"):
        kept = record.get("cuts", {}).get("rows", [])
        for part in cuts(arguments.times, arguments.stages, arguments.directory, kept=kept):
            record["cuts"] = part
            write("network", record)
    for part, table in (("cuts", cuts_table), ("steps", steps_table), ("steps", bytes_table)):
        if part in record:
            print(table(record) + "\n")


if __name__ == "__main__":
    main()
