"""Models and all-reduce strategies of the user."""

import dataclasses
import json
import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import optax
import pytest
from helpers.runs import outcome, train_until
from PIL import Image
from safetensors.numpy import load_file

import jaxdp
from jaxdp import models, registration
from jaxdp.choices import AUTO_AUGMENTS, LOSSES, MODELS, OPTIMIZERS, SOURCES
from jaxdp.cli import main
from jaxdp.config import Config, Data, Model, Optimizer, Phase, Reduce, Schedule
from jaxdp.errors import ConfigError
from jaxdp.fields import LARGEST
from jaxdp.inference.checkpoints import choose_checkpoint, list_checkpoints
from jaxdp.inference.export import export
from jaxdp.models.summary import summary
from jaxdp.optim.rules import add_weight_decay
from jaxdp.parallel.allreduce import all_reduce_columns, all_reduce_rows
from jaxdp.registry import Choice, Choices, LazyModule
from jaxdp.schedules import SCHEDULES, Position
from jaxdp.strategies import STRATEGIES


class Linear:
    """Softmax regression."""

    def __init__(self, config):
        self.classes = config.classes

    def init(self, key, image_shape):
        spreads = {"kernel": np.full((np.prod(image_shape), self.classes), 0.01), "bias": np.zeros(self.classes)}
        return models.sample_params(key, spreads), {}

    def apply(self, params, batch_stats, images, train):
        return images.reshape(len(images), -1) @ params["kernel"] + params["bias"], {}


def both_ways(vector):
    """Half of the vector rows first, half of it columns first."""
    half = vector.size // 2
    one, other = all_reduce_columns(all_reduce_rows(vector[:half])), all_reduce_rows(all_reduce_columns(vector[half:]))
    return vector.at[:half].set(one).at[half:].set(other)


def with_model(config: Config, name="linear") -> Config:
    return dataclasses.replace(config, model=Model(name=name, classes=6))


def test_registry_has_built_in_entries_and_those_that_are_registered():
    decimal = LazyModule("decimal")
    first, second, third = (
        Choice("", implementation=lambda: decimal.Decimal),
        Choice("", implementation=lambda: int),
        Choice(""),
    )
    entries = {"first": first, "second": second}
    table = Choices("part.field", entries, function="register_part")
    table.register("third", third, float)
    assert entries == {"first": first, "second": second}
    assert (dict(table), table.registered) == ({"first": first, "second": second, "third": third}, ["third"])
    assert [table.implementation(name) for name in table] == [Decimal, int, float]
    table.check("third")
    with pytest.raises(
        ConfigError, match=r"part\.field='thrid': unknown name; did you mean third\? choose from first, second, "
    ):
        table.implementation("thrid")
    with pytest.raises(ConfigError, match=r"name='first': reserved; choose a name other than first, second$"):
        table.register("first", third, complex)
    for name in (["a"], None, "Mine", ""):
        with pytest.raises(ConfigError, match=r"^name=.*: must consist of lower-case letters, digits and _"):
            table.register(name, third, complex)
    alone = Choices("part.field", {"first": first})
    with pytest.raises(ConfigError, match=r"choose from first$"):
        alone.check("other")


TABLES = {
    **{"dataset": SOURCES, "model": MODELS, "strategy": STRATEGIES, "optimizer": OPTIMIZERS, "loss": LOSSES},
    **{"schedule": SCHEDULES, "augmentation": AUTO_AUGMENTS},
}


@pytest.mark.parametrize("part", TABLES)
def test_registered_part_is_an_entry_of_its_table_alone_and_something_that_cannot_be_called_is_refused(part):
    register = getattr(registration, f"register_{part}")
    assert register is getattr(jaxdp, f"register_{part}")
    for wrong in (3, None, "jax:numpy"):
        with pytest.raises(ConfigError, match=r"cannot be called; .*register_|must be a function") as refused:
            register("mine", wrong)
        assert part == "strategy" or f"jaxdp.register_{part}('mine', " in str(refused.value)
    assert not any(table.registered for table in TABLES.values())
    register("mine", len)
    assert {name: table.registered for name, table in TABLES.items()} == {name: ["mine"] * (name == part) for name in TABLES}
    assert isinstance(TABLES[part]["mine"], Choice)
    assert callable(TABLES[part].implementation("mine")) or TABLES[part].implementation("mine") == (len,)


def test_registered_strategy_and_optimizer_are_sharded_only_if_they_say_so():
    for scatters in (False, True):
        jaxdp.register_strategy("mine", len, abs, scatters=scatters)
        jaxdp.register_optimizer("mine", len, elementwise=scatters)
        assert (STRATEGIES["mine"].scatters, OPTIMIZERS["mine"].shards) == (scatters, scatters)
    jaxdp.register_strategy("mine", len)
    jaxdp.register_optimizer("mine", len)
    assert (STRATEGIES["mine"].scatters, OPTIMIZERS["mine"].shards) == (False, False)
    assert STRATEGIES.implementation("mine") == (len,)
    for stages, options, reason in (
        ((), {}, "needs at least one stage"),
        ((len,), {"scatters": True}, "has a first and a last stage; register its stages one by one"),
        ((len, 3), {}, "mine=3: must be a function"),
    ):
        with pytest.raises(ConfigError, match=reason):
            jaxdp.register_strategy("mine", *stages, **options)


