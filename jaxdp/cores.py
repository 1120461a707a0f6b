"""The number of cores that this process may use: its affinity, and the CPU quota of its container."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """The cores in this process's affinity, or the quota of its control groups, rounded up, if that is less."""
    return min([len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in _quotas())])


def _quotas() -> Iterator[float]:
    """The quotas, in cores, of this process's control groups (versions 1 and 2) and of those that hold them."""
    for line in _read(OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = {CGROUPS / "cpu", CGROUPS / controllers} if controllers else {CGROUPS, CGROUPS / "unified"}
        group = Path(path.lstrip("/"))
        for folder in (mount / part for mount in mounts for part in (group, *group.parents)):
            quota, period, *_ = [*_read(folder / "cpu.max").split(), "", ""]  # version 2
            if controllers:
                quota, period = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
            if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):  # not "max" or -1
                yield int(quota) / int(period)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # another version, or a path outside of the container
        return ""
