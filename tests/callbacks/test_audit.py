"""Audits of reductions: rounding passes, corrupted buckets are detected and named, and the run stops."""

import dataclasses
import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.runs import Recorder, train_shown
from helpers.step import with_parts
from helpers.strategies import set_stages
from helpers.torch_layout import write_tiny_weights
from jax import lax
from jax.sharding import PartitionSpec

from jaxdp import TrainingError, train
from jaxdp.callbacks import audit
from jaxdp.callbacks.audit import AuditProgram, BucketFacts, describe, local_findings
from jaxdp.checkpoint.listing import latest_valid
from jaxdp.config import Checkpoint, Finetune
from jaxdp.optim import loss_scale
from jaxdp.parallel import allreduce
from jaxdp.parallel.mesh import AXES, make_mesh
from jaxdp.parallel.redundant_sum import compare_sums, reference_reduction, rounding_bound
from jaxdp.run_records import TIMING, read_log
from jaxdp.strategies import STRATEGIES

NO_CORRUPTION = {"kind": 0, "device": 0, "place": 0, "bit": 0}
FLIP, LOSS, STALE, ONE_COPY = 1, 2, 3, 4


def corrupted(vector, how):
    """A device's contribution with a bit flipped, zeroed, or reversed. how: traced numbers."""
    bits = jnp.uint16 if vector.dtype.itemsize == 2 else jnp.uint32
    value = lax.bitcast_convert_type(vector[how["place"]], bits) ^ (jnp.ones((), bits) << how["bit"].astype(bits))
    flipped = vector.at[how["place"]].set(lax.bitcast_convert_type(value, vector.dtype))
    found = jnp.select(
        [how["kind"] == FLIP, how["kind"] == LOSS, how["kind"] == STALE], [flipped, 0 * vector, vector[::-1]], vector
    )
    return jnp.where(lax.axis_index(AXES) == how["device"], found, vector)


class Audited:
    """A reduction of one vector and its audit, compiled once for any contributions and corruptions."""

    def __init__(self, mesh_shape, strategy, wire="float32", after=False):
        """after: corrupt the sum that a device receives instead of its contribution."""
        mesh, self.shape, self.strategy = make_mesh(*mesh_shape), mesh_shape, strategy
        stages, self.wire = allreduce.stages_of(strategy), jnp.dtype(wire)
        self.reference = reference_reduction(strategy, *mesh_shape)
        allowed = rounding_bound(strategy, self.wire, vertical=mesh_shape[0], horizontal=mesh_shape[1])

        def per_device(tree, how):
            sent, middle = [], [lambda vector: corrupted(vector, how)]
            corrupting = [*stages, *middle] if after else [*middle, *stages]

            def reduce(vector):
                for stage in corrupting:
                    vector = stage(vector)
                return vector

            allreduce.reduce_tree(
                jax.tree.map(lambda x: x[0], tree), reduce, wire_dtype=self.wire, bucket_bytes=None, sent=sent
            )
            ((_, (bucket,)),) = sent
            return jax.tree.map(lambda x: x[None, None], compare_sums(bucket, self.reference, allowed))

        rows, everywhere = PartitionSpec(AXES), PartitionSpec()
        specs = {"in_specs": (rows, everywhere), "out_specs": rows, "check_vma": False}
        self.call = jax.jit(jax.shard_map(per_device, mesh=mesh, **specs))

    def __call__(self, values, **how):
        """The findings of the devices for `values`: one row for each device."""
        how = {name: np.uint32(value) for name, value in (NO_CORRUPTION | how).items()}
        return local_findings(self.call({"tensor": values}, how))

    def in_words(self, found) -> str:
        facts = (BucketFacts((("tensor", 10**6),), str(self.wire)),)
        return describe([found], AuditProgram(None, facts, self.strategy, self.reference, self.shape), ["here"])


def draw(devices, size=1001, seed=0):
    return np.random.default_rng(seed).normal(size=(devices, size)).astype(np.float32)


@pytest.mark.parametrize(
    ("strategy", "mesh_shape", "wire"),
    [
        ("torus", (2, 4), "float32"),
        ("torus", (8, 1), "bfloat16"),
        ("torus", (1, 8), "float16"),
        ("psum", (2, 4), "bfloat16"),
        ("psum", (1, 8), "float32"),
        ("hierarchical", (4, 2), "float32"),
        ("ring", (2, 4), "float16"),
        ("parameter_server", (2, 4), "float32"),
    ],
)
def test_audit_passes_intact_buckets_and_detects_corrupted_ones(strategy, mesh_shape, wire):
    audited = Audited(mesh_shape, strategy, wire)
    for seed in range(5):
        clean = audited(draw(8, seed=seed))
        assert not clean["buckets"]
        assert 0 <= clean["share"] <= 1
    sign = 15 if wire != "float32" else 31
    for kind, device in ((FLIP, 0), (FLIP, 7), (LOSS, 1), (LOSS, 6), (STALE, 5)):
        found = audited(draw(8), kind=kind, device=device, place=333, bit=sign)["buckets"]["0"]
        assert found["devices"] == list(range(8))
        assert found["missing"] == ([device] if kind == LOSS else [])
        if kind == FLIP:
            assert (found["index"], found["mismatches"]) == (333, 1)


