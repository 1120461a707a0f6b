"""Four hosts on this machine, two CPU devices on each: one is cut off from the rest, and what every strategy sends is counted.

    python benchmarks/cluster/network.py [--only cuts|bytes]

cuts: a run over the hosts, one of which loses its link while the run starts, compiles, steps or saves: how long until all
others have ended, and whether they name it. bytes: every strategy's all-reduce over links of 100 Mbit/s and 1 Gbit/s: the bytes
that pass each host's interface beside the account of jaxdp.parallel.wire, the time beside the cost model's. Needs root.
Writes benchmarks/results/network.json and docs/network.png and prints tables.
"""

import argparse
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
from pathlib import Path

from hosts import Hosts

sys.path.insert(0, str(Path(__file__).parent.parent))
from chaos import ROOT, TRAINING, stage
from failures import GUARD, LIMIT_SECONDS

RESULT, PICTURE = ROOT / "benchmarks/results/network.json", ROOT / "docs/network.png"
HOSTS, DEVICES = 4, 2
PORT, ECHO_PORT = 29_400, 29_500
STAGES = {"starting": 3.0, "compiling": 1.0, "stepping": 0.02, "saving": 0.0}  # seconds within which the link is cut
RATES = {None: float("inf"), "100mbit": 12.5e6, "1gbit": 125e6}  # bytes a second
LIMITED = [rate for rate in RATES if rate]
STRATEGIES = ("psum", "ring", "hierarchical", "torus", "parameter_server")
RESNET_50 = 25_557_032  # parameters
# (elements, dtype) -> how many are sent in a row
MESSAGES = {(1_024, "float32"): 20, (262_144, "float32"): 5, (RESNET_50, "float32"): 1, (RESNET_50, "bfloat16"): 1}
REPEATS, LONG_SECONDS = 3, 2.0  # a message whose bytes alone take longer is sent once


def place(rank: int) -> list[str]:
    return ["--coordinator", f"jaxdp-h0:{PORT}", "--processes", str(HOSTS), "--rank", str(rank)]


# A host is cut off.


