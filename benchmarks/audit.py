"""Detection rate, false alarms and cost of audits of reductions.

    python benchmarks/audit.py [--trials 100] [--clean 1000] [--only corrupted clean cost]

The contributions are gradients of a small ResNet during training, on eight virtual CPU devices. For every strategy and wire
dtype, on three of five meshes, a program reduces them as the step does, with a corruption given as arguments, and audits the
result.

- corrupted: a flipped bit of a device's vector before or after any stage (all bits equally often), a device's contribution left
  out, or the contribution of the previous step; each in a random bucket. A corruption is certain to be found if it changes a
  sum by more than twice the bound; trials continue until there are --trials of these.
- clean: audits of uncorrupted buckets.
- cost: a ResNet-18 of a quarter of the width on 32x32 images, audited every fourth step.

Writes benchmarks/results/audit.json, keeping parts that are not selected, and prints the tables.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
from common import ROOT, arguments, markdown, read, write

from jaxdp.strategies import STRATEGIES

MESHES = ((1, 2), (1, 8), (2, 4), (4, 2), (8, 1))
WIRES = ("float32", "bfloat16", "float16")
# Every strategy with every wire dtype, on three meshes each.
COMBINATIONS = tuple(
    (strategy, MESHES[(row + 2 * column) % len(MESHES)], wire)
    for row, strategy in enumerate(STRATEGIES)
    for column, wire in enumerate(WIRES)
)
TENSORS = 12  # number of tensors of the gradient that are sent, starting with the head's
KINDS = ("none", "bit", "lost", "stale")
RUN = [  # of `cost`
    *("--data.source", "synthetic", "--data.image-size", "32", "--data.train-examples", "512", "--data.eval-examples", "32"),
    *("--model.depth", "18", "--model.width", "16", "--model.stem", "small", "--optimizer.name", "sgd"),
    *("--batch.0.global-batch", "32", "--batch.0.until-epoch", "1.5", "--batch.1.global-batch", "32", "--epochs", "3"),
    *("--schedule.warmup-epochs", "1", "--schedule.learning-rate", "0.01", "--evaluation.every-epochs", "None"),
    *("--logging.no-tensorboard", "--logging.every-steps", "1000", "--guard.audit-every-steps", "4"),
]


def gradients(steps: int) -> list[list[np.ndarray]]:
    """By step: the first tensors of the gradient that are sent, [8, ...], one row for each device's own part."""
    import jax
    from jax.sharding import PartitionSpec

    from jaxdp import models
    from jaxdp.bench.step_runner import build_step
    from jaxdp.config import Config, Data, Model, Phase, Reduce
    from jaxdp.parallel.mesh import AXES, make_mesh
    from jaxdp.training.step import make_layout, step_gradient

    config = Config(
        data=Data(source="synthetic", image_size=8),
        model=Model(depth=18, width=8, stem="small", classes=10),
        batch=(Phase(global_batch=32),),
        reduce=Reduce(strategy="psum", bucket_bytes=1),
    )
    mesh, model = make_mesh(1, 8), models.create(config.model)
    one = build_step(config, mesh, global_batch=32, strategy="psum")

    layout = make_layout(config, model, mesh)

    def own(state, batch):
        sent = []
        step_gradient(config, layout, pixel_stats=(127.5, 64.0))(state, batch, config.seed, sent=sent)
        return [bucket.contribution[None] for _, buckets in sent for bucket in buckets][:TENSORS]

    rows, everywhere = PartitionSpec(AXES), PartitionSpec()
    specs = {"in_specs": (everywhere, rows), "out_specs": rows}
    own = jax.jit(jax.shard_map(own, mesh=mesh, **specs))
    found = []
    for _ in range(steps):
        found.append([np.asarray(leaf) for leaf in own(one.state, one.batch)])
        one()
    return found


