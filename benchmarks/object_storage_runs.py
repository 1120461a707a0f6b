"""Runs at URLs of S3 and GCS servers on this machine, behind a proxy that injects faults.

    python benchmarks/object_storage_runs.py [--parts kills outages throughput] [--kills 30] [--runs 6] [--seed 0]

kills: training runs are killed (SIGKILL) in random stages while the proxy injects errors; so many kills over so many runs, and
more runs if some end before. After every kill the local copy is removed: the next session has only the URL. The last
parameters, the log and the accuracy at the URL must equal those of an uninterrupted run. outages: the proxy refuses or ignores
all connections for a minute, during which training must continue. throughput: training with a local working directory and
with a URL, alternated; bytes and requests of a checkpoint.

Writes benchmarks/results/object_storage_runs.json, in which parts that were not measured stay as they are. Needs the extras
cloud and cloud-test.
"""

import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from common import arguments, markdown, read, started, write
from helpers.constants import short_leases
from helpers.fault_proxy import ProxyProcess
from helpers.object_storage import object_storage
from helpers.processes import log_lines

from jaxdp.bench.environment import provenance
from jaxdp.checkpoint.listing import checkpoint_paths, latest_valid
from jaxdp.checkpoint.manifest import read_manifest
from jaxdp.cloud.remote_run import download_checkpoint, read_run_file
from jaxdp.errors import EXIT_STOPPED
from jaxdp.run_records import TIMING

KINDS = ("s3", "gcs")
LATENCY = 0.05  # seconds
WRITES = ["PUT", "POST"]
FAULTS = [  # of the proxy, and their probability for each request
    ("status", {"status": 503, "rate": 0.05}),
    ("status", {"status": 429, "rate": 0.05}),
    ("cut_upload", {"methods": WRITES, "rate": 0.03}),
    ("lost_response", {"methods": WRITES, "rate": 0.03}),
    ("cut_download", {"methods": ["GET"], "rate": 0.02}),
]
STAGES = ("starting", "leasing", "downloading", "compiling", "stepping", "saving", "uploading", "ending")
MINUTES = 0.5  # between checkpoints of `throughput`
ATTEMPTS = 8  # of the last session, which may fail because of injected errors before it trains
OUTAGE_SECONDS = 60
PERIODS = 20, OUTAGE_SECONDS, 40  # seconds before, during and after an outage
SMALL = [
    *("--data.source", "synthetic", "--data.image-size", "8", "--data.train-examples", "256", "--data.eval-examples", "250"),
    *("--model.depth", "18", "--model.width", "2", "--model.stem", "small", "--mesh.cpu-devices", "2"),
    *("--batch.0.global-batch", "16", "--logging.no-tensorboard", "--logging.every-steps", "1"),
]
KILLED = [*SMALL, "--epochs", "8", "--checkpoint.every-epochs", "0.78"]
LONG = [*SMALL, "--epochs", "5000", "--evaluation.every-epochs", "500", "--checkpoint.every-epochs", "15.6"]
LARGE = [
    *("--data.source", "synthetic", "--data.image-size", "32", "--data.train-examples", "1600", "--data.eval-examples", "64"),
    *("--model.depth", "18", "--model.stem", "small", "--batch.0.global-batch", "16", "--logging.no-tensorboard"),
]


