"""Digests, what is kept, what is refused: checkpoints by themselves."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxdp
from jaxdp.config import Checkpoint, ConfigError
from jaxdp.parallel.mesh import AXES, make_mesh
from jaxdp.training import checkpoint, seal
from jaxdp.training.digest import devices_that_differ, digest
from jaxdp.training.guard import LossWatch, TrainingError, check_step
from jaxdp.training.restored import chosen, export, listed


def replicated_tree(mesh, **arrays):
    return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))


def test_the_digest_is_the_published_checksums():
    """Their check values, for the bytes of "123456789"."""
    assert digest(np.frombuffer(b"123456789", np.uint8)) == "e3069283" + "cbf43926"
    assert digest(np.float32(1.5)) == digest(np.array([1.5], np.float32))


def test_copies_that_differ_in_one_bit_anywhere_are_found_and_their_device_named():
    mesh = make_mesh(2, 4)
    values = {"x": np.array([0.0, np.nan, 1.0], np.float32), "y": np.arange(5, dtype=np.int32)}
    assert devices_that_differ(replicated_tree(mesh, **values)) == []
    odd = values["x"].copy()
    odd[0] = -0.0
    copies = [jax.device_put(odd if place == 6 else values["x"], device) for place, device in enumerate(mesh.devices.flat)]
    x = jax.make_array_from_single_device_arrays((3,), NamedSharding(mesh, PartitionSpec()), copies)
    tree = {"x": x, "y": replicated_tree(mesh, **values)["y"]}
    assert devices_that_differ(tree) == [mesh.devices.flat[6]]


def test_the_devices_that_differ_are_the_fewer():
    """The first device may be the odd one."""
    mesh = make_mesh(1, 3)
    assert devices_that_differ({"x": unequal(mesh, (2, 2), 0)}) == [mesh.devices.flat[0]]


def unequal(mesh, shape, different):
    """An array that claims to be the same on all devices, and on one of them is not."""
    copies = [
        jax.device_put(np.full(shape, 1.0 + (place == different), np.float32), device)
        for place, device in enumerate(mesh.devices.flat)
    ]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec()), copies)


def test_a_device_with_other_parameters_stops_the_run_by_its_name(tmp_path):
    mesh = make_mesh(2, 4)
    state = {"a": replicated_tree(mesh, x=np.zeros(3))["x"], "b": unequal(mesh, (4, 5), 6)}
    said = []
    kept = checkpoint.Checkpoints(tmp_path, Checkpoint(), said.append)
    kept.save(state, 80, {})
    kept.wait()
    name = str(mesh.devices.flat[6])
    with pytest.raises(TrainingError, match=rf"do not hold the same parameters at samples 80: {name} differs from"):
        kept.check()
    assert seal.directories(tmp_path) == []


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    mesh = make_mesh(1, 2)
    kept = checkpoint.Checkpoints(tmp_path, Checkpoint(), print)
    kept.save(replicated_tree(mesh, x=np.array([1.0, np.inf], np.float32)), 80, {})
    kept.wait()
    with pytest.raises(TrainingError, match="the parameters are no longer finite at samples 80; nothing was saved"):
        kept.check()


def test_the_newest_and_the_best_are_kept(tmp_path):
    mesh = make_mesh(1, 1)
    kept = checkpoint.Checkpoints(tmp_path, Checkpoint(keep=2), print)
    for samples, accuracy in [(10, 0.2), (20, 0.9), (30, 0.5), (40, None), (50, 0.9), (60, 0.1), (70, None)]:
        kept.save(replicated_tree(mesh, x=np.full(3, samples)), samples, {"accuracy": accuracy})
    kept.wait()
    assert [path.name for path in seal.directories(tmp_path)] == ["70", "60", "50"]  # of equals the later is the best
    kept.pinned.append(50)
    kept.save(replicated_tree(mesh, x=np.zeros(3)), 80, {"accuracy": 1.0})
    kept.wait()
    assert [path.name for path in seal.directories(tmp_path)] == ["80", "70", "50"]


def test_a_save_that_was_cut_off_is_no_checkpoint_and_is_cleared_away(tmp_path):
    mesh = make_mesh(1, 1)
    state = replicated_tree(mesh, x=np.arange(3.0))
    kept = checkpoint.Checkpoints(tmp_path, Checkpoint(), print)
    kept.save(state, 10, {})
    kept.wait()
    shutil.copytree(tmp_path / "10", tmp_path / "saving-20")
    again = checkpoint.Checkpoints(tmp_path, Checkpoint(), print)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    found, sealed = again.restore(lambda samples: abstract)
    assert sealed.samples == 10
    np.testing.assert_array_equal(found["x"], np.arange(3.0))
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


def test_a_checkpoint_is_restored_onto_another_mesh(tmp_path):
    state = replicated_tree(make_mesh(2, 4), x=np.arange(12.0).reshape(3, 4))
    kept = checkpoint.Checkpoints(tmp_path, Checkpoint(), print)
    kept.save(state, 10, {})
    kept.wait()
    sharding = NamedSharding(make_mesh(1, 3), PartitionSpec())
    abstract = {"x": jax.ShapeDtypeStruct((3, 4), state["x"].dtype, sharding=sharding)}
    found, _ = kept.restore(lambda samples: abstract)
    assert found["x"].sharding == sharding
    np.testing.assert_array_equal(found["x"], np.arange(12.0).reshape(3, 4))
    assert found["x"].sharding.mesh.axis_names == AXES


def record(step, loss):
    return {"step": step, "samples": 8 * step, "global_batch": 8, "learning_rate": 0.1, "loss": loss, "gradient_norm": 1.0}


def test_a_loss_that_explodes_is_told_once_with_where_it_was_good():
    watch = LossWatch(classes=10, factor=4.0)
    limit = 4 * np.log(10)
    losses = [2.0] * 30 + [1e9] + [2.0] * 25 + [limit + 1] * 30
    found = [(step, good) for step, loss in enumerate(losses, 1) if (good := watch.exploded(record(step, loss))) is not None]
    assert found == [(31, 8 * 11)]  # of the twenty steps up to 31 the first began at 88 samples
    calm = LossWatch(classes=10, factor=4.0)
    assert not any(calm.exploded(record(step, limit * 0.99)) for step in range(1, 100))
    assert "the loss has exploded: 20 steps up to step 5 (samples 40, learning rate 0.1)" in calm.remark(record(5, 40.0), "x")


def test_steps_that_are_not_finite_may_be_left_out_a_bounded_number_of_times(tiny, tmp_path):
    config = dataclasses.replace(
        tiny,
        guard=dataclasses.replace(tiny.guard, non_finite="skip", skip_at_most=2),
        optimizer=dataclasses.replace(tiny.optimizer, name="sgd"),
        schedule=dataclasses.replace(tiny.schedule, learning_rate=1e30),
    )
    with pytest.raises(TrainingError, match=r"3 steps were skipped, their gradients not finite, .*skip_at_most is 2"):
        jaxdp.train(config, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped_steps"] for line in lines if "loss" in line][-2:] == [1, 2]
    check_step(record(3, float("nan")) | {"skipped_steps": 2}, config)


# what can be done with them


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def test_a_run_is_evaluated_listed_and_exported(tiny, tmp_path, capsys):
    config = dataclasses.replace(
        tiny, checkpoint=Checkpoint(keep=9), optimizer=dataclasses.replace(tiny.optimizer, average_decay=0.5)
    )
    result = jaxdp.train(config, tmp_path)
    rows = listed(tmp_path)
    assert [(row["samples"], row["steps"], row["damage"]) for row in rows] == [
        (56, 7, None),
        (80, 10, None),
        (112, 12, None),
        (160, 15, None),
    ]
    told = jaxdp.evaluate(None, tmp_path)
    assert (told["eval_accuracy"], told["samples"], told["eval_examples"]) == (result.accuracy, 160, 23)
    assert told["eval_loss"] == pytest.approx(result.loss, rel=1e-6)
    at_56 = jaxdp.evaluate(config, tmp_path, "56")
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert at_56["eval_accuracy"] == next(line["eval_accuracy"] for line in logged if "eval_accuracy" in line)
    best = chosen(tmp_path, "best")
    assert best.accuracy == max(row["accuracy"] for row in rows if row["accuracy"] is not None)

    from safetensors import safe_open

    told = export(tmp_path, tmp_path / "w.safetensors", "56")
    with safe_open(tmp_path / "w.safetensors", "numpy") as file:
        names = list(file.keys())
        assert len(names) == told["tensors"]
        assert file.metadata()["samples"] == "56"
        weights = {name: file.get_tensor(name) for name in names}
    from jaxdp.training.restored import restored

    params, _ = restored(tmp_path, "56")[0].evaluated
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        np.testing.assert_array_equal(weights["/".join(["params", *(key.key for key in path)])], leaf)

    seal = tmp_path / "checkpoints/80/seal.json"
    seal.write_bytes(seal.read_bytes()[:-3])
    assert [row["damage"] is None for row in listed(tmp_path)] == [True, False, True, True]

    from jaxdp import cli

    cli.main(["checkpoints", "--workdir", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "seal.json is damaged" in shown
    assert shown.count("sound") == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: listed(path / "none"), "it holds no run"),
        (lambda path: chosen(path), "it holds no sound checkpoint"),
        (lambda path: export(path, path / "w.bin"), "give a file that ends in .safetensors"),
    ],
)
def test_what_is_not_there_is_one_line(tmp_path, call, message):
    with pytest.raises(ConfigError, match=message):
        call(tmp_path)
