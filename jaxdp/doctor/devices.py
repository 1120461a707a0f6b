"""Check of the devices: JAX starts on them in a subprocess, which may crash, and then frees their memory.

`python -m jaxdp.doctor.devices` reads a config as JSON from stdin and prints {"kinds": [...], "problem": text or null}.
"""

import json
import sys
from collections import Counter

from jaxdp.config import Config, Mesh
from jaxdp.distributed import runtime
from jaxdp.doctor.check_result import ResultBuilder, output_of
from jaxdp.errors import ConfigError, first_line, print_safe
from jaxdp.validation import from_json, to_json

TIMEOUT_SECONDS = 100.0


def check_devices(result: ResultBuilder, config: Config) -> None:
    """A run would start on the devices of this machine."""
    found = find_devices(config.mesh)
    if found["kinds"]:
        result.ok(", ".join(f"{count} x {kind}" for kind, count in Counter(found["kinds"]).items()))
    if found["problem"]:
        result.error(found["problem"], "run `python -c 'import jax; jax.devices()'` for details")


def find_devices(mesh: Mesh) -> dict:
    """The result of `start_devices`, run in a subprocess."""
    command = [sys.executable, "-m", "jaxdp.doctor.devices"]
    try:
        return json.loads(output_of(command, TIMEOUT_SECONDS, stdin=to_json(Config(mesh=mesh))).splitlines()[-1])
    except (OSError, ValueError, LookupError) as error:
        return {"kinds": [], "problem": f"JAX does not start: {first_line(error).replace(sys.executable, 'python')}"}


def count_devices(mesh: Mesh) -> int:
    """Number of devices of a run, counted in another process. Raises ConfigError if a run would not start on them."""
    found = find_devices(mesh)
    if found["problem"]:
        raise ConfigError("devices", reason=found["problem"])
    return len(found["kinds"])


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