def cut(hosts: Hosts, victim: int, wanted: str, folder: Path, draw: random.Random) -> dict:
    """One run of which `victim` loses its link: what it and the others did."""
    workdir = folder / "run"
    outs = [workdir.with_suffix(".out" if rank == 0 else f".{rank}.out") for rank in range(HOSTS)]
    command = [sys.executable, "-u", "-m", "jaxdp", "train", "--workdir", str(workdir), *TRAINING, *GUARD]
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    running = []
    for rank, out in enumerate(outs):
        with open(out, "w") as to:
            options = {"cwd": ROOT, "env": environment, "stdout": to, "stderr": subprocess.STDOUT}
            running.append(hosts.popen(rank, [*command, *place(rank)], **options))
    try:
        began = time.monotonic()
        while stage(workdir) != wanted:
            assert time.monotonic() - began < 300, "the run did not come so far"
            time.sleep(0.002)
        time.sleep(draw.random() * STAGES[wanted])
        found = stage(workdir)
        hosts.cut(victim)
        failed, seconds = time.monotonic(), {}
        while len(seconds) < HOSTS and time.monotonic() - failed < 2 * LIMIT_SECONDS:
            for rank, process in enumerate(running):
                if rank not in seconds and process.poll() is not None:
                    seconds[rank] = round(time.monotonic() - failed, 2)
            time.sleep(0.02)
        codes = [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
        hosts.mend(victim)
    others = [rank for rank in range(HOSTS) if rank != victim]
    last = [([line for line in out.read_text().splitlines() if line.startswith("jaxdp:")] or [""])[-1] for out in outs]
    sign = re.compile(rf"rank {victim}( on \S+)? failed|rank {victim} does not answer|within \S+ s: {victim} \(")
    return {
        "cut": victim,
        "stage": found,
        "seconds": max((seconds[rank] for rank in others if rank in seconds), default=None),
        "own_seconds": seconds.get(victim),
        "codes": codes,
        "ended": all(codes[rank] not in (None, 0) for rank in others),
        "named": all(sign.search(last[rank]) is not None for rank in others),
        "last_lines": [line.replace(str(folder), "...") for line in last],
    }


def cuts(times: int) -> dict:
    from jaxdp.bench.provenance import provenance

    draw, rows = random.Random(0), []
    with tempfile.TemporaryDirectory() as cache, Hosts(HOSTS, rate="1gbit") as hosts:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        for wanted in STAGES:
            for victim in [0, draw.randrange(1, HOSTS)] * times:
                with tempfile.TemporaryDirectory() as made:
                    rows.append(cut(hosts, victim, wanted, Path(made), draw))
                print(json.dumps(rows[-1]), flush=True)
    return {"provenance": provenance(("jax", "numpy")), "hosts": HOSTS, "rate": "1gbit", "rows": rows}


def cuts_table(record: dict) -> str:
    """By host and stage: seconds until the others, and the host itself, had ended."""
    lines = [
        "| cut off | while | the others end after | most | and name it | itself after |",
        "|---|---|---|---|---|---|",
    ]
    cases = {}
    for row in record["cuts"]["rows"]:
        cases.setdefault((row["cut"] == 0, row["stage"]), []).append(row)
    for (first, found), rows in cases.items():
        seconds, own = ([row[name] or float("inf") for row in rows] for name in ("seconds", "own_seconds"))
        right = sum(row["ended"] and row["named"] for row in rows)
        lines.append(
            f"| {'host 0' if first else 'another'} | {found} | {statistics.median(seconds):.1f} s | {max(seconds):.1f} s "
            f"| {right} of {len(rows)} | {max(own):.1f} s |"
        )
    return "\n".join(lines)


# What passes the links.


def account(strategy: str, elements: int, dtype: str) -> tuple[list[float], list[float]]:
    """Bytes that each host (sends, receives) over its link for one all-reduce, by the collectives of the traced program.

    The rows of the mesh are the hosts. What goes along a row stays on its host; in a column all goes to other hosts. Over both
    axes the devices form one ring, row by row, in which only a row's last device sends to another host. In a permute of one
    sender, that is the server to each worker in turn, or a worker to it.
    """
    import jax
    from jax.sharding import PartitionSpec

    from jaxdp.parallel import allreduce, wire
    from jaxdp.parallel.mesh import AXES, HORIZONTAL, VERTICAL, abstract_mesh

    mesh = abstract_mesh(HOSTS, DEVICES)
    proven = allreduce.proves_replication(strategy)
    reduce = jax.shard_map(
        lambda vector: allreduce.mean(vector[0], strategy, None, None)[None],
        mesh=mesh,
        in_specs=PartitionSpec(AXES),
        out_specs=PartitionSpec(None if proven else AXES),
        check_vma=proven,
    )
    traced = jax.jit(reduce).trace(jax.ShapeDtypeStruct((HOSTS * DEVICES, elements), dtype))
    sent, received = [0.0] * HOSTS, [0.0] * HOSTS
    for one in wire.collectives(traced.jaxpr, dict(mesh.shape)):
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


def process_of_host(rank: int) -> None:
    """One process of the job: does what it is told on its standard input, a line at a time, and answers when it has."""
    import jax

    from jaxdp.config import Mesh
    from jaxdp.parallel import distributed, measure
    from jaxdp.parallel.mesh import make_mesh

    team = distributed.join(coordinator=f"jaxdp-h0:{PORT}", processes=HOSTS, rank=rank)
    mesh = make_mesh(HOSTS, DEVICES, distributed.start(Mesh(cpu_devices=DEVICES), team))
    call = None
    for line in sys.stdin:
        match json.loads(line):
            case {"echo": times}:
                answer = echo(rank, times)
            case {"strategy": strategy, "elements": elements, "dtype": dtype}:
                warm_up = measure.reduction(mesh, jax.ShapeDtypeStruct((1024,), dtype), strategy, None, None)
                call = measure.reduction(mesh, jax.ShapeDtypeStruct((elements,), dtype), strategy, None, None)
                jax.block_until_ready(warm_up())
                answer = None
            case {"times": times}:
                began = time.monotonic()
                for _ in range(times):
                    jax.block_until_ready(call())
                answer = [began, time.monotonic()]
        print(json.dumps({"answer": answer}), flush=True)
    team.close()


def echo(rank: int, times: int) -> float | None:
    """Half the median time of a byte's way from host 0 to host 1 and back, seconds."""
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
    """A process on every host, which all do the same at the same time."""

    def __init__(self, hosts: Hosts):
        piped = {"cwd": ROOT, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, __file__, "--rank"]
        self.processes = [hosts.popen(rank, [*command, str(rank)], **piped) for rank in range(HOSTS)]

    def do(self, **what) -> list:
        """What each process answers, by rank, when all have done it."""
        for process in self.processes:
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self.processes]

    @staticmethod
    def _answer(process):
        for line in process.stdout:
            if line.startswith('{"answer"'):  # gloo speaks too
                return json.loads(line)["answer"]
        raise RuntimeError(f"a process of the job has ended with {process.wait()}")

    def close(self):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(60)