@pytest.mark.parametrize("rate", [0, LARGEST, 0.25, np.float32(0.5)], ids=str)
def test_rate_of_a_registered_schedule_is_a_number_from_0_to_the_largest(rate):
    jaxdp.register_schedule("mine", lambda epoch: (epoch == 1.5) * rate)
    rate_at, schedule = SCHEDULES.implementation("mine"), Schedule(name="mine")
    assert (found := (rate_at(schedule, Position(1.5, 2)), rate_at(schedule, Position(1, 2)))) == (rate, 0)
    assert {type(one) for one in found} == {float}
    for wrong in (-1e-9, 1.1 * LARGEST, np.nan):
        jaxdp.register_schedule("mine", lambda epoch: wrong)  # noqa: B023
        reason = f"returned {wrong:g} at epoch 1.5; must be from 0 to 1e+15"
        with pytest.raises(ConfigError, match=f"schedule.name='mine': the registered function {re.escape(reason)}"):
            SCHEDULES.implementation("mine")(schedule, Position(1.5, 2))


@dataclasses.dataclass
class First:
    field: int = 0
    only: int = 0
    shared: int = 0


@dataclasses.dataclass
class Second:
    shared: int = 0
    also: int = 0


def table_of(*, names=("first", "second", "third"), **options) -> Choices:
    table = Choices("part.field", {name: Choice(name, like="first" if name == "third" else "") for name in names}, **options)
    table.read("part", first=First, second=Second)
    return table


@pytest.mark.parametrize(
    ("other_reads", "by_registered"),
    [(None, ["part.also", "part.only"]), ("second", ["part.also"]), ("first", ["part.only"]), ("", [])],
)
def test_fields_of_a_choice_are_those_of_its_record_or_of_the_one_that_it_is_like(other_reads, by_registered):
    table = table_of(other_reads=other_reads)
    table.register("mine", Choice(""), None)
    read = {"first": ["part.only"], "second": ["part.also"], "third": ["part.only"], "mine": by_registered}
    every = {"part.only", "part.also"}
    if other_reads == "":  # what all built-in ones read is not read by others
        every.add("part.shared")
        read = {name: [*fields, *(["part.shared"] if name != "mine" else [])] for name, fields in read.items()}
    for name, fields in read.items():
        assert sorted(table.read_fields(name)) == sorted(fields)
        assert table.ignored_fields(name) == sorted(every - {*fields})


def test_field_that_one_choice_does_not_read_is_read_by_the_others():
    table = table_of(names=("first", "second", "third", "fourth"))  # the fourth has no record
    assert table.readers["part.shared"] == ("first", "second", "third")
    assert table.ignored_fields("fourth") == ["part.also", "part.only", "part.shared"]
    assert "part.field" not in table.readers


def test_record_of_an_unknown_choice_or_a_missing_one_is_refused():
    with pytest.raises(TypeError, match=r"^part.field has no second$"):
        table_of(names=("first", "third"))
    with pytest.raises(TypeError, match=r"^part.field has no first, second$"):
        table_of(names=("third",))


def test_name_that_is_not_in_the_table_is_the_other_entry_if_there_is_one():
    other = Choice("or another")
    open_table = Choices("part.field", {"first": Choice("one")}, other=other)
    closed = Choices("part.field", {"first": Choice("")})
    assert (open_table["first"].help, open_table["x"], "x" in open_table, len(open_table)) == ("one", other, False, 1)
    assert (open_table.help, closed.help) == ("first: one; or another", "first")
    with pytest.raises(KeyError):
        closed["x"]


def test_registered_optimizer_trains_and_resumes_like_the_built_in_one(tiny, tmp_path):
    """With clipping and averaged weights; the result equals the same rule by its name."""

    def momentum_sgd(config, learning_rate, momentum):
        return optax.chain(
            add_weight_decay(config.weight_decay),
            optax.trace(decay=momentum),
            optax.scale(-learning_rate),
        )

    jaxdp.register_optimizer("mine", momentum_sgd)
    results = {}
    for name in ("sgd", "mine"):
        optimizer = Optimizer(name=name, weight_decay=0.01, clip_norm=1.0, average_decay=0.9)
        config = dataclasses.replace(tiny, optimizer=optimizer)
        train_until(config, tmp_path / name, step=9)
        jaxdp.train(config, tmp_path / name)
        results[name] = outcome(tmp_path / name)
    assert results["mine"] == results["sgd"]
    del OPTIMIZERS.entries["mine"]
    with pytest.raises(ConfigError, match=r"optimizer\.name='mine': unknown name; .*register_optimizer\('mine', \.\.\.\)"):
        jaxdp.train(config, tmp_path / "mine")


