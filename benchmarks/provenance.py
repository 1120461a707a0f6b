"""Where and with what a measurement was made: the part that every file in benchmarks/results/ carries."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def provenance(packages=PACKAGES) -> dict:
    """Processor, cores, Python, library versions and the commit of this checkout."""
    import jaxdp

    root = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True).stdout.strip()
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {"jaxdp": jaxdp.__version__} | {name: version(name) for name in packages},
        "commit": commit + ("+changes" if changed else ""),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
