"""Throughput of the loader with images on a local disk and at a URL, with 50 ms for each request.

    apt-get install haproxy && pip install -e '.[cloud,cloud-test]'
    python benchmarks/object_storage_data.py [--repeats 5]

JPEGs of 400x350 pixels in a folder to random crops of 224x224 in batches of 64. The loader has one core. The server, and
haproxy, which delays every request, have another one, so that they take no time from it, as on a machine of their own. Rounds
alternate between the disk, the URL without local copies ("cold"), with copies of all images ("warm"), and with a cache of a
quarter of the data ("small cache"), each with a consumer that takes as many images as it gets and with one of a fixed rate.
Then single objects are read as fast as possible, with and without obstore. Writes benchmarks/results/object_storage_data.json
and prints the first table.
"""

import dataclasses
import functools
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from common import alternate, arguments, markdown, write
from delay_proxy import DelayProxy
from helpers.object_storage import object_storage
from helpers.remote_data import upload

import jaxdp
from jaxdp.bench.environment import provenance
from jaxdp.bench.input import make_images
from jaxdp.cloud.location import CONNECTIONS, open_location
from jaxdp.config import Storage
from jaxdp.data import prefetch, sources
from jaxdp.data.batch_sources import DecodedImages
from jaxdp.data.transforms import training_transform

IMAGES, BATCH = 6144, 64
WARM_UP = 32  # batches until the images that were read ahead during the start are used up
SERVERS = {"gcs": "fake-gcs-server", "s3": "rclone"}
LATENCY = 0.05  # seconds for each request
PACES = {"full speed": None, "paced": 400}  # images/s that the consumer takes


