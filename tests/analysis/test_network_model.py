"""Predicted step times on a network, against a computation by hand."""

import dataclasses

import pytest

from jaxdp.analysis.cost_model import Links
from jaxdp.analysis.network_model import notes, predict, tables
from jaxdp.analysis.wire import normalization_messages
from jaxdp.config import Config, Data, Model, Phase, Reduce
from jaxdp.planning import make_plan
from jaxdp.sizes import model_summary
from jaxdp.strategies import STRATEGIES

CONFIG = Config(
    data=Data(source="synthetic", image_size=16),
    model=Model(depth=6, width=32, stem="small", classes=7, norm="synchronized"),
    batch=(Phase(global_batch=64, per_worker_batch=8),),
)


def test_predict_with_synchronized_normalization_adds_its_psum_to_every_strategy():
    """On 8 devices psum takes 6 rounds of a double tree or 14 of a ring; for small messages the 6 rounds count."""
    plan, network = make_plan(CONFIG, examples=4096, devices=8), Links(latency=1e-3, bandwidth=1e12)
    summary, between_layers = model_summary(CONFIG), normalization_messages(plan)
    without = predict(plan, summary, network)["phases"][0]["strategies"]
    prediction = predict(plan, summary, network, normalization_messages=between_layers)
    (phase,) = prediction["phases"]
    assert phase["normalization_seconds"] == pytest.approx(6e-3 * len(between_layers), rel=1e-3)
    assert list(phase["strategies"]) == list(STRATEGIES)
    for strategy, row in phase["strategies"].items():
        added = row["communication_seconds"] - without[strategy]["communication_seconds"]
        assert added == pytest.approx(phase["normalization_seconds"])
        assert row["step_seconds"] == pytest.approx(phase["computation_seconds"] + row["communication_seconds"])
        assert row["efficiency"] < without[strategy]["efficiency"]
    assert any("cannot be hidden" in note for note in notes(prediction))


def test_predict_with_several_workers_on_a_device_is_for_the_devices_of_the_plan():
    """A device computes 16 images in two micro-batches; each sends its messages of batch normalization in 4 rounds."""
    plan, network = make_plan(CONFIG, examples=4096, devices=4), Links(latency=1e-3, bandwidth=1e12)
    summary, between_layers = model_summary(CONFIG), normalization_messages(plan)
    prediction = predict(plan, summary, network, rate=100.0, normalization_messages=between_layers)
    (phase,) = prediction["phases"]
    assert (phase["devices"], phase["mesh"]) == (4, [2, 2])
    assert phase["computation_seconds"] == 16 / 100
    assert phase["normalization_seconds"] == pytest.approx(2 * 4e-3 * len(between_layers), rel=1e-3)
    row = phase["strategies"]["psum"]
    seconds = row["communication_seconds"]
    assert seconds == pytest.approx(phase["normalization_seconds"] + 4e-3 * len(summary["messages"]), rel=1e-3)
    assert row["efficiency"] == pytest.approx(0.16 / (0.16 + seconds))
    assert row["images_per_second"] == pytest.approx(64 / (0.16 + seconds))
    assert row["most_devices"] == 64
    (table,) = tables(prediction)
    assert "4 devices (2x2)" in table.title


def test_predict_for_a_phase_on_some_devices_of_each_host_counts_the_links_of_all_hosts():
    """Eight workers occupy four of the eight devices of each of two hosts: psum sends 7/4 of a vector from host to host."""
    plan, summary = make_plan(CONFIG, examples=4096, devices=16, hosts=2), model_summary(CONFIG)
    network = Links(latency=0.0, bandwidth=1e6, devices_per_host=8)
    (phase,) = predict(plan, summary, network)["phases"]
    assert phase["mesh"] == [2, 4]
    assert phase["strategies"]["psum"]["communication_seconds"] == pytest.approx(1.75 * sum(summary["messages"]) / 1e6)


def test_predict_with_a_sharded_update_adds_it_for_strategies_that_scatter():
    """On 2x4 devices: 3 + 2 rounds and 3/4 + 1/4 of the gradient, 3 rounds and 3/4 of the parameters, 6 rounds for the norms,
    and 8 rounds for the statistics, a torus all-reduce."""
    config = dataclasses.replace(CONFIG, reduce=Reduce(update="sharded", wire_dtype="bfloat16"))
    plan, summary = make_plan(config, examples=4096, devices=8), model_summary(config)
    rows = predict(plan, summary, Links(latency=1e-3, bandwidth=1e9))["phases"][0]["strategies"]
    assert {*rows} == {*STRATEGIES, *(f"{name}, sharded update" for name, each in STRATEGIES.items() if each.scatters)}
    *gradients, statistics = summary["messages"]
    gathered = summary["gathered_messages"]
    trained = sum(summary[kind]["parameters"] for kind in ("decayed", "not_decayed"))
    assert (sum(gradients), sum(gathered)) == (2 * trained, 4 * trained)
    rounds = 5 * len(gradients) + 3 * len(gathered) + 6 + 8
    (norms,) = [1.5 * size for size in summary["norms_messages"]]
    volume = sum(gradients) + 0.75 * sum(gathered) + norms + 1.75 * statistics
    seconds = rows["torus, sharded update"]["communication_seconds"]
    assert seconds == pytest.approx(1e-3 * rounds + volume / 1e9)


def test_predict_for_cpu_hosts_shares_their_links_and_sends_bfloat16_as_float32():
    """A row is a host of two devices: a torus sends 1/2 of a vector inside it, 3/4 from a device and 3/2 from a host along the
    columns, and 1/2 inside it. Between hosts the slower one counts, over gloo both."""
    config = dataclasses.replace(CONFIG, reduce=Reduce(wire_dtype="bfloat16"))
    plan, summary = make_plan(config, examples=4096, devices=8, hosts=4), model_summary(config)
    network = Links(latency=0.0, bandwidth=1e6, device_bandwidth=4e6, devices_per_host=2)
    *gradients, statistics = summary["messages"]
    for gloo, widened, hops in ((False, 1, 1.5 / 1e6 + 1 / 4e6), (True, 2, 1.5 / 1e6 + 1.75 / 4e6)):
        prediction = predict(plan, summary, network._replace(gloo=gloo))
        (phase,) = prediction["phases"]
        assert phase["mesh"] == [4, 2]
        assert ("gloo sends bfloat16 as float32." in notes(prediction)) == gloo
        sent = widened * sum(gradients) + statistics
        assert phase["strategies"]["torus"]["communication_seconds"] == pytest.approx(sent * hops)
    assert any("the 2 devices of a host share one full-duplex link" in note for note in notes(prediction))
    (table,) = tables(prediction)
    assert "0.001 GB/s for the 2 devices of a host" in table.title
