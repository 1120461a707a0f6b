"""Summary of a plan as a table and as JSON."""

import io

from rich.console import Console

from jaxdp.config import Config, Model, Optimizer
from jaxdp.plan_summary import _describe_optimizer, as_dict, model_summary, summary_table
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


def table_text(config, summary, devices):
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(summary_table(make_plan(config, examples=1437, devices=devices), "given", summary))
    return console.export_text()


def test_summary_table_on_one_device_names_no_all_reduce():
    config = load_config("digits", ["--model.depth", "18"])
    summary = model_summary(config)
    assert "one device needs no all-reduce" in table_text(config, summary, 1)
    assert f"torus all-reduce of {summary['gradient_bytes']:,} bytes in float32" in table_text(config, summary, 4)


def test_summary_table_of_a_model_without_batch_statistics_names_no_batch_norm():
    config = load_config("digits", ["--model.depth", "18"])
    summary = model_summary(config)
    assert "batch norm per worker" in table_text(config, summary, 4)
    text = table_text(config, summary | {"statistics": 0}, 4)
    assert "batch norm" not in text
    assert "bytes of loss and accuracy in float32" in text
