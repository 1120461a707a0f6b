"""The all-reduce strategy of a run that leaves it to be chosen: measured once, written down, kept when the run goes on."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxdp.parallel import measure
from jaxdp.parallel.alone import Alone
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import Plan
from jaxdp.training.workdir import write_atomically

FILE = "reduce.json"


def chosen_strategies(
    plan: Plan, model, workdir: Path, screen, team=None, mesh_of=lambda phase: make_mesh(*phase.shape)
) -> dict:
    """Mesh shape -> strategy for all meshes of a plan whose strategy is "auto"; {} for a plan with a strategy of its own.

    What reduce.json in the working directory holds for a mesh and message is kept; the rest is measured on the gradient's
    own shapes, and added to the file. mesh_of(phase): None for meshes of JAX's first devices.
    """
    reduce = plan.config.reduce
    if reduce.strategy != "auto":
        return {}
    team, mesh_of = team or Alone(), mesh_of or (lambda phase: make_mesh(*phase.shape))
    path, size = workdir / FILE, plan.config.data.image_size
    params, _ = jax.eval_shape(lambda: model.init(jax.random.key(0), (size, size, 3)))
    gradient = model.trained(params, plan.config.finetune.frozen_stages)
    known, chosen = team.share("strategies known", _read(path)), {}
    sizes = [leaf.size for leaf in jax.tree.leaves(gradient)]
    for shape, phase in {phase.shape: phase for phase in plan.phases}.items():
        asked = {"mesh": list(shape), "wire_dtype": reduce.wire_dtype, "bucket_bytes": reduce.bucket_bytes}
        asked |= {"tensors": len(sizes), "parameters": sum(sizes)}
        found = next((one for one in known if all(one.get(name) == value for name, value in asked.items())), None)
        if found is None:
            wire = None if reduce.wire_dtype == "float32" else jnp.dtype(reduce.wire_dtype)
            strategy, seconds = measure.fastest(
                mesh_of(phase), gradient, wire, reduce.bucket_bytes, compile=plan.config.compile
            )
            found = asked | {"strategy": strategy, "seconds": seconds}
            known.append(found)
            if team.first:
                write_atomically(path, json.dumps(known, indent=1) + "\n")
            times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in sorted(seconds.items(), key=lambda s: s[1]))
            screen.say(f"all-reduce on {shape[0]}x{shape[1]}: {strategy} ({times})")
        else:
            screen.say(f"all-reduce on {shape[0]}x{shape[1]}: {found['strategy']}, as chosen before ({path})")
        chosen[shape] = found["strategy"]
    return chosen


def _read(path: Path) -> list[dict]:
    """The choices in a file; none where it is missing or damaged: they are measured again."""
    try:
        held = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    held = held if isinstance(held, list) else []
    return [one for one in held if isinstance(one, dict) and one.get("strategy") in measure.CANDIDATES]