@pytest.mark.parametrize("strategy", ["torus", "ring"])
def test_audit_of_one_wrong_copy_of_the_sum_names_its_device(strategy):
    audited = Audited((2, 4), strategy, after=True)
    found = audited(draw(8), kind=FLIP, device=6, place=7, bit=30)
    assert found["buckets"]["0"]["devices"] == [6]
    assert "1 value differs, on the device in row 1, column 2 of the mesh" in audited.in_words(found)


def test_audit_of_a_change_within_rounding_passes():
    assert not Audited((2, 4), "psum")(draw(8), kind=FLIP, device=3, place=5, bit=0)["buckets"]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_audit_of_a_non_finite_contribution_passes(value):
    values = draw(8)
    values[3, 17] = value
    assert not Audited((2, 4), "torus")(values)["buckets"]


def test_audit_of_an_overflow_passes_and_of_an_unexplained_infinity_fails():
    audited, values = Audited((2, 4), "torus", "float16", after=True), draw(8)
    values[:, 9] = [60000, 60000, -60000, -60000, 100, 200, 300, 400]  # 1000 or infinite, depending on the order
    assert not audited(values)["buckets"]
    found = audited(values, kind=FLIP, device=2, place=10, bit=14)["buckets"]["0"]
    assert found["devices"] == [2]
    values = np.full((8, 100), 5000, np.float32)  # the exponent of 40000 lacks one bit, with which it is no number
    found = audited(values, kind=FLIP, device=2, place=10, bit=10)["buckets"]["0"]
    assert (found["index"], found["mismatches"]) == (10, 1)
    values = np.full((8, 100), 0.25, np.float32)  # their sum is 2, whose exponent has one bit: with all others it is infinite
    found = audited(values, kind=FLIP, device=2, place=10, bit=13)["buckets"]["0"]
    assert found["index"] == 10


def found(devices, missing=(), excess=10.0, place=0):
    numbers = {"first": "1.5", "second": "1", "difference": "0.5", "bound": "1e-07"}
    return numbers | {"devices": devices, "missing": list(missing), "excess": excess, "index": place, "mismatches": 1200}


FACTS = (
    BucketFacts((("head/bias", 10),), "float32"),
    BucketFacts((("conv1/kernel", 300), ("bn1/scale", 700), ("bn1/bias", 700)), "bfloat16"),
)


def test_describe_names_the_worst_bucket_its_tensor_devices_and_the_missing_rank():
    program = AuditProgram(None, FACTS, "torus", "all-reduce over both axes", (2, 2))
    everywhere = [
        {"share": 0.1, "buckets": {"1": found([0, 1], place=999), "0": found([0], excess=2.0)}},
        {"share": 0.1, "buckets": {"1": found([2, 3], missing=[3], excess=20.0, place=300)}},
    ]
    assert describe(everywhere, program, ["one", "two"]) == (
        "bucket 2 of 2 (conv1/kernel and 2 more tensors; 1,700 values, bfloat16), reduced by torus on a 2x2 mesh, "
        "differs from the reference reduction (all-reduce over both axes) by up to 0.5, and rounding explains 1e-07: 1.5 and "
        "1 in value 300, of bn1/scale; 1,200 values differ, on all 4 devices; the contribution of the device in row 1, column "
        "1 of the mesh (rank 1 on two) is missing; 1 other bucket also differs"
    )
    assert describe([{"share": 0.1, "buckets": {}}] * 2, program, ["one", "two"]) is None


def with_audits(config, every, **changes):
    checkpoint = Checkpoint(every_epochs=0.32, keep=1)
    return dataclasses.replace(with_parts(config, guard={"audit_every_steps": every}), checkpoint=checkpoint, **changes)