def measure(directory: str, cache: Path, *, gigabytes: float, pace: float | None) -> dict:
    """Images a second of one epoch from the end of the warm-up on, and seconds until the first batch.

    pace: images a second that the consumer takes, None for as many as it gets.
    """
    flags = ["--data.source", "folder", "--data.directory", f"{directory}/folder", "--data.threads", "1"]
    config = jaxdp.load_config("imagenet_goyal_256", flags)
    config = dataclasses.replace(config, storage=Storage(directory=str(cache), cache_gigabytes=gigabytes))
    began, cpu = time.perf_counter(), time.process_time()
    opened = sources.open_split(config, "train")
    transform, size = training_transform(config)
    loader = DecodedImages(opened, transform=transform, size=size, classes=2, threads=1)
    rows = [prefetch.BatchRows(p, p) for p in np.arange(len(loader) // BATCH * BATCH).reshape(-1, BATCH)]
    prefetch.read_ahead(loader, (prefetch.sample_ids(0, row.order, len(loader)) for row in rows))
    batches = prefetch.Prefetcher(lambda row: prefetch.load_images(loader, 0, row), rows)
    counted = first = waited = 0.0
    while batches.next() is not None:
        now = time.perf_counter()
        counted += 1
        if counted == 1:
            first = now - began
        if counted == WARM_UP:
            start, waited = now, batches.wait_seconds
        if pace and counted >= WARM_UP:
            time.sleep(max(0.0, start + (counted - WARM_UP + 1) * BATCH / pace - now))
    end = time.perf_counter() if not pace else max(now, start + (counted - WARM_UP) * BATCH / pace)
    images = (counted - WARM_UP) * BATCH
    return {
        "images_per_second": images / (end - start),
        "first_batch_seconds": first,
        "waited_seconds": batches.wait_seconds - waited,
        "cpu_milliseconds": 1000 * (time.process_time() - cpu) / len(loader),
    }


def compare(folder: Path, storage, pace: float | None) -> dict[str, dict]:
    """Name of a case -> measurement, one after the other. All of a case's requests are counted."""
    data = sum(file.stat().st_size for file in (folder / "folder").rglob("*") if file.is_file()) / 1e9
    results = {}
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as small:
        cases = {
            "disk": (str(folder), cache, 100.0),
            "cold": (storage.url, cache, 100.0),
            "warm": (storage.url, cache, 100.0),
            "filling a small cache": (storage.url, small, data / 4),
            "small cache": (storage.url, small, data / 4),
        }
        for name, (directory, local, gigabytes) in cases.items():
            storage.proxy.forget()
            results[name] = measure(directory, Path(local), gigabytes=gigabytes, pace=pace)
            results[name]["requests"] = storage.proxy.requests()
    return results


def read_objects(storage) -> dict[str, dict]:
    """Client -> objects a second, and milliseconds of its processor time for each, reading all images of the folder."""
    fast = open_location(f"{storage.url}/folder/train", "data.directory", notice=print)
    sizes = fast.sizes()
    names = sorted(sizes)
    clients = {"obstore": fast, type(fast.fs).__module__.partition(".")[0]: dataclasses.replace(fast, reader=None)}
    results = {}
    for client, location in clients.items():
        read = functools.partial(location.read, verified=True)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(read, names[:CONNECTIONS]))  # connects
            began, cpu = time.perf_counter(), time.process_time()
            list(pool.map(read, names))
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        results[client] = {
            "objects_per_second": len(names) / seconds,
            "cpu_milliseconds": 1000 * cpu / len(names),
            "kilobytes": sum(sizes.values()) / len(names) / 1000,
        }
    assert not fast.reader.fallbacks
    return results


def pin(process: int, cores: set[int]) -> None:
    """Let the threads of a process, and those that they start, run on these cores alone."""
    for task in os.listdir(f"/proc/{process}/task"):
        os.sched_setaffinity(int(task), cores)


def table(record: dict) -> str:
    """Images a second of every case, against the disk, and requests."""
    medians, cases, rows = record["medians"], ("cold", "warm", "small cache"), []
    for prefix in dict.fromkeys(name.rpartition(", ")[0] for name in medians):
        kind, pace = prefix.split(", ")
        disk = medians[f"{prefix}, disk"]["images_per_second"]
        found = [medians[f"{prefix}, {case}"] for case in cases]
        rates = [f"{row['images_per_second']:,.0f} ({100 * (row['images_per_second'] / disk - 1):+.0f} %)" for row in found]
        data = f"{kind.upper()} ({SERVERS[kind]})"
        consumer = f"{record['paced_rate']} images/s" if pace == "paced" else "as fast as it gets"
        rows.append((data, consumer, f"{disk:,.0f}", *rates, ", ".join(f"{row['requests']:,.0f}" for row in found)))
    columns = "data", "consumer", "disk", "URL, no copies", "URL, all copies", "URL, cache of a quarter"
    return markdown(
        (*columns, "requests of these"),
        rows,
        f"Images/s of an epoch of {record['images']:,} images, medians of {len(next(iter(record['rounds'].values())))} "
        f"alternating rounds, with {1000 * record['latency_seconds']:.0f} ms for each request. The loader has one core; server "
        "and proxy have another.",
    )


def reads_table(record: dict) -> str:
    """What a read of an object costs, by client."""
    rows = []
    for name, row in record["reads"].items():
        kind, client = name.split(", ")
        rows.append((kind.upper(), client, f"{row['objects_per_second']:,.0f}", f"{row['cpu_milliseconds']:.2f} ms"))
    latency = f"{1000 * record['latency_seconds']:.0f} ms for each request"
    return markdown(
        ("storage", "client", "objects/s", "processor time for each"),
        rows,
        f"Objects of {row['kilobytes']:.0f} kB on average, {CONNECTIONS} at a time, {latency}.",
    )


def main() -> None:
    repeats = arguments(__doc__, repeats=5).repeats
    rounds, reads = {}, {}
    own, servers = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "folder/train", IMAGES)
        make_images(folder / "folder/val", 4)
        pin(os.getpid(), {own})
        for kind in SERVERS:
            make_proxy = functools.partial(DelayProxy, seconds=LATENCY)
            with object_storage(kind, make_proxy=make_proxy, rclone=kind == "s3") as storage:
                pin(storage.process.pid, {servers})
                pin(storage.proxy.process.pid, {servers})
                os.environ.update(storage.environment)
                upload(folder / "folder", storage, "folder")
                paces = {f"{kind}, {pace}": functools.partial(compare, folder, storage, rate) for pace, rate in PACES.items()}
                rounds |= by_case(alternate(paces, repeats))
                reads |= by_case(alternate({kind: functools.partial(read_objects, storage)}, repeats))
    record = {
        "images": IMAGES,
        "batch": BATCH,
        "latency_seconds": LATENCY,
        "paced_rate": PACES["paced"],
        "medians": {name: median_of(results) for name, results in rounds.items()},
        "reads": {name: median_of(results) for name, results in reads.items()},
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
        "provenance": provenance(),
    }
    write("object_storage_data", record, table)


def by_case(rounds: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """name -> [{case: result}] as "name, case" -> [result]."""
    return {f"{name}, {case}": [one[case] for one in results] for name, results in rounds.items() for case in results[0]}


def median_of(results: list[dict]) -> dict:
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


if __name__ == "__main__":
    main()