class Audited:
    """A reduction of all tensors and its audit, compiled once: corruptions are arguments."""

    def __init__(self, strategy: str, mesh_shape: tuple[int, int], wire: str, shapes):
        """shapes: arrays as in `gradients`."""
        import jax
        import jax.numpy as jnp
        from jax import lax
        from jax.sharding import PartitionSpec

        from jaxdp.parallel import allreduce
        from jaxdp.parallel.mesh import AXES, make_mesh
        from jaxdp.parallel.redundant_sum import compare_sums, reference_reduction, rounding_bound

        mesh, dtype = make_mesh(*mesh_shape), jnp.dtype(wire)
        stages, reference, self.wire = allreduce.stages_of(strategy), reference_reduction(strategy, *mesh_shape), wire
        vertical, horizontal = mesh_shape
        allowed = rounding_bound(strategy, dtype, vertical=vertical, horizontal=horizontal)
        bits = jnp.uint32 if dtype.itemsize == 4 else jnp.uint16

        def corrupted(vector, before, how):
            place = (how["place"] % vector.size).astype(jnp.int32)
            value = lax.bitcast_convert_type(vector[place], bits) ^ (jnp.ones((), bits) << how["bit"].astype(bits))
            flipped = vector.at[place].set(lax.bitcast_convert_type(value, dtype))
            made = {"bit": flipped, "lost": jnp.zeros_like(vector), "stale": before}
            return jnp.select([how["kind"] == KINDS.index(kind) for kind in made], list(made.values()), vector)

        def per_device(tree, before, how):
            tree, before = ([leaf[0] for leaf in one] for one in (tree, before))
            found, changes = [], []
            sent = zip(*(allreduce.pack_buckets(one, strategy, wire_dtype=dtype) for one in (tree, before)), strict=True)
            for number, (bucket, stale) in enumerate(sent):
                magnitude = lax.psum(jnp.abs(bucket.contribution.astype(jnp.float32)), AXES)
                bound = magnitude * allowed.relative + allowed.absolute
                for boundary in range(len(stages) + 1):
                    here = (lax.axis_index(AXES) == how["device"]) & (number == how["bucket"]) & (boundary == how["boundary"])
                    vector = bucket.vector
                    bucket.vector = jnp.where(here, corrupted(vector, vector if boundary else stale.contribution, how), vector)
                    change = jnp.abs(bucket.vector.astype(jnp.float32) - vector.astype(jnp.float32))
                    change = jnp.where(jnp.isfinite(change), change, jnp.inf)
                    changes.append(change.max() / bound.max() if boundary else jnp.max(change / bound))
                    if bucket.stages:
                        bucket.run_next_stage()
                found.append(compare_sums(bucket, reference, allowed))
            return {name: jnp.stack([one[name] for one in found])[None] for name in found[0]}, jnp.stack(changes).max()[None]

        rows, everywhere = PartitionSpec(AXES), PartitionSpec()
        specs = {"in_specs": (rows, rows, everywhere), "out_specs": rows, "check_vma": False}
        self.call = jax.jit(jax.shard_map(per_device, mesh=mesh, **specs))
        tensors = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in shapes]
        self.buckets = len(allreduce.leaf_buckets(tensors, allreduce.BUCKET_BYTES, dtype))
        self.devices, self.boundaries, self.bits = mesh.size, len(stages) + 1, 8 * dtype.itemsize
        self.certain = 2 / (1 - allowed.relative)  # a larger change, in bounds, cannot be explained by rounding

    def __call__(self, now, before, **how) -> tuple[dict, float]:
        """(findings of the devices, change of the sum in multiples of the bound). now, before: `gradients` of two steps."""
        from jaxdp.callbacks.audit import local_findings

        how = {name: np.uint32(how.get(name, 0)) for name in ("kind", "device", "bucket", "boundary", "place", "bit")}
        found, changes = self.call(*([leaf[: self.devices] for leaf in one] for one in (now, before)), how)
        return local_findings(found), float(np.max(changes))


def corruptions(make, steps, trials: int, draw) -> dict:
    """Number of corruptions, certain and other, and how many of them were found in the right bucket, by kind."""
    results = {}
    for kind in KINDS[1:]:
        counts, bits, least_missed = Counter(), {}, 0.0
        while counts["certain"] < trials:
            audited = make(*draw.choice(COMBINATIONS))
            step, bucket = draw.randrange(1, len(steps)), draw.randrange(audited.buckets)
            how = {
                "kind": KINDS.index(kind),
                "device": draw.randrange(audited.devices),
                "bucket": bucket,
                "boundary": draw.randrange(audited.boundaries) if kind == "bit" else 0,
                "place": draw.randrange(2**31),
                "bit": draw.randrange(audited.bits),
            }
            found, change = audited(steps[step], steps[step - 1], **how)
            assert found["buckets"].keys() <= {str(bucket)}, (how, found)
            certain, seen = change > audited.certain, bool(found["buckets"])
            counts["certain" if certain else "uncertain"] += 1
            counts["certain found" if certain else "uncertain found"] += seen
            if kind == "lost" and seen:
                counts["device named"] += found["buckets"][str(bucket)]["missing"] == [how["device"]]
            if kind == "bit":
                one = bits.setdefault(f"{audited.wire} {how['bit']}", [0, 0])
                one[0], one[1] = one[0] + seen, one[1] + 1
            if not seen:
                least_missed = max(least_missed, change)
        results[kind] = dict(counts) | {"largest_missed_in_bounds": least_missed} | ({"by_bit": bits} if bits else {})
        print(kind, results[kind], flush=True)
    return results


