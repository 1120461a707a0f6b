"""Where and with what a measurement was made: the part that every recorded measurement carries."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
VIRTUAL = (
    "These devices are parts of one CPU: the figures show that the program runs and what it costs in memory traffic here, "
    "not how fast a network is."
)


def provenance(packages=PACKAGES) -> dict:
    """Processor, cores, accelerators, Python, library versions, and the commit: of the checkout, or as JAXDP_COMMIT says."""
    import jax

    import jaxdp

    return {
        "processor": _processor(),
        "gpus": _gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "python": platform.python_version(),
        "versions": {"jaxdp": jaxdp.__version__} | {name: version(name) for name in packages},
        "libc": " ".join(platform.libc_ver()),
        "huge_pages": huge_pages(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": _commit(),
    }


def huge_pages() -> str:
    """When the kernel gives out large pages: always, madvise or never."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().split("[")[-1].split("]")[0] if path.exists() else ""


def _commit() -> str | None:
    def git(*arguments):
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("JAXDP_COMMIT")


def _gpus() -> list[str]:
    """Name, driver and clocks of each GPU, as the driver tells them."""
    try:
        asked = "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit"
        line = ["nvidia-smi", asked, "--format=csv,noheader"]
        return subprocess.run(line, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
