"""The public parts in programs that are not jaxdp's, which follow `jaxdp.train`; and the examples of docs/parts.md."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import train_state
from helpers.flax_nets import LinenNet
from jax.sharding import NamedSharding, PartitionSpec

import jaxdp
from jaxdp.config import Config, Model, Optimizer, Phase
from jaxdp.models import resnet
from jaxdp.run_records import read_log
from jaxdp.training.step import make_layout

STEPS, BATCH, MOMENTUM, DECAY, SMOOTHING = 9, 16, 0.8, 0.01, 0.1


@pytest.fixture
def config(tiny) -> Config:
    """Nine steps of one batch size over two and a half epochs; a worker for each of four devices."""
    optimizer = Optimizer(
        name="lars", momentum=MOMENTUM, momentum_rule="constant", weight_decay=DECAY, label_smoothing=SMOOTHING
    )
    return dataclasses.replace(tiny, epochs=2.75, batch=(Phase(BATCH),), optimizer=optimizer)


def losses_of(workdir) -> list[float]:
    return [record["loss"] for record in read_log(workdir / "metrics.jsonl") if "loss" in record]


class TrainState(train_state.TrainState):
    batch_stats: dict


def flax_step(mesh, mean, std):
    """step(state, batch) -> (state, loss) as in Flax's ImageNet example, with jaxdp's loss and all-reduce."""

    def step(state, batch):
        def loss_of(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            images = (batch["images"] - mean) / std
            logits, changed = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
            return jaxdp.losses.cross_entropy(logits, batch["labels"], SMOOTHING).mean(), changed["batch_stats"]

        (loss, batch_stats), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        loss, batch_stats = jaxdp.all_reduce_mean((loss, batch_stats))
        gradient = jaxdp.all_reduce_mean(gradient, "torus")
        return state.apply_gradients(grads=gradient, batch_stats=batch_stats), loss

    rows, everywhere = PartitionSpec(mesh.axis_names), PartitionSpec()
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(everywhere, rows), out_specs=everywhere, check_vma=False))


def test_program_in_flax_and_optax_with_the_parts_follows_train_across_a_plain_orbax_checkpoint(config, tmp_path):
    jaxdp.register_model("linen", LinenNet)
    config = dataclasses.replace(config, model=Model(name="linen", classes=6))
    jaxdp.train(config, tmp_path / "run")

    mesh, data = jaxdp.make_mesh(2, 2), jaxdp.data.open_datasets(config)
    epochs = [step * BATCH / len(data.train) for step in range(STEPS)]
    rates = [jaxdp.schedules.learning_rate(config.schedule, at, epochs=config.epochs, global_batch=BATCH) for at in epochs]
    table = jnp.array(rates)
    net = LinenNet(6)
    variables = jax.jit(lambda key: net.init(key, jnp.zeros((1, 16, 16, 3)), train=False))(jax.random.key(config.seed))
    optimizer = jaxdp.optim.lars(lambda step: table[step], MOMENTUM, weight_decay=DECAY)
    state = TrainState.create(apply_fn=net.apply, tx=optimizer, **variables)
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    step, losses = flax_step(mesh, np.float32(data.mean), np.float32(data.std)), []
    with jaxdp.data.Loader(data.train, BATCH, mesh=mesh, seed=config.seed) as loader:
        for _ in range(4):
            state, loss = step(state, next(loader))
            losses.append(float(loss))
        saved = loader.get_state()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", {"state": state, "loader": saved})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", {"state": state, "loader": saved})
    with jaxdp.data.Loader(data.train, BATCH, mesh=mesh, seed=config.seed, end=STEPS * BATCH) as loader:
        loader.set_state(restored["loader"])
        state = restored["state"]
        for batch in loader:
            state, loss = step(state, batch)
            losses.append(float(loss))
    np.testing.assert_allclose(losses, losses_of(tmp_path / "run"), rtol=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_own_loop_around_the_step_equals_train_bitwise(config, tmp_path, update):
    config = dataclasses.replace(config, reduce=dataclasses.replace(config.reduce, update=update))
    jaxdp.train(config, tmp_path)
    model, mesh, data = jaxdp.models.create(config.model), jaxdp.make_mesh(2, 2), jaxdp.data.open_datasets(config)
    step = jaxdp.make_train_step(config, model, mesh, pixel_stats=(data.mean, data.std))
    state, losses = jaxdp.create_state(config, model, mesh), []
    with jaxdp.data.Loader(data.train, BATCH, mesh=mesh, seed=config.seed, end=STEPS * BATCH) as loader:
        for batch in loader:
            epoch = len(losses) * BATCH / len(data.train)
            rate = jaxdp.schedules.learning_rate(config.schedule, epoch, epochs=config.epochs, global_batch=BATCH)
            values = {"learning_rate": rate, "momentum": MOMENTUM, "seed": np.uint32(config.seed)}
            state, metrics = step(state, batch, values)
            losses.append(float(metrics["loss"]))
    assert losses == losses_of(tmp_path)
    params, _ = make_layout(config, model, mesh).eval_variables(state)
    jax.tree.map(np.testing.assert_array_equal, params["net"], jaxdp.load_params(tmp_path)["params"])


SECTIONS = (Path(__file__).parent.parent / "docs/parts.md").read_text().split("\n## ")[1:]
EXAMPLES = {section.splitlines()[0]: re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0] for section in SECTIONS}


def names_for(config) -> dict:
    """What the examples of the page use without defining it."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (300, 16, 16, 3)).astype(np.uint8), np.arange(300) % 6
    modules = {"jax": jax, "jaxdp": jaxdp, "jnp": jnp, "np": np, "optax": optax, "PartitionSpec": PartitionSpec}
    data = {"images": images, "labels": labels, "examples": 300, "steps": 9, "batch_size": 32}
    return modules | data | {"mesh": jaxdp.make_mesh(2, 2), "config": config, "state": 0, "step": lambda state, _: state + 1}


def test_all_reduce_example_takes_the_step_of_one_device(config):
    def loss_of(weights, rows):
        return ((rows @ weights - 1) ** 2).mean()

    random = np.random.default_rng(0)
    weights, rows = random.normal(size=3).astype(np.float32), random.normal(size=(16, 3)).astype(np.float32)
    names = names_for(config) | {"loss_of": loss_of, "params": weights, "batches": [rows, rows], "NamedSharding": NamedSharding}
    exec(EXAMPLES["All-reduce"], names)
    for _ in range(2):
        errors = rows.astype(np.float64) @ weights - 1
        weights = weights - 0.1 * 2 * errors @ rows / 16
    np.testing.assert_allclose(names["loss"], (errors**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(names["params"], weights, rtol=1e-5)
    assert names["mapped"]._cache_size() == 1


@pytest.mark.parametrize("title", [title for title in EXAMPLES if title not in ("All-reduce", "ResNet")])
def test_examples_of_the_page_run(title, config):
    exec(EXAMPLES[title], names_for(config))


def test_resnet_example_has_logits_and_new_statistics(config, monkeypatch):
    monkeypatch.setitem(resnet.BLOCKS, 50, resnet.BLOCKS[resnet.TWO_BLOCKS])
    names = names_for(config)

    def example():
        exec(EXAMPLES["ResNet"], names)
        return names["logits"], names["changed"]["batch_stats"], names["variables"]["batch_stats"]

    logits, changed, before = jax.eval_shape(example)  # without compiling it
    assert logits.shape == (300, 1000)
    assert changed == before
