"""Measures link failures and the bytes that each all-reduce strategy sends, on four virtual hosts with two CPU devices each.

    python benchmarks/cluster/network.py [--only cuts|bytes|updates]

cuts: one host of a run loses its link while the run starts, compiles, steps or saves; records how long the others take to exit,
and whether they name the host. bytes: all-reduces over links of 100 Mbit/s and 1 Gbit/s; compares the bytes at each host's
interface with those of jaxdp.parallel.collectives, and the time with the cost model. updates: training steps with a replicated
and a sharded update, whose rows span hosts; compares the bytes with the account of `jaxdp plan --wire`. Writes
benchmarks/results/network.json and docs/network.png and prints tables. Needs root.
"""

import argparse
import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hosts import Hosts

sys.path.insert(0, str(Path(__file__).parent.parent))
from chaos import ROOT, TRAINING, stage
from common import markdown

from jaxdp.strategies import STRATEGIES

RESULT, PICTURE = ROOT / "benchmarks/results/network.json", ROOT / "docs/network.png"
HOSTS, DEVICES = 4, 2
PORT, ECHO_PORT = 29_400, 29_500
GUARD = {"silence_seconds": 10, "step_minutes": 0.3, "start_minutes": 0.5}
LONG = ("--epochs", "400", "--batch.0.until-epoch", "200", "--batch.0.per-worker-batch", "1")
WAIT_SECONDS = 150  # for all processes to end
DIRECTORY = ("hangs", "answers")  # what the directory of the run does on a host that is cut off
STAGES = {
    "starting": 3.0,
    "compiling": 1.0,
    "stepping": 0.02,
    "saving": 0.0,
}  # latest time of the cut in the stage, in seconds
RATES = {None: float("inf"), "100mbit": 12.5e6, "1gbit": 125e6}  # bytes a second
LIMITED = [rate for rate in RATES if rate]
RESNET_50 = 25_557_032  # parameters
# (elements, dtype) -> number of consecutive all-reduces
MESSAGES = {(1_024, "float32"): 20, (262_144, "float32"): 5, (RESNET_50, "float32"): 1, (RESNET_50, "bfloat16"): 1}
REPEATS, LONG_SECONDS = 3, 2.0  # a message that takes longer on the link is sent once
UPDATES = [((1, 8), "replicated"), ((1, 8), "sharded"), ((2, 4), "replicated"), ((2, 4), "sharded")]
STEPS, STEP_IMAGES = 5, 64


def place(rank: int) -> list[str]:
    return ["--coordinator", f"jaxdp-h0:{PORT}", "--processes", str(HOSTS), "--rank", str(rank)]


def cut(hosts: Hosts, victim: int, *, chosen: str, directory: str, folder: Path, draw: random.Random) -> dict:
    """Cut the link of one host in the chosen stage of a run; returns when and how the processes exited."""
    workdir = folder / "run"
    outputs = [workdir.with_suffix(".out" if rank == 0 else f".{rank}.out") for rank in range(HOSTS)]
    command = [sys.executable, "-u", "-m", "jaxdp", "train", "--workdir", str(workdir), *TRAINING, *LONG]
    command += [part for name, value in GUARD.items() for part in (f"--guard.{name.replace('_', '-')}", str(value))]
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    running = []
    for rank, out in enumerate(outputs):
        with open(out, "w") as file:
            options = {"cwd": ROOT, "env": environment, "stdout": file, "stderr": subprocess.STDOUT}
            running.append(hosts.popen(rank, [*command, *place(rank)], **options))
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


def cuts(times: int, stages: list[str], directories: list[str], *, seed: int, kept: list[dict]) -> Iterator[dict]:
    """The record after each cut: first of rank 0's host, then of others. kept: earlier rows, which stay for other cases."""
    from jaxdp.bench.environment import provenance

    draw, rows = random.Random(seed), [row for row in kept if row.get("directory") in set(DIRECTORY) - set(directories)]
    with tempfile.TemporaryDirectory() as cache, Hosts(HOSTS, rate="1gbit") as hosts:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        for number in range(times):
            for directory in directories:
                for chosen in stages:
                    victim = draw.randrange(1, HOSTS) if number else 0
                    with tempfile.TemporaryDirectory() as made:
                        row = cut(hosts, victim, chosen=chosen, directory=directory, folder=Path(made), draw=draw)
                    made_with = provenance(("jax", "numpy"))
                    rows.append(row | {"commit": made_with["commit"]})
                    print(json.dumps(row), flush=True)
                    yield {"provenance": made_with, "hosts": HOSTS, "rate": "1gbit", "limits": GUARD, "rows": rows}


