"""Check of the devices: JAX starts on them in a subprocess, so that a driver that crashes does not take the report with it.

`python -m jaxdp.doctor.devices` reads a config as JSON from stdin and prints {"kinds": [...], "problem": text or null}.
"""

import json
import sys
from collections import Counter

from jaxdp.config import Config
from jaxdp.distributed import runtime
from jaxdp.doctor.check_result import ResultBuilder, output_of
from jaxdp.doctor.machine import format_bytes
from jaxdp.errors import ConfigError, first_line
from jaxdp.validation import from_json, to_json

TIMEOUT_SECONDS = 100.0


def check_devices(result: ResultBuilder, config: Config) -> None:
    """A run would start on the devices of this machine."""
    command = [sys.executable, "-m", "jaxdp.doctor.devices"]
    try:
        found = json.loads(output_of(command, TIMEOUT_SECONDS, stdin=to_json(config)).splitlines()[-1])
    except (OSError, ValueError, LookupError) as error:
        reason = first_line(error).replace(sys.executable, "python")
        found = {"kinds": [], "problem": f"JAX does not start: {reason}"}
    if found["kinds"]:
        result.ok(", ".join(f"{count} x {kind}" for kind, count in Counter(found["kinds"]).items()))
    if found["problem"]:
        result.error(found["problem"], "run `python -c 'import jax; jax.devices()'` for details")


def start_devices(config: Config) -> dict:
    """Start JAX in this process, as a run does. kinds: of each device; problem: why a run would not start there, or None."""
    try:
        devices = runtime.start(config.mesh)
    except ConfigError as error:
        return {"kinds": [], "problem": str(error)}
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    memory = [f", {format_bytes(limit)} for JAX" if limit else "" for limit in limits]
    kinds = [f"{device.device_kind} ({device.platform}{text})" for device, text in zip(devices, memory, strict=True)]
    return {"kinds": kinds, "problem": None}


if __name__ == "__main__":
    print(json.dumps(start_devices(from_json(sys.stdin.read()))))
