"""Probe of JAX in a subprocess, so that a driver that hangs or crashes does not take the report with it.

`python -m jaxdp.doctor.jax_probe` reads a config as JSON from stdin (empty: the default config) and prints one line of JSON.
"""

import dataclasses
import json
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxdp.doctor import packages
from jaxdp.doctor.check_result import THREAD_PREFIX, Problem, output_of
from jaxdp.errors import ConfigError, first_line

if TYPE_CHECKING:  # the subprocess imports no third-party package before `find_unimportable` has tried them
    from jaxdp.config import Config

TIMEOUT_SECONDS, GRACE_SECONDS = 120.0, 10.0


@dataclass(frozen=True)
class Probe:
    """Devices of this machine and memory needs of a config on them.

    broken: `packages.find_unimportable()`. devices: dicts with "kind", "platform" and "memory_bytes" (None if unknown).
    state_bytes: size of a checkpoint; input_bytes: images in flight on the host; both None if unknown. start_problem: why a run
    would not start on these devices; plan_problem: why the config does not fit them.
    """

    broken: dict[str, str] = field(default_factory=dict)
    devices: list[dict] = field(default_factory=list)
    state_bytes: int | None = None
    input_bytes: int | None = None
    start_problem: Problem | None = None
    plan_problem: Problem | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Probe":
        fields = json.loads(text)
        for name in ("start_problem", "plan_problem"):
            if fields[name] is not None:
                fields[name] = Problem(**fields[name])
        return cls(**fields)


def probe(config: "Config", timeout_seconds: float = TIMEOUT_SECONDS) -> Probe:
    """Probe JAX in a subprocess. A crash or a timeout is the result's `start_problem`."""
    from jaxdp.validation import to_json

    try:
        command = [sys.executable, "-m", "jaxdp.doctor.jax_probe"]
        return Probe.from_json(output_of(command, timeout_seconds, stdin=to_json(config)).splitlines()[-1])
    except (OSError, ValueError, LookupError, TypeError) as error:
        return _not_started(first_line(error).replace(sys.executable, "python"))


def probe_with_deadline(config: "Config", timeout_seconds: float = TIMEOUT_SECONDS) -> Probe:
    """`probe` in a thread that is abandoned if even killing the subprocess does not end it, as with a broken driver."""
    probes: list[Probe] = []
    thread = threading.Thread(
        target=lambda: probes.append(probe(config, timeout_seconds)), name=f"{THREAD_PREFIX}devices", daemon=True
    )
    thread.start()
    thread.join(timeout_seconds + GRACE_SECONDS)
    return probes[0] if probes else _not_started(f"no answer in {timeout_seconds:g} s, and the process cannot be killed")


def _not_started(reason: str) -> Probe:
    return Probe(start_problem=Problem("", f"JAX does not start: {reason}"))


def _probe_in_process() -> Probe:
    broken = packages.find_unimportable()
    print("starting JAX", file=sys.stderr, flush=True)  # the last line of stderr names the culprit if the process crashes
    try:
        return dataclasses.replace(_probe_devices(sys.stdin.read()), broken=broken)
    except Exception:
        if not broken:
            raise
        problem = Problem("", f"JAX was not started: cannot import {', '.join(broken)}", "reinstall that package first")
        return Probe(broken=broken, start_problem=problem)


def _probe_devices(config_json: str) -> Probe:
    from jaxdp.config import Config
    from jaxdp.distributed import runtime
    from jaxdp.validation import from_json

    config = from_json(config_json) if config_json else Config()
    problem = None
    try:
        runtime.start(config.mesh)
    except ConfigError as error:
        problem = Problem.from_error(error)
    import jax

    try:
        devices = jax.devices()
    except Exception:  # the type depends on platform and release; start_problem holds the reason
        return Probe(start_problem=problem)
    if devices[0].platform == "cpu":
        devices = devices[: config.mesh.cpu_devices or 1]
    rows = [
        {
            "kind": device.device_kind,
            "platform": device.platform,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        }
        for device in devices
    ]
    return _probe_plan(config, Probe(devices=rows, start_problem=problem))


def _probe_plan(config: "Config", probe: Probe) -> Probe:
    """Add the memory needs of the config on the probed devices."""
    import jax

    import jaxdp
    from jaxdp import models, sizes
    from jaxdp.parallel.mesh import make_mesh
    from jaxdp.training.state import abstract_state
    from jaxdp.xla.jax_options import own_options

    try:
        plan, problem = jaxdp.plan(config, len(probe.devices)), None
        config = plan.config
    except ConfigError as error:
        plan, problem = None, Problem.from_error(error)
    if config.model.classes is not None:
        with own_options():
            leaves = jax.tree.leaves(abstract_state(config, models.create(config.model), make_mesh(1, 1)))
        probe = dataclasses.replace(probe, state_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))
    if plan is None:
        return dataclasses.replace(probe, plan_problem=problem)
    return dataclasses.replace(probe, input_bytes=sizes.input_bytes(plan)["host"])


if __name__ == "__main__":
    print(_probe_in_process().to_json())