def start(workdir: str | Path, training: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    """A training process whose local copies are in `folder`/copies and whose output goes to `folder`/out."""
    command = [*short_leases(), "train", "--workdir", str(workdir), "--storage.directory", str(folder / "copies"), *training]
    return started(command, folder / "out", **environment)


def train(workdir: str | Path, training: list[str], folder: Path, environment: dict[str, str]) -> None:
    """The whole run."""
    assert start(workdir, training, folder, environment).wait() == 0, (folder / "out").read_text()


def outcome(url: str, folder: Path) -> dict:
    """What a finished run leaves at its URL that does not depend on time."""
    shutil.rmtree(folder, ignore_errors=True)
    manifest = download_checkpoint(url, "--workdir", folder)
    log, result = (read_run_file(url, name) or b"" for name in ("metrics.jsonl", "result.json"))
    return described(manifest.arrays, log.decode(), json.loads(result))


def described(arrays: dict, log: str, result: dict) -> dict:
    records = [json.loads(line) for line in log.splitlines()]
    lines = [{name: value for name, value in record.items() if name not in TIMING} for record in records]
    return {"arrays": arrays, "log": lines} | {name: result[name] for name in ("accuracy", "loss", "steps")}


def uninterrupted(folder: Path) -> dict:
    """The outcome of the run in a local directory."""
    folder.mkdir()
    train(folder / "run", KILLED, folder, {})
    log, result = ((folder / "run" / name).read_text() for name in ("metrics.jsonl", "result.json"))
    return described(latest_valid(folder / "run/checkpoints").arrays, log, json.loads(result))


def stage(folder: Path, proxy) -> str:
    """The stage of a session that began without a local copy, judged by its files and its requests."""
    runs = folder / "copies/runs"
    states = list(runs.glob("*.lease/copy.json"))
    if not states:
        return "leasing" if proxy.in_flight() else "starting"
    copy = next((path for path in runs.iterdir() if path.is_dir() and not path.name.endswith(".lease")), None)
    if copy is None or not json.loads(states[0].read_text())["complete"]:
        return "downloading"
    if (copy / "result.json").exists():
        return "ending"
    if any("checkpoints" in request["path"] and request["method"] in WRITES for request in proxy.in_flight()):
        return "uploading"
    if any((copy / "checkpoints").glob("saving-*")):
        return "saving"
    return "stepping" if "img/s" in (folder / "out").read_text() else "compiling"


def kill_session(url: str, folder: Path, storage, draw: random.Random) -> dict | None:
    """Start a session without a local copy and kill it a random time after a random stage begins; None if it has ended."""
    shutil.rmtree(folder / "copies", ignore_errors=True)
    chosen, delay = draw.choice(STAGES), draw.choice((0.0, draw.random() * 0.5))
    process = start(url, KILLED, folder, storage.environment)
    try:
        while process.poll() is None and stage(folder, storage.proxy) != chosen:
            time.sleep(0.005)
        time.sleep(delay)
        killed_in = stage(folder, storage.proxy)
    finally:
        process.kill()
    if (code := process.wait()) == -signal.SIGKILL:
        return {"stage": killed_in, "kind": storage.kind}
    print((folder / "out").read_text().strip().splitlines()[-1:], f"ended with code {code}", flush=True)
    return None


def finish(url: str, folder: Path, storage) -> int:
    """Train to the end, each session without a local copy; returns how many sessions ended in an error."""
    for failures in range(ATTEMPTS):
        shutil.rmtree(folder / "copies", ignore_errors=True)
        if start(url, KILLED, folder, storage.environment).wait() == 0:
            return failures
        print((folder / "out").read_text().strip().splitlines()[-1:], flush=True)
    raise RuntimeError((folder / "out").read_text())


def measure_kills(folder: Path, *, kills: int, runs: int, seed: int) -> dict:
    expected = uninterrupted(folder / "uninterrupted")
    points: list[list[dict]] = []
    different: list[int] = []
    failures = 0
    faults: Counter = Counter()
    while (left := kills - sum(map(len, points))) > 0:
        number, wanted = len(points), min(left, -(-kills // runs))  # a run that ends before its last kill makes one more
        draw, here = random.Random(f"{seed} {number}"), folder / f"run-{number}"
        here.mkdir()
        with object_storage(KINDS[number % len(KINDS)]) as storage:
            os.environ.update(storage.environment)
            storage.proxy.add("latency", seconds=LATENCY)
            for fault, how in FAULTS:
                storage.proxy.add(fault, **how)
            url = f"{storage.url}/runs/{number}"
            points.append([])
            while len(points[-1]) < wanted:
                if point := kill_session(url, here, storage, draw):
                    points[-1].append(point)
                    print(f"run {number}: {point}", flush=True)
                elif b'"released": true' in newest_lease_text(storage) and read_run_file(url, "result.json"):
                    break  # finished
            failures += finish(url, here, storage)
            faults.update(name for request in storage.proxy.log() for name in request["fault"].split() if name != "latency")
            storage.proxy.clear()
            is_equal = outcome(url, here / "downloaded") == expected
            different += [] if is_equal else [number]
            print(f"run {number} on {storage.kind}: {'equal' if is_equal else 'DIFFERS'}", flush=True)
    return {
        "seed": seed,
        "runs": len(points),
        "equal": len(points) - len(different),
        "different": different,
        "steps": expected["steps"],
        "kills": points,
        "failed_sessions": failures,
        "injected": dict(faults),
    }


def newest_lease_text(storage) -> bytes:
    contents = storage.contents()
    return contents[max(name for name in contents if "/.lease/" in name)]


def measure_outage(folder: Path, kind: str, mode: str) -> dict:
    """Steps a second before and during an outage, and whether the URL holds everything after a stop signal."""
    here = folder / f"{kind}-{mode}"
    here.mkdir()
    with object_storage(kind, make_proxy=ProxyProcess) as storage:
        storage.proxy.add("latency", seconds=LATENCY)
        os.environ.update(storage.environment)
        url = f"{storage.url}/runs/outage"
        process = start(url, LONG, here, storage.environment)
        try:
            while not any(here.glob("copies/runs/*/checkpoints/[1-9]*")):
                assert process.poll() is None, (here / "out").read_text()
                time.sleep(0.1)
            log = next(here.glob("copies/runs/*/metrics.jsonl"))
            counts = [log_lines(log.parent)]
            for seconds in PERIODS:
                if seconds == OUTAGE_SECONDS:
                    storage.proxy.outage(OUTAGE_SECONDS, mode)
                time.sleep(seconds)
                counts.append(log_lines(log.parent))
            process.terminate()
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        output = (here / "out").read_text()
        assert code == EXIT_STOPPED, output
        newest = read_manifest(checkpoint_paths(log.parent / "checkpoints")[0])
        there = download_checkpoint(url, "--workdir", here / "downloaded")
        complete = (there.samples, there.arrays) == (newest.samples, newest.arrays)
        complete = complete and read_run_file(url, "metrics.jsonl") == log.read_bytes()
    resumed = re.search(r"continue after (\d+) s", output)
    rates = [(after - before) / seconds for before, after, seconds in zip(counts, counts[1:], PERIODS, strict=False)]
    row = {"kind": kind, "mode": mode, "steps_per_second": rates, "complete": complete}
    row |= {"delayed": output.count("are delayed"), "resumed_after_seconds": int(resumed[1]) if resumed else None}
    print(row, flush=True)
    return row


def measure_throughput(folder: Path, rounds: int) -> dict:
    """Images a second with a local directory and with a URL, alternated, and what a checkpoint costs."""
    training = [*LARGE, "--epochs", "4", "--checkpoint.every-minutes", str(MINUTES), "--checkpoint.every-epochs", "9999"]
    rates: dict[str, list[float]] = {"local": [], **{kind: [] for kind in KINDS}}
    costs = {}
    for number in range(rounds + 1):  # the first is not counted: it compiles
        for name in ("local", *KINDS):
            here = folder / f"{name}-{number}"
            here.mkdir()
            if name == "local":
                train(here / "run", training, here, {})
                result = json.loads((here / "run/result.json").read_text())
            else:
                with object_storage(name, make_proxy=ProxyProcess) as storage:
                    os.environ.update(storage.environment)
                    storage.proxy.add("latency", seconds=LATENCY)
                    url = f"{storage.url}/runs/x"
                    train(url, training, here, storage.environment)
                    result = json.loads(read_run_file(url, "result.json") or b"")
                    costs[name] = cost(storage, url, here)
            if number:
                rates[name].append(result["images_per_second"])
            print(name, result["images_per_second"], flush=True)
            shutil.rmtree(here)
    return {"seconds_between_checkpoints": 60 * MINUTES, "rates": rates, "costs": costs}


def cost(storage, url: str, folder: Path) -> dict:
    """Requests and bytes of a run for each of its checkpoints, those of its log and its lease included."""
    match = re.search(r"uploaded (\d+) checkpoint", (folder / "out").read_text())
    checkpoints, totals = int(match[1]) if match else 0, storage.proxy.totals()
    manifest = download_checkpoint(url, "--workdir", folder / "downloaded")
    return {
        "checkpoints": checkpoints,
        "state_bytes": manifest.num_bytes,
        "state_files": len(manifest.files),
        "bytes_sent": sum(total["sent"] for total in totals.values()) / checkpoints,
        "requests": sum(total["requests"] for total in totals.values()) / checkpoints,
    }


def table(record: dict) -> str:
    """Kills by stage, the outages, and the cost of mirroring."""
    kills, throughput = record["kills"], record["throughput"]
    points = Counter((point["stage"], point["kind"]) for run in kills["kills"] for point in run)
    outages = []
    for row in record["outages"]:
        how = {"refuse": "connections refused", "ignore": "no answer"}[row["mode"]]
        rates = (f"{rate:.1f}" for rate in row["steps_per_second"])
        outages.append((f"{row['kind'].upper()}, {how}", *rates, "yes" if row["complete"] else "no"))
    medians, costs = {name: statistics.median(rates) for name, rates in throughput["rates"].items()}, throughput["costs"]
    directories = [("local", f"{medians.pop('local'):.1f}", "", "", "")]
    for name, rate in medians.items():
        lost = f"{100 * (rate / statistics.median(throughput['rates']['local']) - 1):+.1f} %"
        sent = f"{costs[name]['bytes_sent'] / 1e6:,.1f} MB", f"{costs[name]['requests']:.0f}"
        directories.append((name.upper(), f"{rate:.1f}", lost, *sent))
    return markdown(
        ("killed while", "S3", "GCS"),
        [(name, str(points[name, "s3"]), str(points[name, "gcs"])) for name in STAGES],
        f"{sum(points.values())} kills of {kills['runs']} runs, {sum(kills['injected'].values()):,} injected errors; "
        f"{kills['equal']} runs equal the uninterrupted one bit by bit.",
        markdown(("outage of a minute", "steps/s before", "during", "after", "everything at the URL"), outages),
        markdown(("working directory", "images/s", "", "bytes sent per checkpoint", "requests per checkpoint"), directories),
        f"Medians of {len(throughput['rates']['local'])} alternating rounds, a checkpoint of "
        f"{costs['s3']['state_bytes'] / 1e6:,.1f} MB every {throughput['seconds_between_checkpoints']:.0f} s. The server "
        "shares the cores of the training.",
    )


def main():
    given = arguments(__doc__, parts=["kills", "outages", "throughput"], kills=30, runs=6, seed=0, rounds=5)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
        measure = {
            "kills": lambda: measure_kills(folder, kills=given.kills, runs=given.runs, seed=given.seed),
            "outages": lambda: [measure_outage(folder, kind, mode) for kind in KINDS for mode in ("refuse", "ignore")],
            "throughput": lambda: measure_throughput(folder, given.rounds),
        }
        for part in given.parts:
            made_by = provenance(("jax", "orbax-checkpoint", "fsspec", "s3fs", "gcsfs", "moto"))
            record = {"provenance": made_by} | read("object_storage_runs", {}) | {part: measure[part]()}
            write("object_storage_runs", record, table if record.keys() >= measure.keys() else None)


if __name__ == "__main__":
    main()
