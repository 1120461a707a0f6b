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
    """Processor, cores, accelerators, Python, library versions, and the commit where jaxdp runs from a checkout."""
    import jax

    import jaxdp

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "python": platform.python_version(),
        "versions": {"jaxdp": jaxdp.__version__} | {name: version(name) for name in packages},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": _commit(),
    }


def _commit() -> str | None:
    def git(*arguments):
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