def count(hosts: Hosts, job: Job, rate: str | None, latency: float, message: tuple[int, str], strategy: str) -> dict:
    """One strategy's all-reduce of one message: bytes of every host and seconds, counted and expected."""
    from jaxdp.parallel import cost_model

    elements, dtype = message
    size, times = elements * {"float32": 4, "bfloat16": 2}[dtype], MESSAGES[message]
    repeats = 1 if size / RATES[rate] > LONG_SECONDS else REPEATS
    job.do(strategy=strategy, elements=elements, dtype=dtype)
    before, seconds = [hosts.bytes(host) for host in range(HOSTS)], []
    for _ in range(repeats):
        began, ended = (max(moments) for moments in zip(*job.do(times=times), strict=True))
        seconds.append((ended - began) / times)  # nothing is reduced before the last has begun
    after = [hosts.bytes(host) for host in range(HOSTS)]
    received, sent = ([(b[i] - a[i]) / repeats / times for a, b in zip(before, after, strict=True)] for i in (0, 1))
    accounted_sent, accounted_received = account(strategy, elements, dtype)
    # A link carries both directions at once, but the server's sums go out only when all vectors have come in.
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
        "model_seconds": cost_model.allreduce_seconds(strategy, HOSTS, DEVICES, size, latency, RATES[rate]),
        "link_seconds": passing / RATES[rate],
    }


def bytes_passed() -> dict:
    from jaxdp.bench.provenance import provenance

    rows, latencies = [], {}
    with Hosts(HOSTS) as hosts:
        job = Job(hosts)
        for rate in RATES:
            hosts.rate(rate)
            latency = latencies[rate or "no limit"] = job.do(echo=500)[0]
            for message in MESSAGES:
                if message[1] == "bfloat16" and rate != LIMITED[-1]:
                    continue  # the bytes do not depend on the rate
                for strategy in STRATEGIES:
                    rows.append(count(hosts, job, rate, latency, message, strategy))
                    print(json.dumps(rows[-1]), flush=True)
        job.close()
    made = provenance(("jax", "numpy"))
    return {"provenance": made, "mesh": [HOSTS, DEVICES], "latency_seconds": latencies, "rows": rows}


def bytes_table(record: dict) -> str:
    """By message and strategy: what the busiest host sends, in messages, and seconds.

    Those without a limit are what the hosts themselves take; beside those at each rate the cost model's, and what the accounted
    bytes take on the busiest link.
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
        cells.append(_in_words(statistics.median(rows[None]["seconds"])) if None in rows else "-")
        for rate in LIMITED:
            row = rows.get(rate)
            values = (statistics.median(row["seconds"]), row["model_seconds"], row["link_seconds"]) if row else ()
            cells += map(_in_words, values) if row else ["-"] * 3
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _in_words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def draw_picture(record: dict, path) -> None:
    """ResNet-50's gradient: bytes that the busiest host sends, and seconds at each rate, counted and expected."""
    from matplotlib.figure import Figure

    rows = [row for row in record["bytes"]["rows"] if (row["bytes"], row["dtype"]) == (4 * RESNET_50, "float32")]
    figure = Figure(figsize=(12.5, 4.4), layout="constrained")
    panels = figure.subplots(1, 1 + len(LIMITED))
    places = range(len(STRATEGIES))

    def at(rate, value):
        return [next(value(row) for row in rows if (row["rate"], row["strategy"]) == (rate, name)) for name in STRATEGIES]

    def draw(axes, measured, accounted, **more):
        bars = axes.bar(places, measured, 0.6, color="#56B4E9", label="measured")
        axes.bar_label(bars, [f"{value:.3g}" for value in measured], padding=9, fontsize=8)
        axes.scatter(
            places, accounted, marker="_", s=900, linewidths=2, color="#000000", label="accounted: bytes of the busiest link"
        )
        axes.set_xticks(places, [name.replace("_", "\n") for name in STRATEGIES], fontsize=8)
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
    parser.add_argument("--only", choices=("cuts", "bytes"))
    parser.add_argument("--times", type=int, default=1, help="of each cut")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return process_of_host(arguments.rank)
    record = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if arguments.only != "cuts":
        record["bytes"] = bytes_passed()
        draw_picture(record, PICTURE)
    if arguments.only != "bytes":
        record["cuts"] = cuts(arguments.times)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    for part, table in (("cuts", cuts_table), ("bytes", bytes_table)):
        if part in record:
            print(table(record) + "\n")


if __name__ == "__main__":
    main()
