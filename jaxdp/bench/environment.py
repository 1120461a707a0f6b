"""The environment of a measurement: hardware, versions and commit, which every recorded measurement carries."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from jaxdp.cores import usable_cores
from jaxdp.loggers.origin import git_commit

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
VIRTUAL_NOTE = (
    "These devices share one CPU: the figures show that the program runs and how much memory traffic it causes, "
    "not the speed of a network."
)


def provenance(packages: Sequence[str] = PACKAGES) -> dict:
    """Processor, cores, accelerators, Python, library versions, and the commit: JAXDP_COMMIT, or the checkout's."""
    import jax

    from jaxdp import __version__

    return {
        "processor": _processor(),
        "gpus": _gpus(),
        "cores": usable_cores(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "python": platform.python_version(),
        "versions": {"jaxdp": __version__} | {name: version(name) for name in packages},
        "libc": " ".join(platform.libc_ver()),
        "huge_pages": huge_pages(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": os.environ.get("JAXDP_COMMIT") or git_commit(Path(__file__).parent),
    }


def huge_pages() -> str:
    """The kernel's setting for transparent huge pages: always, madvise, never, or "" if unknown."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().split("[")[-1].split("]")[0] if path.exists() else ""


def _gpus() -> list[str]:
    """Name, driver, clocks and power limit of each GPU, from nvidia-smi."""
    query = "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
