"""The all-reduce strategy that `reduce.strategy=auto` chooses and keeps."""

import dataclasses
import json

import pytest
from helpers.runs import train_shown
from jax import lax

from jaxdp import models, register_strategy, train
from jaxdp.config import Phase, Reduce
from jaxdp.errors import ConfigError
from jaxdp.loggers.console import Quiet
from jaxdp.parallel import timing
from jaxdp.parallel.timing import auto_candidates
from jaxdp.planning import make_plan
from jaxdp.setup import tuning
from jaxdp.training import step_compiler


def test_train_auto_uses_fastest_and_keeps_it_on_resume(tiny, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny, reduce=Reduce(strategy="auto"))
    monkeypatch.setattr(timing, "fastest_strategy", lambda *_, **__: ("ring", {"psum": 2.0, "ring": 1.0}))
    assert train(config, tmp_path).strategy == "ring"
    (choice,) = json.loads((tmp_path / tuning.FILE).read_text())
    assert (choice["mesh"], choice["strategy"], choice["seconds"]) == ([2, 2], "ring", {"psum": 2.0, "ring": 1.0})
    (tmp_path / "result.json").unlink()
    monkeypatch.setattr(timing, "fastest_strategy", lambda *_, **__: pytest.fail("measured again"))
    assert train(config, tmp_path).strategy == "ring"


@pytest.mark.parametrize(
    "change",
    [
        lambda config: dataclasses.replace(config, reduce=Reduce(strategy="auto", wire_dtype="bfloat16")),
        lambda config: dataclasses.replace(config, reduce=Reduce(strategy="auto", bucket_bytes=7)),
        lambda config: dataclasses.replace(config, model=dataclasses.replace(config.model, classes=5)),
    ],
)
def test_choice_applies_to_the_same_messages_only(tiny, tmp_path, monkeypatch, change):
    config = dataclasses.replace(tiny, reduce=Reduce(strategy="auto"))
    chosen = []
    for one, fastest in ((config, "ring"), (change(config), "torus"), (config, "psum")):
        monkeypatch.setattr(timing, "fastest_strategy", lambda *_, fastest=fastest, **__: (fastest, {fastest: 1.0}))
        plan = make_plan(one, examples=50, devices=4)
        model = models.create(one.model)
        chosen.append(tuning.chosen_reductions(plan, model, tmp_path, info=print)[2, 2].strategy)
    assert chosen == ["ring", "torus", "ring"]


def test_programs_use_the_strategy_chosen_for_each_mesh(tiny):
    plan = make_plan(dataclasses.replace(tiny, batch=(Phase(8),)), examples=50, devices=4)
    ring, hierarchical = Reduce(strategy="ring"), Reduce(strategy="hierarchical")
    one = step_compiler.StepCompiler(
        plan, None, pixel_stats=(0.0, 1.0), evaluation_examples=9, reductions={(2, 2): ring, (1, 2): hierarchical}
    )
    assert one.reduction(plan.phases[0]) == ring
    assert one.reduction(dataclasses.replace(plan.phases[0], vertical=1)) == hierarchical
    assert one.reduction(dataclasses.replace(plan.phases[0], vertical=1, horizontal=1)) == tiny.reduce
    one.close()


@pytest.mark.parametrize("content", ["{broken", "5", "[5]", '[{"mesh": [2, 2], "strategy": "no_strategy"}]'])
def test_damaged_choice_is_measured_again(tiny, tmp_path, monkeypatch, content):
    (tmp_path / tuning.FILE).write_text(content)
    monkeypatch.setattr(timing, "fastest_strategy", lambda *_, **__: ("torus", {"torus": 1.0}))
    plan = make_plan(dataclasses.replace(tiny, reduce=Reduce(strategy="auto")), examples=50, devices=4)
    model = models.create(tiny.model)
    chosen = tuning.chosen_reductions(plan, model, tmp_path, info=print)
    assert chosen == {(2, 2): Reduce(strategy="torus")}


def test_sharded_update_with_strategy_auto_chooses_among_strategies_that_scatter():
    assert auto_candidates(8, scatters=True) == ["torus"]


def test_registered_strategy_that_does_not_sum_over_all_devices_is_refused_before_training(tiny, tmp_path):
    register_strategy("rows_only", lambda vector: lax.psum(vector, "horizontal"))
    config = dataclasses.replace(tiny, reduce=Reduce(strategy="rows_only"))
    with pytest.raises(ConfigError, match=r"reduce.strategy='rows_only': its stages do not return the sum over all devices"):
        train_shown(config, tmp_path / "run", screen=Quiet())
    assert not list((tmp_path / "run").glob("checkpoints/*"))
