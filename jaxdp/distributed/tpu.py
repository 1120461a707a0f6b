"""TPU chips of this machine, the processes that use them, and the workers of their slice."""

import glob
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# Google's vendor id, and the device ids that JAX takes for TPUs: v3 to v6e, and 7x.
VENDOR, DEVICES = "0x1ae0", ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
HOSTNAMES, WORKER = "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"
ADDRESSES = "TPU_PROCESS_ADDRESSES"  # before those of HOSTNAMES
SLICES, SLICE, COORDINATOR = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"


def chip_drivers(root: Path = Path("/")) -> list[str]:
    """The kernel driver of each TPU chip of this machine ("none" without one), whether or not JAX can use the chip."""
    drivers = []
    for chip in root.glob("sys/bus/pci/devices/*"):
        with suppress(OSError, ValueError):
            if (chip / "vendor").read_text().strip() == VENDOR and (chip / "device").read_text().strip() in DEVICES:
                drivers.append((chip / "driver").resolve().name if (chip / "driver").exists() else "none")
    return drivers


def users(root: Path = Path("/")) -> str:
    """Processes that have opened a chip or hold libtpu's lock, except this one and its children: "process PID (NAME), ..."."""
    found, texts = set[str](), []
    with suppress(OSError, ValueError, IndexError):
        inode = str((root / "tmp/libtpu_lockfile").stat().st_ino)
        locks = [line.split() for line in (root / "proc/locks").read_text().splitlines()]  # 1: POSIX ... WRITE PID FILE
        found |= {lock[4] for lock in locks if lock[5].split(":")[-1] == inode}
    for descriptor in glob.iglob(f"{root}/proc/[0-9]*/fd/*"):  # pathlib's raises an error if a process ends meanwhile
        with suppress(OSError):
            if os.readlink(descriptor).startswith(("/dev/accel", "/dev/vfio/")):
                found.add(descriptor.split("/")[-3])
    for process in sorted(found):
        with suppress(OSError, IndexError):
            stat = (root / "proc" / process / "stat").read_text(errors="replace")  # PID (NAME) STATE PARENT
            name, _, rest = stat.rpartition(") ")
            if str(os.getpid()) not in (process, rest.split()[1]):
                texts.append(f"process {process} ({name.partition('(')[2]})")
    return ", ".join(texts)


def slice_variables(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of GKE for the workers of a slice or of several, or without them the same from the metadata of a TPU VM.

    The server is asked only on a machine with TPU chips; if none answers, the machine is alone. JAX asks the same.
    """
    given = {HOSTNAMES, ADDRESSES, WORKER, "TPU_SKIP_MDS_QUERY"} & environment.keys()
    if given or environment.get("JAX_PLATFORMS") == "cpu" or not chip_drivers():
        return environment
    import http.client  # with urllib, slow to import
    import urllib.request

    url = f"http://{os.environ.get('GCE_METADATA_IP', 'metadata.google.internal')}/computeMetadata/v1/instance/attributes/"
    open_direct, found = urllib.request.build_opener(urllib.request.ProxyHandler({})).open, dict[str, str]()
    for attribute in ("agent-worker-number", "worker-network-endpoints", "tpu-env"):
        try:
            request = urllib.request.Request(url + attribute, headers={"Metadata-Flavor": "Google"})
            with open_direct(request, timeout=3.0) as answer:
                found[attribute] = answer.read().decode()
        except (OSError, http.client.HTTPException, ValueError):  # ValueError: not text, or no address
            break
    if not (endpoints := found.get("worker-network-endpoints")):
        return environment
    hosts = [":".join(endpoint.split(":")[2:]) or endpoint for endpoint in endpoints.split(",")]  # of HOST or NAME:ID:IP
    of_slices = re.findall(r"^(MEGASCALE_\w+): *'?([^'\s]*)", found.get("tpu-env", ""), re.M)
    return {**dict(of_slices), **environment, HOSTNAMES: ",".join(hosts), WORKER: found["agent-worker-number"]}