RECIPE = """
import numpy as np
import jaxdp

class Flat:
    def __init__(self, model):
        self.classes = model.classes

    def init(self, key, image_shape):
        return {"kernel": np.ones((np.prod(image_shape), self.classes), np.float32)}, {}

    def apply(self, params, batch_stats, images, train):
        return images.reshape(len(images), -1) @ params["kernel"], {}

def config():
    jaxdp.register_model("flat", Flat)
    return jaxdp.load_config("digits", ["--model.name", "flat"])
"""


@pytest.mark.slow
def test_commands_with_the_recipe_that_registers_the_model_load_its_run(tiny, tmp_path, capsys):
    recipe, picture, run = tmp_path / "mine.py", tmp_path / "picture.png", ["--workdir", str(tmp_path / "run")]
    recipe.write_text(RECIPE)
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(picture)
    jaxdp.load_config(recipe)
    jaxdp.train(with_model(dataclasses.replace(tiny, epochs=2.0, batch=tiny.batch[-1:]), "flat"), tmp_path / "run")
    newest = str(choose_checkpoint(tmp_path / "run").path)
    del MODELS.entries["flat"]
    assert not any(row["error"] for row in list_checkpoints(tmp_path / "run"))  # needs no model
    for command in (["evaluate"], ["predict", str(picture)], ["export", "--output", str(tmp_path / "w.safetensors")]):
        MODELS.entries.pop("flat", None)
        with pytest.raises(SystemExit, match="2"):
            main.main([*command, *run])
        assert "in Python, or give the recipe that registers it with --config" in capsys.readouterr().err
        main.main([*command, *run, "--config", str(recipe), "--json"])
        assert json.loads(capsys.readouterr().out)["checkpoint"] == newest
    main.main(["evaluate", *run, "--config", str(recipe), "--data.eval-examples", "7", "--json"])
    assert json.loads(capsys.readouterr().out)["eval_examples"] == 7
    del MODELS.entries["flat"]
    main.main(["report", run[1], "--config", str(recipe)])
    assert "missing" not in capsys.readouterr().err


def test_a_trained_run_needs_only_the_registered_parts_that_are_used(tiny, tmp_path):
    """Predictions and weights need the model, an evaluation also the data and the loss."""
    jaxdp.register_model("linear", Linear)
    jaxdp.register_optimizer("momentum", lambda config, rate, momentum: optax.sgd(rate, momentum))
    jaxdp.register_strategy("both_ways", both_ways)
    jaxdp.register_augmentation("negative", lambda image, key: 1 - image)
    jaxdp.register_loss("squared", lambda logits, targets: ((logits - targets) ** 2).mean(-1))
    jaxdp.register_schedule("constant", lambda epoch: 0.1)
    images, labels = np.zeros((16, 16, 16, 3), np.uint8), np.arange(16) % 6
    jaxdp.register_dataset("gray", lambda data: ((images, labels), (images, labels)))
    config = dataclasses.replace(
        with_model(tiny),
        epochs=1.0,
        batch=(Phase(8),),
        data=Data(source="gray", image_size=16, auto_augment="negative"),
        optimizer=Optimizer(name="momentum", loss="squared", average_decay=0.5),
        reduce=Reduce(strategy="both_ways"),
        schedule=Schedule("constant"),
    )
    result = jaxdp.train(config, tmp_path)
    expected = jaxdp.load_params(tmp_path)["params"]["kernel"]
    for table in (OPTIMIZERS, STRATEGIES, AUTO_AUGMENTS, SCHEDULES):
        del table.entries[table.registered[-1]]
    assert jaxdp.evaluate(None, tmp_path)["eval_loss"] == pytest.approx(result.loss, rel=1e-6)
    del LOSSES.entries["squared"]
    with pytest.raises(ConfigError, match=r"optimizer\.loss='squared': unknown name; .*register_loss"):
        jaxdp.evaluate(None, tmp_path)
    del SOURCES.entries["gray"]
    assert jaxdp.predict(tmp_path, images[:2]).classes.shape == (2, 5)
    export(tmp_path, tmp_path / "net.safetensors")
    (exported,) = [array for name, array in load_file(tmp_path / "net.safetensors").items() if name.endswith("/kernel")]
    np.testing.assert_array_equal(exported, expected)


PAGE = (Path(__file__).parent.parent / "docs/extending.md").read_text()
EXAMPLES = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "jaxdp.register" in block]


@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: "-".join(re.findall(r"jaxdp\.register_(\w+)", block)))
def test_examples_of_the_extending_page_can_be_planned(block):
    names = {}
    exec(block, names)
    assert jaxdp.plan(names["config"], devices=4).total_steps > 0
    if "register_model" in block:
        assert summary(names["config"].model, (32, 32, 3))["parameters"] > 0
