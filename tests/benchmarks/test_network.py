"""The benchmark of training steps between virtual hosts: its account of their links."""

import math
from pathlib import Path

import pytest

from jaxdp.strategies import STRATEGIES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FORMS = [*((name, "replicated") for name in STRATEGIES), ("torus", "sharded")]


@pytest.fixture
def network(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "cluster")
    import network

    network.register_layers()
    return network


@pytest.mark.parametrize(("mesh_shape", "wire_dtype"), [((4, 2), "float32"), ((2, 4), "bfloat16")])
@pytest.mark.parametrize(("strategy", "update"), FORMS)
def test_bytes_of_the_traced_step_are_those_of_the_model(network, mesh_shape, wire_dtype, strategy, update):
    """Without latency and computation, the predicted time is that of the bytes that the busiest host sends."""
    reduce = {"strategy": strategy, "update": update, "wire_dtype": wire_dtype}
    sent, received = network.expected_bytes(mesh_shape, reduce)
    measured = {"latency": 0.0, "device_bandwidth": math.inf, "computation": 1e-9}
    predicted = network.predicted_seconds({"mesh": mesh_shape, "rate": "1gbit", "overlap": True, **reduce}, measured)
    through_server = any(part.among == "server" for part in STRATEGIES[strategy].cost(*mesh_shape)[0])
    both_ways = received[0] if through_server else 0  # the server sends after it has received
    assert max(sent) + both_ways == pytest.approx(predicted * network.PAYLOAD * 125e6, rel=0.01)


def test_ranking_tau_counts_swapped_pairs_and_ties_of_close_times(network):
    assert network.ranking_tau([(1, 1), (2, 3), (3, 2), (4, 4), (5, 5)]) == pytest.approx(0.8)
    tied = [(1, 1), (2, 2), (3, 2.01), (4, 4)]  # five of six pairs are ordered alike
    assert network.ranking_tau(tied) == pytest.approx(5 / math.sqrt(6 * 5))