def accumulating(config, _):
    """Two micro-batches a step, sent in float16, the loss scaled."""
    batch = tuple(dataclasses.replace(phase, per_worker_batch=phase.global_batch // 8) for phase in config.batch)
    config = dataclasses.replace(config, batch=batch)
    return with_parts(config, reduce={"wire_dtype": "float16"}, optimizer={"loss_scale": "dynamic"})


def frozen(config, folder):
    file, _ = write_tiny_weights(folder / "w.safetensors", classes=config.model.classes)
    return dataclasses.replace(config, finetune=Finetune(weights=file, frozen_stages=2))


def sharded(config, _):
    return with_parts(config, reduce={"update": "sharded"})


@pytest.mark.parametrize(
    ("network", "changed"),
    [
        ("tiny", sharded),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("tiny", accumulating), ("tiny_resnet", frozen))),
    ],
)
def test_run_with_audits_equals_the_run_without(network, changed, tmp_path, monkeypatch, request):
    for name, value in {"INITIAL": 64.0, "GROWTH_STEPS": 4}.items():
        monkeypatch.setattr(loss_scale, name, value)
    config = changed(request.getfixturevalue(network), tmp_path)
    plain = train(with_audits(config, None), tmp_path / "plain")
    result = train(with_audits(config, 4), tmp_path / "audited")  # steps 4, 8 and 12 of 15, in both phases
    assert (plain.audits, result.audits) == (0, 3)
    assert (plain.audit_seconds, result.accuracy) == (0.0, plain.accuracy)
    assert result.audit_seconds > 0
    logs = [read_log(tmp_path / name / "metrics.jsonl") for name in ("plain", "audited")]
    ours, audited = ([{k: v for k, v in line.items() if k not in TIMING} for line in log] for log in logs)
    shares = {line["step"]: line.pop("audit_share") for line in audited if "audit_share" in line}
    assert list(shares) == [4, 8, 12]
    assert all(0 < share <= 1 for share in shares.values())
    assert ours == audited
    first, second = (latest_valid(tmp_path / name / "checkpoints").arrays for name in ("plain", "audited"))
    assert first == second


def test_facts_of_a_bucket_in_parts_name_the_tensor_of_a_value():
    """Two parts: 150 values of the first tensor, 350 of the second, then the same again."""
    facts = BucketFacts((("conv1/kernel", 150), ("bn1/scale", 350)), "float32", parts=2)
    names = [facts.tensor_at(place) for place in (0, 149, 150, 499, 500, 649, 650, 999)]
    assert names == ["conv1/kernel"] * 2 + ["bn1/scale"] * 2 + ["conv1/kernel"] * 2 + ["bn1/scale"] * 2
    assert facts.size == 1000


def test_run_with_a_corrupted_reduction_stops_and_keeps_the_checkpoint_before_it(tiny, tmp_path, monkeypatch):
    """In audits of the second phase, one device contributes zeros to large buckets: the audit of step 12 fails."""
    breaking, compile_audit = threading.Event(), audit.compile_audit

    def losing(vector):
        lost = (lax.axis_index(AXES) == 2) & (vector.size > 600) if breaking.is_set() else False
        return jnp.where(lost, 0.0, 1.0).astype(vector.dtype) * vector

    def compiled(compiler, phase):
        if phase.index == 1:
            breaking.set()
        return compile_audit(compiler, phase)

    monkeypatch.setattr(audit, "compile_audit", compiled)
    set_stages(monkeypatch, "losing", losing, *allreduce.stages_of("torus"))
    monkeypatch.setitem(STRATEGIES.entries, "losing", dataclasses.replace(STRATEGIES["losing"], scatters=True))
    config = with_audits(tiny, 4, reduce=dataclasses.replace(tiny.reduce, strategy="losing", update="sharded"))
    with pytest.raises(TrainingError) as error:
        train(config, tmp_path / "run")
    message = str(error.value)
    assert re.search(
        r"the audit of step 12 failed: bucket \d+ of \d+ \(.+; [\d,]+ values, float32\), reduced by losing", message
    )
    assert "the contribution of the device in row 1, column 0 of the mesh is missing" in message
    assert "steps after 8, whose audit passed, may have used a wrong gradient" in message
    path = Path(re.search(r"the same command continues from (\S+), the last checkpoint before$", message)[1])
    assert int(path.name) in (32, 48)  # the newest one before step 8, at 56 samples, or still being written then
    names = {checkpoint.name for checkpoint in (tmp_path / "run/checkpoints").iterdir()}
    assert names == {path.name, "80.suspect"}  # that after step 11 is not saved before the audit of step 12
    assert str(path.with_name("80.suspect")) in message

    breaking.clear()
    monkeypatch.setattr(audit, "compile_audit", compile_audit)
    screen = Recorder()
    result = train_shown(config, tmp_path / "run", screen=screen)
    assert any(f"resuming from {path}" in text for text in screen.lines)
    assert (result.steps, result.audits) == (15, 3)