def cuts_table(record: dict) -> str:
    """By stage, directory and host: seconds until all other processes, and those of the host itself, have ended."""
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


def expected_bytes(strategy: str, elements: int, dtype: str) -> tuple[list[float], list[float]]:
    """Bytes that each host (sends, receives) over its link in one all-reduce, computed from the traced program.

    The rows of the mesh are the hosts: collectives along a row stay on a host, those along a column go to other hosts. In a
    collective over both axes the devices form one ring, row by row; only the last device of a row sends to another host. A
    permute with one sender goes from the server to each worker in turn, or from a worker to the server.
    """
    import jax
    from jax.sharding import PartitionSpec

    from jaxdp.parallel import allreduce, collectives
    from jaxdp.parallel.mesh import AXES, HORIZONTAL, VERTICAL, abstract_mesh

    mesh = abstract_mesh(HOSTS, DEVICES)
    check_vma = allreduce.check_vma(strategy)
    reduce = jax.shard_map(
        lambda vector: allreduce.all_reduce_mean(vector[0], strategy, bucket_bytes=None)[None],
        mesh=mesh,
        in_specs=PartitionSpec(AXES),
        out_specs=PartitionSpec(None if check_vma else AXES),
        check_vma=check_vma,
    )
    traced = jax.jit(reduce).trace(jax.ShapeDtypeStruct((HOSTS * DEVICES, elements), dtype))
    sent, received = [0.0] * HOSTS, [0.0] * HOSTS
    for one in collectives.find_collectives(traced.jaxpr, dict(mesh.shape)):
        if one.senders is None:
            crossing = {(HORIZONTAL,): 0, (VERTICAL,): DEVICES, AXES: 1}[one.axes]  # devices of a host that send over its link
            for host in range(HOSTS):
                sent[host] += crossing * one.sent_bytes
                received[host] += crossing * one.sent_bytes
            continue
        for sender in one.senders:
            if sender == allreduce.SERVER:
                worker_bytes = one.sent_bytes / (HOSTS * DEVICES - 1)
                ends = [(0, worker // DEVICES) for worker in range(1, HOSTS * DEVICES)]
            else:
                worker_bytes, ends = one.sent_bytes, [(sender // DEVICES, 0)]
            for source, target in ends:
                sent[source] += worker_bytes * (source != target)
                received[target] += worker_bytes * (source != target)
    return sent, received


def step_config(mesh_shape: tuple[int, int], update: str):
    """A ResNet-18 of which every device trains eight images a step."""
    from jaxdp.config import Config, Data, Mesh, Model, Phase, Reduce

    return Config(
        data=Data(source="synthetic", image_size=16),
        model=Model(depth=18, width=32, stem="small", classes=10),
        batch=(Phase(global_batch=STEP_IMAGES, per_worker_batch=STEP_IMAGES // HOSTS // DEVICES),),
        mesh=Mesh(vertical=mesh_shape[0], horizontal=mesh_shape[1]),
        reduce=Reduce(update=update),
    )


def expected_step_bytes(mesh_shape: tuple[int, int], update: str) -> tuple[list[float], list[float]]:
    """Bytes that each host (sends, receives) over its link in a step, from the account of `jaxdp plan --wire`.

    The devices of a row or column form a ring in their order; in an all-to-all each device sends to all others. The account
    has a reduce-scatter where the step over gloo has an all-to-all, of the same bytes.
    """
    import numpy as np

    from jaxdp.analysis.traffic import step_traffic
    from jaxdp.parallel.mesh import HORIZONTAL, VERTICAL
    from jaxdp.planning import make_plan

    config = step_config(mesh_shape, update)
    plan = make_plan(config, examples=STEP_IMAGES, devices=HOSTS * DEVICES)
    devices = np.arange(HOSTS * DEVICES).reshape(mesh_shape)
    groups = {(HORIZONTAL,): devices, (VERTICAL,): devices.T}
    sent, received = [0.0] * HOSTS, [0.0] * HOSTS
    for one in step_traffic(config, plan.phases[0]).collectives:
        for group in groups[one.axes].tolist():
            if one.operation == "reduce-scatter":
                pairs = [(a, b, one.sent_bytes / (one.group - 1)) for a in group for b in group if a != b]
            else:
                pairs = [(a, b, one.sent_bytes) for a, b in zip(group, [*group[1:], group[0]], strict=True)]
            for source, target, size in pairs:
                crosses = source // DEVICES != target // DEVICES
                sent[source // DEVICES] += size * crosses
                received[target // DEVICES] += size * crosses
    return sent, received


def process_of_host(rank: int) -> None:
    """Run as one process of the job: execute the requests on stdin, one JSON object a line, and answer each on stdout."""
    import jax

    from jaxdp.config import Mesh
    from jaxdp.distributed import runtime
    from jaxdp.parallel import timing
    from jaxdp.parallel.mesh import make_mesh

    directory = Path(tempfile.gettempdir()) / "jaxdp-network"  # the hosts are namespaces of one machine
    group = runtime.join(coordinator=f"jaxdp-h0:{PORT}", processes=HOSTS, rank=rank, directory=directory)
    mesh = make_mesh(HOSTS, DEVICES, runtime.start(Mesh(cpu_devices=DEVICES), group))
    call = None
    for line in sys.stdin:
        match json.loads(line):
            case {"echo": times}:
                answer = measure_latency(rank, times)
            case {"strategy": strategy, "elements": elements, "dtype": dtype}:
                warm_up = timing.Reduction(mesh, jax.ShapeDtypeStruct((1024,), dtype), strategy, bucket_bytes=None)
                call = timing.Reduction(mesh, jax.ShapeDtypeStruct((elements,), dtype), strategy, bucket_bytes=None)
                jax.block_until_ready(warm_up())
                answer = None
            case {"update": update, "mesh": shape}:
                from jaxdp.bench.step_runner import build_step

                config = step_config(tuple(shape), update)
                devices = [mesh.devices.flat[number] for number in range(HOSTS * DEVICES)]
                call = build_step(config, make_mesh(*shape, devices), global_batch=STEP_IMAGES, strategy="torus")
                jax.block_until_ready(call())
                answer = None
            case {"times": times}:
                began = time.monotonic()
                for _ in range(times):
                    jax.block_until_ready(call())
                answer = [began, time.monotonic()]
        print(json.dumps({"answer": answer}), flush=True)
    group.close()


def measure_latency(rank: int, times: int) -> float | None:
    """Half the median round-trip time of a byte between hosts 0 and 1, in seconds, on rank 0; None on other ranks."""
    if rank == 1:
        with socket.create_server(("", ECHO_PORT)) as listener, listener.accept()[0] as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while byte := line.recv(1):
                line.sendall(byte)
    if rank != 0:
        return None
    while True:
        try:
            line = socket.create_connection(("jaxdp-h1", ECHO_PORT), 5)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    seconds = []
    with line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(times):
            began = time.monotonic()
            line.sendall(b"x")
            line.recv(1)
            seconds.append(time.monotonic() - began)
    return statistics.median(seconds) / 2


class Job:
    """A process on every host, all of which execute the same requests at the same time."""

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

    def close(self):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(60)


def count(hosts: Hosts, job: Job, *, rate: str | None, latency: float, message: tuple[int, str], strategy: str) -> dict:
    """All-reduce one message with one strategy; returns measured and expected bytes of every host, and seconds."""
    from jaxdp.analysis import cost_model

    elements, dtype = message
    size, times = elements * {"float32": 4, "bfloat16": 2}[dtype], MESSAGES[message]
    repeats = 1 if size / RATES[rate] > LONG_SECONDS else REPEATS
    job.request(strategy=strategy, elements=elements, dtype=dtype)
    before, seconds = [hosts.bytes(host) for host in range(HOSTS)], []
    for _ in range(repeats):
        began, ended = (max(moments) for moments in zip(*job.request(times=times), strict=True))
        seconds.append((ended - began) / times)  # no reduction starts before the last process has begun
    after = [hosts.bytes(host) for host in range(HOSTS)]
    received, sent = ([(b[i] - a[i]) / repeats / times for a, b in zip(before, after, strict=True)] for i in (0, 1))
    accounted_sent, accounted_received = expected_bytes(strategy, elements, dtype)
    # A link carries both directions at once, but the server sends its sums only after all vectors have arrived.
    one_way = [max(both) for both in zip(accounted_sent, accounted_received, strict=True)]
    passing = accounted_sent[0] + accounted_received[0] if strategy == "parameter_server" else max(one_way)
    return {
        "rate": rate,
        "strategy": strategy,
        "dtype": dtype,
        "bytes": size,
        "in_a_row": times,
        "sent": sent,
        "received": received,
        "accounted_sent": accounted_sent,
        "accounted_received": accounted_received,
        "seconds": seconds,
        "model_seconds": cost_model.allreduce_seconds(
            strategy, HOSTS, DEVICES, num_bytes=size, latency=latency, bandwidth=RATES[rate]
        ),
        "link_seconds": passing / RATES[rate],
    }


def measure_bytes() -> dict:
    from jaxdp.bench.environment import provenance

    rows, latencies = [], {}
    with Hosts(HOSTS) as hosts:
        job = Job(hosts)
        for rate in RATES:
            hosts.rate(rate)
            latency = latencies[rate or "no limit"] = job.request(echo=500)[0]
            for message in MESSAGES:
                if message[1] == "bfloat16" and rate != LIMITED[-1]:
                    continue  # the bytes do not depend on the rate
                for strategy in STRATEGIES:
                    rows.append(count(hosts, job, rate=rate, latency=latency, message=message, strategy=strategy))
                    print(json.dumps(rows[-1]), flush=True)
        job.close()
    made = provenance(("jax", "numpy"))
    return {"provenance": made, "mesh": [HOSTS, DEVICES], "latency_seconds": latencies, "rows": rows}


def measure_updates() -> dict:
    """Bytes over the links in a training step with a replicated and a sharded update."""
    from jaxdp.bench.environment import provenance

    rows = []
    with Hosts(HOSTS) as hosts:
        job = Job(hosts)
        for mesh_shape, update in UPDATES:
            job.request(update=update, mesh=mesh_shape)
            before = [hosts.bytes(host) for host in range(HOSTS)]
            job.request(times=STEPS)
            after = [hosts.bytes(host) for host in range(HOSTS)]
            received, sent = ([(b[i] - a[i]) / STEPS for a, b in zip(before, after, strict=True)] for i in (0, 1))
            accounted_sent, accounted_received = expected_step_bytes(mesh_shape, update)
            rows.append({"mesh": mesh_shape, "update": update, "sent": sent, "received": received})
            rows[-1] |= {"accounted_sent": accounted_sent, "accounted_received": accounted_received}
            print(json.dumps(rows[-1]), flush=True)
        job.close()
    return {"provenance": provenance(("jax", "numpy")), "steps": STEPS, "rows": rows}


def updates_table(record: dict) -> str:
    """By mesh and form: bytes that the busiest host sends in a step, counted and accounted."""
    lines = ["| mesh | update | a host sends at most | accounted | ratio |", "|---|---|---|---|---|"]
    for row in record["updates"]["rows"]:
        counted, accounted = max(row["sent"]), max(row["accounted_sent"])
        vertical, horizontal = row["mesh"]
        lines.append(
            f"| {vertical}x{horizontal} | {row['update']} | {counted / 1e6:.2f} MB | {accounted / 1e6:.2f} MB | "
            f"{counted / accounted:.3f} |"
        )
    return "\n".join(lines)


def bytes_table(record: dict) -> str:
    """By message and strategy: what the busiest host sends, in messages, and seconds.

    The time without a rate limit is that of the hosts themselves. For each rate: measured time, time of the cost model, and
    expected bytes of the busiest link divided by its rate.
    """
    times = "".join(f" {rate} | model | link |" for rate in LIMITED)
    lines = [
        f"| message | strategy | a host sends at most | accounted | no limit |{times}",
        "|---|---|---|---|---|" + "---|" * 3 * len(LIMITED),
    ]
    cases = {}
    for row in record["bytes"]["rows"]:
        cases.setdefault((row["bytes"], row["dtype"], row["strategy"]), {})[row["rate"]] = row
    for (size, dtype, strategy), rows in cases.items():
        counted = max(max(row["sent"]) for row in rows.values()) / size
        accounted = max(next(iter(rows.values()))["accounted_sent"]) / size
        cells = [f"{size:,} B {dtype}", strategy, f"{counted:.3f} x", f"{accounted:.3f} x"]
        cells.append(_format_seconds(statistics.median(rows[None]["seconds"])) if None in rows else "-")
        for rate in LIMITED:
            row = rows.get(rate)
            values = (statistics.median(row["seconds"]), row["model_seconds"], row["link_seconds"]) if row else ()
            cells += map(_format_seconds, values) if row else ["-"] * 3
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def draw_picture(record: dict, path: Path) -> None:
    """Plot, for ResNet-50's gradient, the bytes that the busiest host sends and the seconds at each rate, by strategy."""
    from matplotlib.figure import Figure

    rows = [row for row in record["bytes"]["rows"] if (row["bytes"], row["dtype"]) == (4 * RESNET_50, "float32")]
    figure = Figure(figsize=(12.5, 4.4), layout="constrained")
    panels = figure.subplots(1, 1 + len(LIMITED))
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))  # an older record lacks strategies added since
    places = range(len(strategies))

    def at(rate, value):
        return [next(value(row) for row in rows if (row["rate"], row["strategy"]) == (rate, name)) for name in strategies]

    def draw(axes, measured, accounted, **more):
        bars = axes.bar(places, measured, 0.6, color="#56B4E9", label="measured")
        axes.bar_label(bars, [f"{value:.3g}" for value in measured], padding=9, fontsize=8)
        axes.scatter(
            places, accounted, marker="_", s=900, linewidths=2, color="#000000", label="expected: bytes of the busiest link"
        )
        axes.set_xticks(places, [name.replace("_", "\n") for name in strategies], fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
        axes.set(**more)

    sent, accounted = (at(LIMITED[-1], lambda row, name=name: max(row[name]) / 1e6) for name in ("sent", "accounted_sent"))
    draw(panels[0], sent, accounted, title="sent by the busiest host", ylabel="MB")
    own = at(None, lambda row: statistics.median(row["seconds"]))
    for axes, rate in zip(panels[1:], LIMITED, strict=True):
        measured = at(rate, lambda row: statistics.median(row["seconds"]))
        draw(axes, measured, at(rate, lambda row: row["link_seconds"]), title=f"time, links of {rate}", ylabel="seconds")
        points = {"s": 32, "zorder": 3}
        model = at(rate, lambda row: row["model_seconds"])
        axes.scatter(places, model, marker="D", color="#D55E00", label="cost model: a link a device", **points)
        axes.scatter(places, own, marker="^", color="#009E73", label="measured without a limit", **points)
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    what = f"ResNet-50's gradient (float32, {4 * RESNET_50 / 1e6:.0f} MB)"
    figure.suptitle(f"All-reduce of {what} over {HOSTS} hosts of {DEVICES} devices, gloo")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("cuts", "bytes", "updates"))
    parser.add_argument("--times", type=int, default=1, help="trials of each cut")
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=list(STAGES), help="in which a link is cut")
    parser.add_argument("--directory", nargs="*", choices=DIRECTORY, default=DIRECTORY, help="on the host that is cut off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return process_of_host(arguments.rank)
    record = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if arguments.only in (None, "bytes"):
        record["bytes"] = measure_bytes()
        draw_picture(record, PICTURE)
    if arguments.only in (None, "updates"):
        record["updates"] = measure_updates()
    if arguments.only in (None, "cuts"):
        kept = record.get("cuts", {}).get("rows", [])
        for part in cuts(arguments.times, arguments.stages, arguments.directory, seed=arguments.seed, kept=kept):
            record["cuts"] = part
            RESULT.write_text(json.dumps(record, indent=1) + "\n")
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    for part, table in (("cuts", cuts_table), ("bytes", bytes_table), ("updates", updates_table)):
        if part in record:
            print(table(record) + "\n")


if __name__ == "__main__":
    main()
