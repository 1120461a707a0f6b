"""Sizes of a planned run, against sums over the arrays of a network and arithmetic with round numbers."""

import dataclasses
import math

import jax
import pytest

import jaxdp
from jaxdp import models
from jaxdp.config import Config, Data, Mesh, Phase
from jaxdp.errors import ConfigError
from jaxdp.planning import make_plan
from jaxdp.sizes import input_bytes, model_summary, state_bytes
from jaxdp.validation import with_fields


def elements(tree) -> list[int]:
    return [math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("fields", "width", "weighted"),
    [
        ({}, 4, False),
        ({"finetune.frozen_stages": 1, "reduce.wire_dtype": "bfloat16", "reduce.bucket_bytes": 1}, 2, False),
        ({"finetune.frozen_stages": 2, "reduce.overlap": False, "optimizer.class_weights": (1.0,) * 6}, 4, True),
        ({"optimizer.class_weights": "balanced", "data.mix": "mixup", "model.dtype": "bfloat16"}, 4, False),
        ({"optimizer.adapt": "all", "reduce.bucket_bytes": 1, "reduce.overlap": False}, 4, False),
    ],
    ids=str,
)
def test_messages_and_state_are_sums_over_the_arrays(tiny_resnet, fields, width, weighted):
    config = with_fields(tiny_resnet, fields | {"reduce.update": "sharded", "optimizer.average_decay": 0.9})
    summary, model = model_summary(config), models.create(config.model, platform="any")
    params, stats = jax.eval_shape(lambda: model.init(jax.random.key(0), (16, 16, 3)))
    segments = model.split_frozen(config.finetune.frozen_stages)[1]
    names = [name for segment in segments for name in segment]
    trained, trained_stats = ({name: tree[name] for name in names if name in tree} for tree in (params, stats))
    groups = segments if config.reduce.overlap else [names]
    arrays = [[leaf for name in sorted(group) for leaf in jax.tree.leaves(params[name])] for group in groups]
    statistics = [4] * weighted + [4 * (sum(elements(trained_stats)) + 4)]  # loss, accuracy, two requests

    def messages(lists, size):
        lists = [[math.prod(leaf.shape) * size for leaf in each] for each in lists]
        return [one for each in lists for one in (each if config.reduce.bucket_bytes else [sum(each)])]

    assert summary["messages"] == messages(arrays, width) + statistics
    assert (summary["statistics_messages"], summary["statistics_bytes"]) == (statistics, sum(statistics))
    assert summary["gradient_bytes"] == sum(elements(trained)) * width
    matrices = [[leaf for leaf in each if len(leaf.shape) > 1] for each in arrays]
    vectors = 4 * sum(math.prod(leaf.shape) for each in arrays for leaf in each if len(leaf.shape) < 2)
    assert summary["gathered_messages"] == [vectors, *messages(matrices, 2 if config.model.dtype == "bfloat16" else 4)]
    assert model_summary(with_fields(config, {"reduce.update": "replicated"}))["gathered_messages"] == []
    decayed = {
        "parameters": sum(
            n for n, leaf in zip(elements(trained), jax.tree.leaves(trained), strict=True) if len(leaf.shape) > 1
        ),
        "tensors": sum(len(leaf.shape) > 1 for leaf in jax.tree.leaves(trained)),
    }
    everything = {"parameters": sum(elements(trained)), "tensors": len(elements(trained))}
    decayed = everything if config.optimizer.adapt == "all" else decayed
    for key in decayed:
        assert (summary["decayed"][key], summary["not_decayed"][key]) == (decayed[key], everything[key] - decayed[key])
    held = {name: 4 * sum(elements(tree)) for name, tree in (("parameters", params), ("batch_statistics", stats))}
    average = 4 * (sum(elements((trained, trained_stats))) + 1)
    assert summary["state_bytes"].items() >= (held | {"gradients": 4 * sum(elements(trained)), "averages": average}).items()
    assert "averages" not in model_summary(with_fields(config, {"optimizer.average_decay": None}))["state_bytes"]


@pytest.mark.parametrize(
    ("name", "copies", "norms"), [("sgd", 1, [1]), ("lars", 1, [2]), ("adamw", 2, [1]), ("lamb", 2, [2, 1])]
)
def test_optimizer_holds_copies_of_the_parameters_and_sums_squares(tiny, name, copies, norms):
    summary = model_summary(with_fields(tiny, {"optimizer.name": name}))
    held = summary["state_bytes"]
    assert 0 <= held["optimizer"] - copies * held["parameters"] <= 8  # and numbers of steps
    assert summary["norms_messages"] == [4 * 2 * each for each in norms]  # a kernel and a bias


def wrong(*arguments):
    raise ValueError("mine")


@pytest.mark.parametrize(
    ("register", "fields", "named"),
    [
        (lambda: jaxdp.register_loss("mine", wrong), {"optimizer.loss": "mine"}, "optimizer.loss"),
        (lambda: jaxdp.register_optimizer("mine", wrong), {"optimizer.name": "mine"}, "optimizer.name"),
        (lambda: jaxdp.register_augmentation("mine", wrong), {"data.auto_augment": "mine"}, "data.auto_augment"),
        (lambda: None, {"data.eval_size": 24}, "data.eval_size"),
        (lambda: None, {"batch.1.image_size": 24}, "batch.1.image_size"),
    ],
)
def test_parts_that_fail_and_images_that_do_not_fit_are_named(tiny, register, fields, named):
    register()
    config = tiny
    if "batch.1.image_size" in fields:
        config = dataclasses.replace(tiny, batch=(tiny.batch[0], dataclasses.replace(tiny.batch[1], image_size=24)))
    else:
        config = with_fields(tiny, fields)
    model_summary(tiny)
    with pytest.raises(ConfigError) as error:
        model_summary(config)
    assert error.value.field == named


@pytest.mark.parametrize(("update", "devices"), [("replicated", 8), ("sharded", 1), ("sharded", 8)])
@pytest.mark.parametrize("averaged", [False, True])
def test_sharded_update_divides_what_is_trained_among_the_devices_of_a_ring(update, devices, averaged):
    whole = {"parameters": 1000, "batch_statistics": 7, "gradients": 800, "optimizer": 1600} | (
        {"averages": 811} if averaged else {}
    )
    batch = (Phase(global_batch=64),)
    config = Config(batch=batch, mesh=Mesh(vertical=2 if devices == 8 else 1))
    plan = make_plan(with_fields(config, {"reduce.update": update}), examples=640, devices=devices)
    parts = {"parameters": 400, "gathered_parameters": 30, "batch_statistics": 7, "gradients": 800, "optimizer": 400}
    parts |= {"averages": 211} if averaged else {}  # 200 and what is not trained by gradients
    expected = parts if (update, devices) == ("sharded", 8) else whole
    assert state_bytes(plan, {"state_bytes": whole, "gathered_messages": [10, 20]}) == expected


def test_input_is_three_batches_on_the_host_and_two_on_each_device_of_the_largest_phase():
    phases = (Phase(global_batch=64, until_epoch=1.0, image_size=8), Phase(global_batch=32, image_size=24))
    for batch, images, size in ((phases, 32, 24), (phases[:1], 64, 8)):
        batch = (*batch[:-1], dataclasses.replace(batch[-1], until_epoch=None))
        plan = make_plan(Config(epochs=2.0, batch=batch, data=Data(image_size=16)), examples=640, devices=4)
        assert input_bytes(plan) == {"host": 3 * images * 3 * size**2, "device": 2 * images // 4 * 3 * size**2}
