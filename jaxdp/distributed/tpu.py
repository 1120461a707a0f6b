"""TPU chips of this machine, the processes that use them, and the workers of their slice."""

import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# Google's vendor id, and the device ids that JAX takes for TPUs: v3 to v6e, and 7x.
VENDOR, DEVICES = "0x1ae0", ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
HOSTNAMES, WORKER = "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"


def chip_drivers(root: Path = Path("/")) -> list[str]:
    """The kernel driver of each TPU chip of this machine ("none" without one), whether or not JAX can use the chip."""
    drivers = []
    for chip in root.glob("sys/bus/pci/devices/*"):
        with suppress(OSError):
            if (chip / "vendor").read_text().strip() == VENDOR and (chip / "device").read_text().strip() in DEVICES:
                drivers.append((chip / "driver").resolve().name if (chip / "driver").exists() else "none")
    return drivers


def users(root: Path = Path("/")) -> str:
    """Processes that have opened a chip or hold libtpu's lock, except this one and its children: "process PID (NAME), ..."."""
    found, texts = set[str](), []
    with suppress(OSError):
        inode = str((root / "tmp/libtpu_lockfile").stat().st_ino)
        locks = [line.split() for line in (root / "proc/locks").read_text().splitlines()]  # 1: POSIX ... WRITE PID FILE
        found |= {lock[4] for lock in locks if lock[5].split(":")[-1] == inode}
    for descriptor in root.glob("proc/[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(descriptor).startswith(("/dev/accel", "/dev/vfio/")):
                found.add(descriptor.parts[-3])
    for process in sorted(found):
        with suppress(OSError):
            name, _, rest = (root / "proc" / process / "stat").read_text().rpartition(") ")  # PID (NAME) STATE PARENT
            if str(os.getpid()) not in (process, rest.split()[1]):
                texts.append(f"process {process} ({name.partition('(')[2]})")
    return ", ".join(texts)


def slice_variables(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of GKE for the workers of a slice, or without them the same from the metadata server of a TPU VM.

    The server is asked only on a machine with TPU chips; if none answers, the machine is alone. JAX asks the same.
    """
    given = {HOSTNAMES, WORKER, "TPU_SKIP_MDS_QUERY"} & environment.keys()
    if given or environment.get("JAX_PLATFORMS") == "cpu" or not chip_drivers():
        return environment
    try:
        worker, endpoints = _metadata("agent-worker-number"), _metadata("worker-network-endpoints")
    except OSError:
        return environment
    hosts = ",".join(endpoint.split(":")[-1] for endpoint in endpoints.split(","))  # of HOST or NAME:ID:IP
    return {HOSTNAMES: hosts, WORKER: worker} if worker and hosts else environment


def _metadata(attribute: str) -> str:
    """An attribute of this VM, "" if it has none. Raises OSError if no server answers."""
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/{attribute}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=3.0) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return ""
