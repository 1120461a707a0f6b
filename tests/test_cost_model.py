import pytest

from jaxdp.config import ConfigError
from jaxdp.parallel import cost_model
from jaxdp.parallel.cost_model import allreduce_seconds

KNOWN = {"latency": 5e-6, "bandwidth": 10e9}
MESSAGE = 51_114_064


@pytest.mark.parametrize(
    ("strategy", "vertical", "horizontal", "milliseconds"),
    [
        ("ring", 32, 32, 20.4428),
        ("torus", 32, 32, 10.8328),
        ("hierarchical", 32, 32, 20.4267),
        ("ring", 48, 72, 44.7699),
        ("torus", 48, 72, 11.3999),
        ("hierarchical", 48, 72, 21.2707),
    ],
)
def test_known_answers(strategy, vertical, horizontal, milliseconds):
    assert 1e3 * allreduce_seconds(strategy, vertical, horizontal, MESSAGE, **KNOWN) == pytest.approx(milliseconds, abs=5e-5)


def test_a_parameter_server_takes_all_messages_in_and_out_over_its_links():
    """2a + 2 N n / (S W) with N = 16, n = 1e6, a = 1e-3, W = 1e9."""
    assert allreduce_seconds("parameter_server", 4, 4, 1e6, 1e-3, 1e9) == pytest.approx(2e-3 + 32e-3)
    assert allreduce_seconds("parameter_server", 4, 4, 1e6, 1e-3, 1e9, servers=4) == pytest.approx(2e-3 + 8e-3)


def test_psum_is_the_faster_of_a_ring_and_a_double_tree():
    tiny, huge = 8, 10**10
    assert allreduce_seconds("psum", 4, 4, tiny, **KNOWN) == pytest.approx(8 * 5e-6 + 2 * tiny / 10e9)
    assert allreduce_seconds("psum", 4, 4, huge, **KNOWN) == allreduce_seconds("ring", 4, 4, huge, **KNOWN)


@pytest.mark.parametrize("strategy", cost_model.STRATEGIES)
def test_one_device_sends_nothing_and_one_row_is_a_ring(strategy):
    assert allreduce_seconds(strategy, 1, 1, MESSAGE, **KNOWN) == 0
    if strategy in ("torus", "hierarchical"):
        expected = allreduce_seconds("ring", 1, 8, MESSAGE, **KNOWN)
        assert allreduce_seconds(strategy, 1, 8, MESSAGE, **KNOWN) == pytest.approx(expected)
        assert allreduce_seconds(strategy, 8, 1, MESSAGE, **KNOWN) == pytest.approx(expected)


def test_a_torus_sends_as_many_bytes_as_a_ring_in_fewer_rounds():
    (ring,), (torus,) = cost_model.terms("ring", 16, 24), cost_model.terms("torus", 16, 24)
    assert torus[1] == pytest.approx(ring[1])
    assert (ring[0], torus[0]) == (2 * 383, 2 * 23 + 2 * 15)


def test_speed_up():
    """T_N = T_1 / N + T_comm: 8 s on 4 devices with 2 s of communication are 4 s, a speed-up of 2."""
    assert cost_model.step_seconds(8.0, 4, 2.0) == 4.0
    assert cost_model.speed_up(8.0, 4, 2.0) == 2.0


def test_turning_points_of_a_ring_bound_by_latency():
    """With T_comm = 2 (N - 1) a alone, T_N = T_1/N + 2(N - 1)a is least at N = sqrt(T_1 / 2a) = 64."""
    latency = 1 / (2 * 64**2)
    counts = [2**power for power in range(12)]
    diminishing, fastest = cost_model.turning_points(1.0, lambda n: 2 * (n - 1) * latency, counts)
    assert fastest == 64
    seconds = [1 / n + 2 * (n - 1) * latency for n in (16, 32, 64)]
    assert seconds[0] / seconds[1] > 1.5 > seconds[1] / seconds[2]
    assert diminishing == 32


def test_turning_points_beyond_the_devices_that_can_share_a_batch_are_open():
    assert cost_model.turning_points(1.0, lambda n: 0.0, [1, 2, 4]) == (None, None)


@pytest.mark.parametrize(
    ("strategy", "latency", "constant", "errors"),
    [("torus", 76.9e-6, -1.72e-3, (2.0, -4.1, 1.6, 0.6)), ("ring", 1.66e-6, 4.82e-3, (1.3, -2.4, 1.7, -0.6))],
)
def test_table_6_of_the_paper_is_met_within_5_percent(strategy, latency, constant, errors):
    fit = cost_model.fit_table_6(strategy)
    assert fit["latency"] == pytest.approx(latency, rel=5e-3)
    assert fit["constant"] == pytest.approx(constant, rel=5e-3)
    assert [100 * error for error in fit["errors"]] == pytest.approx(errors, abs=0.06)
    assert max(map(abs, fit["errors"])) < 0.05


def test_a_network_is_latency_and_bandwidth():
    assert cost_model.parse_network("5e-6,10e9") == (5e-6, 10e9)


@pytest.mark.parametrize("text", ["5e-6", "5e-6;10e9", "fast,10e9", "1,2,3", "-1,1", "0,0", "nan,1", "1,inf", ""])
def test_a_network_in_another_form_is_an_error(text):
    with pytest.raises(ConfigError, match=r"--network: .* is not allowed; give latency,bandwidth: seconds .* 5e-6,10e9"):
        cost_model.parse_network(text)


def test_an_unknown_strategy_is_an_error():
    with pytest.raises(
        ValueError, match="'tree' is not allowed; give one of psum, ring, hierarchical, torus, parameter_server"
    ):
        allreduce_seconds("tree", 2, 2, 1, 1.0, 1.0)
