"""What JAX finds here, asked in a process of its own: a driver that hangs or crashes takes nothing else with it.

`python -m jaxdp.doctor.probe` reads a config as JSON on stdin, without one takes the defaults, and prints one line of JSON.
"""

import json
import sys
import threading

from jaxdp.doctor import packages
from jaxdp.doctor.finding import THREADS, output_of
from jaxdp.errors import ConfigError, first_line

SECONDS, GRACE_SECONDS = 120.0, 10.0
NOTHING = {"broken": {}, "devices": [], "state_bytes": None, "host_bytes": None, "unplanned": None}


def ask(config, seconds: float = SECONDS) -> dict:
    """{"broken", "devices": [{"kind", "platform", "memory_bytes"}], "problem", "state_bytes", "host_bytes", "unplanned"}.

    broken: what `packages.unimportable` finds; problem: why a run of this config would not start on these devices, or None;
    state_bytes: of a checkpoint; host_bytes: of images on their way to the devices (None where no plan can be made, for the
    reason `unplanned`).
    """
    from jaxdp.validation import to_json

    try:
        lines = output_of([sys.executable, "-m", "jaxdp.doctor.probe"], seconds, input=to_json(config)).splitlines()
        return NOTHING | {"problem": None} | json.loads(lines[-1])
    except (OSError, ValueError, IndexError) as error:
        return NOTHING | {"problem": f"JAX does not start: {first_line(error).replace(sys.executable, 'python')}"}


def asked_in_time(config, seconds: float = SECONDS) -> dict:
    """The same from a thread that is left behind where even killing the process does not end it, as in a broken driver."""
    told = []
    thread = threading.Thread(target=lambda: told.append(ask(config, seconds)), name=f"{THREADS}devices", daemon=True)
    thread.start()
    thread.join(seconds + GRACE_SECONDS)
    return told[0] if told else NOTHING | {"problem": f"JAX does not start: no answer in {seconds:g} s, and no end"}


def _looked() -> dict:
    broken = packages.unimportable()
    print("while JAX starts", file=sys.stderr, flush=True)
    try:
        return {"broken": broken} | _started(sys.stdin.read())
    except Exception:
        if not broken:
            raise
        return {"broken": broken, "problem": f"JAX was not started: {', '.join(broken)} cannot be imported; mend that first"}


def _started(text: str) -> dict:
    from jaxdp.config import Config
    from jaxdp.parallel import distributed
    from jaxdp.validation import from_json

    config, told = from_json(text) if text else Config(), {}
    try:
        distributed.start(config.mesh)
    except ConfigError as error:
        told["problem"] = str(error)
    import jax

    try:
        devices = jax.devices()
    except Exception:  # by platform and release; `problem` says why
        return told
    if devices[0].platform == "cpu":
        devices = devices[: config.mesh.cpu_devices or 1]
    told["devices"] = [
        {"kind": one.device_kind, "platform": one.platform, "memory_bytes": (one.memory_stats() or {}).get("bytes_limit")}
        for one in devices
    ]
    return told | _needed(config, len(devices))


def _needed(config, devices: int) -> dict:
    import jax

    import jaxdp
    from jaxdp import models, planning
    from jaxdp.parallel.mesh import make_mesh
    from jaxdp.training.state import abstract_state

    state = jax.tree.leaves(abstract_state(config, models.create(config.model), make_mesh(1, 1)))
    told = {"state_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in state)}
    try:
        return told | {"host_bytes": planning.input_bytes(jaxdp.plan(config, devices))["host"]}
    except ConfigError as error:
        return told | {"unplanned": str(error)}


if __name__ == "__main__":
    print(json.dumps(_looked()))
