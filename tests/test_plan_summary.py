"""Summary of a plan as a table and as JSON."""

from jaxdp.config import Config, Model, Optimizer
from jaxdp.plan_summary import _describe_optimizer, as_dict, model_summary
from jaxdp.planning import make_plan
from jaxdp.recipes import load_config


def test_as_dict_has_phases_rates_model_and_gradient_bytes():
    config = load_config("digits")
    printed = as_dict(make_plan(config, examples=1437, devices=4), model_summary(config))
    assert set(printed) >= {"phases", "learning_rate", "total_steps", "model", "gradient_bytes"}
    names = {"first_epoch", "last_epoch", "global_batch", "per_worker_batch", "workers", "accumulation", "momentum"}
    assert set(printed["phases"][0]) >= names | {"steps"}
    assert printed["total_steps"] == sum(phase["steps"] for phase in printed["phases"])
    assert printed["gradient_bytes"] == 4 * printed["model"]["parameters"]
    rates = dict(printed["learning_rate"])
    assert max(rates.values()) <= config.schedule.learning_rate
    assert rates[0.0] == config.schedule.start


def test_model_summary_with_a_16_bit_wire_has_half_the_gradient_bytes():
    config = load_config("digits", ["--reduce.wire-dtype", "bfloat16", "--model.depth", "18"])
    assert model_summary(config)["gradient_bytes"] == 2 * model_summary(config)["parameters"]
    assert model_summary(Config(model=Model()))["gradient_bytes"] == 102_228_128


def test_description_of_an_optimizer_has_the_fields_that_only_it_uses():
    assert _describe_optimizer(Optimizer(name="lars", trust_coefficient=0.01)) == (
        "lars, denominator sum of norms, eps 1e-06, trust coefficient 0.01, weight decay 0.0001, label smoothing 0"
    )
    assert _describe_optimizer(Optimizer(name="sgd", nesterov=True)) == (
        "sgd with Nesterov momentum, weight decay 0.0001, label smoothing 0"
    )