def clean(make, steps, audits: int) -> dict:
    """Number of audits of uncorrupted buckets, every combination equally often, and of false alarms."""
    done, reported, shares = 0, 0, {}
    for step, combination in itertools.product(range(1, len(steps)), COMBINATIONS):
        if done == audits:
            break
        audited = make(*combination)
        found, _ = audited(steps[step], steps[step - 1])
        done, reported = done + 1, reported + bool(found["buckets"])
        if done % 100 == 0:
            print(f"{done} clean audits, {reported} reported", flush=True)
        shares[combination[2]] = max(shares.get(combination[2], 0.0), found["share"])
    buckets = {wire: make("torus", (2, 4), wire).buckets for wire in WIRES}
    return {"audits": done, "reported": reported, "buckets_an_audit": buckets, "largest_share_of_bound": shares}


def cost() -> list[dict]:
    """An audit beside a step, in runs on images of 32x32: seconds of each, and the share of the time at the default."""
    from jaxdp.config import Guard

    results = []
    for processes in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            line = [sys.executable, "-m", "jaxdp", "launch", "--processes", str(processes), "--", "train.py", *RUN]
            line += ["--workdir", f"{folder}/run", "--mesh.cpu-devices", str(4 // processes)]
            done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            result = json.loads(Path(folder, "run/result.json").read_text())
        audit, step = result["audit_seconds"] / result["audits"], result["training_seconds"] / result["steps"]
        every = Guard().audit_every_steps
        results.append({"processes": processes, "devices": 4, "audits": result["audits"], "audit_seconds": audit})
        results[-1] |= {"step_seconds": step, "steps_between_audits": every, "share": audit / step / every}
        print(results[-1], flush=True)
    return results


def table(record: dict) -> str:
    names = {
        "bit": "a flipped bit of a device's vector",
        "lost": "a device's contribution left out",
        "stale": "the contribution of the previous step",
    }
    counts = "certain", "certain found", "uncertain", "uncertain found"
    rows = [(names[kind], *(str(one.get(count, 0)) for count in counts)) for kind, one in record["corrupted"].items()]
    checked = record["clean"]
    shares = ", ".join(f"{share:.3f} ({wire})" for wire, share in checked["largest_share_of_bound"].items())
    costs = "; ".join(
        f"{one['processes']} process{'es' * (one['processes'] > 1)}: {one['audit_seconds'] / one['step_seconds']:.2f} steps, "
        f"{100 * one['share']:.2f} % of the run at one every {one['steps_between_audits']} steps"
        for one in record["cost"]
    )
    return markdown(
        ("corruption of a bucket", "certain to be found", "found", "other", "found"),
        rows,
        f"False alarms: {checked['reported']} of {checked['audits']:,} audits; the largest difference was, as a share of its "
        f"bound, {shares}.\nAn audit takes, with {costs}.",
    )


def main():
    given = arguments(__doc__, trials=100, clean=1000, only=["corrupted", "clean", "cost"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    from jaxdp.bench.environment import provenance

    record = read("audit", {})
    record["provenance"] = provenance()
    if {"corrupted", "clean"} & set(given.only):
        steps = gradients(-(-given.clean // len(COMBINATIONS)) + 1)
        make = cache(lambda *combination: Audited(*combination, steps[0]))
        if "clean" in given.only:
            record["clean"] = clean(make, steps, given.clean)
            print(record["clean"], flush=True)
        if "corrupted" in given.only:
            record["corrupted"] = corruptions(make, steps, given.trials, random.Random(0))
    if "cost" in given.only:
        record["cost"] = cost()
    write("audit", record)
    if record.keys() >= {"corrupted", "clean", "cost"}:
        print(table(record))


if __name__ == "__main__":
    main()
