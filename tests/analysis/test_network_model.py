"""Predicted step times on a network, against a computation by hand."""

import pytest

from jaxdp.analysis.network_model import Network, draw, notes, predict, tables
from jaxdp.config import Config, Data, Model, Phase
from jaxdp.plan_summary import model_summary
from jaxdp.planning import make_plan
from jaxdp.strategies import STRATEGIES
from jaxdp.training.step_compiler import normalization_messages

CONFIG = Config(
    data=Data(source="synthetic", image_size=16),
    model=Model(depth=6, width=32, stem="small", classes=7, norm="synchronized"),
    batch=(Phase(global_batch=64, per_worker_batch=8),),
)


def test_predict_with_synchronized_normalization_adds_its_psum_to_every_strategy():
    """On 8 devices psum takes 6 rounds of a double tree or 14 of a ring; for small messages the 6 rounds count."""
    plan, network = make_plan(CONFIG, examples=4096, devices=8), Network(latency=1e-3, bandwidth=1e12)
    summary, between_layers = model_summary(CONFIG), normalization_messages(plan)
    without = predict(plan, summary, network)["phases"][0]["strategies"]
    prediction = predict(plan, summary, network, normalization_messages=between_layers)
    (phase,) = prediction["phases"]
    assert phase["normalization_seconds"] == pytest.approx(6e-3 * len(between_layers), rel=1e-3)
    assert list(phase["strategies"]) == list(STRATEGIES)
    for strategy, row in phase["strategies"].items():
        added = {name: row[name] - without[strategy][name] for name in ("communication_seconds", "one_message_seconds")}
        assert list(added.values()) == pytest.approx([phase["normalization_seconds"]] * 2)
        assert row["step_seconds"] == pytest.approx(phase["computation_seconds"] + row["communication_seconds"])
        assert row["efficiency"] < without[strategy]["efficiency"]
    assert any("cannot be hidden" in note for note in notes(prediction))


def test_tables_and_draw_of_a_prediction_show_every_strategy(tmp_path):
    plan = make_plan(CONFIG, examples=4096, devices=8)
    prediction = predict(plan, model_summary(CONFIG), Network(latency=1e-5, bandwidth=1e10))
    (table,) = tables(prediction)
    assert table.row_count == len(STRATEGIES)
    draw(prediction, tmp_path / "efficiency.png")
    assert (tmp_path / "efficiency.png").stat().st_size > 5000
