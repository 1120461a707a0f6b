"""The devices of a run on this machine, for `checks.check_devices`.

`python -m jaxdp.doctor.devices` reads a config as JSON from stdin and prints {"kinds": [...], "problem": text or null}.
"""

import json
import sys

from jaxdp.config import Mesh
from jaxdp.distributed import runtime
from jaxdp.errors import ConfigError, print_safe
from jaxdp.validation import from_json


def start_devices(mesh: Mesh) -> dict:
    """Start JAX in this process, as a run does. kinds: of each device; problem: why a run would not start there, or None."""
    try:
        devices = runtime.start(mesh)
    except ConfigError as error:
        return {"kinds": [], "problem": str(error)}
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    memory = [f", {limit / 2**30:,.1f} GiB for JAX" if limit else "" for limit in limits]
    kinds = [f"{device.device_kind} ({device.platform}{text})" for device, text in zip(devices, memory, strict=True)]
    return {"kinds": kinds, "problem": None}


if __name__ == "__main__":
    print_safe(json.dumps(start_devices(from_json(sys.stdin.read()).mesh)))
