"""The latency-bandwidth model and predicted step times against values computed by hand and by limits."""

import dataclasses
import math

import pytest
from helpers.strategies import vector_traffic

from jaxdp.analysis import network_model
from jaxdp.analysis.network_model import Links, notes, predict, tables
from jaxdp.analysis.wire import normalization_messages
from jaxdp.config import Config, Data, Model, Phase, Reduce
from jaxdp.errors import ConfigError
from jaxdp.planning import make_plan
from jaxdp.sizes import model_summary
from jaxdp.strategies import STRATEGIES, Exchange

NETWORK = Links(latency=5e-6, bandwidth=10e9)
MESSAGE = 51_114_064


def seconds(strategy, vertical, horizontal, num_bytes=MESSAGE, **network):
    return network_model.allreduce_seconds(
        strategy, vertical, horizontal, num_bytes=num_bytes, network=NETWORK._replace(**network)
    )


@pytest.mark.parametrize(
    ("strategy", "vertical", "horizontal", "milliseconds"),
    [
        ("ring", 48, 72, 44.7699),
        ("torus", 48, 72, 11.3999),
        ("hierarchical", 48, 72, 21.2707),
    ],
)
def test_allreduce_seconds_of_published_grids_equal_known_values(strategy, vertical, horizontal, milliseconds):
    assert 1e3 * seconds(strategy, vertical, horizontal) == pytest.approx(milliseconds, abs=5e-5)


def test_allreduce_seconds_parameter_server_passes_all_messages_over_one_link():
    """2 (N - 1) (a + n / W) with N = 16, n = 1e6, a = 1e-3, W = 1e9."""
    assert seconds("parameter_server", 4, 4, 1e6, latency=1e-3, bandwidth=1e9) == pytest.approx(30e-3 + 30e-3)


def test_allreduce_seconds_psum_is_the_faster_of_a_ring_and_a_double_tree():
    tiny, huge = 8, 10**10
    assert seconds("psum", 4, 4, tiny) == pytest.approx(8 * 5e-6 + 2 * tiny / 10e9)
    assert seconds("psum", 4, 4, huge) == seconds("ring", 4, 4, huge)


@pytest.mark.parametrize("size", [8, 10**10])
def test_allreduce_seconds_psum_over_gloo_is_a_ring(size):
    """XLA selects the algorithm: xla/backends/cpu/collectives/gloo_communicator.cc."""
    assert seconds("psum", 4, 4, size, gloo=True) == seconds("ring", 4, 4, size)


@pytest.mark.parametrize("strategy", [name for name, strategy in STRATEGIES.items() if strategy.cost])
def test_allreduce_seconds_on_one_device_is_zero_and_one_row_costs_as_a_ring(strategy):
    assert seconds(strategy, 1, 1) == 0
    if STRATEGIES[strategy].sums_along_axes:
        assert seconds(strategy, 1, 8) == pytest.approx(seconds("ring", 1, 8))
        assert seconds(strategy, 8, 1) == pytest.approx(seconds("ring", 1, 8))


@pytest.mark.parametrize(("vertical", "horizontal"), [(1, 8), (2, 4), (8, 1), (48, 72)])
def test_sharded_update_with_parameters_as_large_as_gradients_costs_as_much_as_the_all_reduce(vertical, horizontal):
    def sharded(gradient_bytes, parameter_bytes):
        sizes = {"gradient_bytes": gradient_bytes, "parameter_bytes": parameter_bytes}
        return network_model.sharded_update_seconds("torus", vertical, horizontal, **sizes, network=NETWORK)

    whole = seconds("torus", vertical, horizontal)
    assert sharded(MESSAGE, MESSAGE) == pytest.approx(whole)
    saved = (horizontal - 1) / horizontal * MESSAGE / 2 / NETWORK.bandwidth  # half of the bytes of the last stage
    assert sharded(MESSAGE, MESSAGE / 2) == pytest.approx(whole - saved)
    assert sharded(MESSAGE, 0) + sharded(0, MESSAGE) == pytest.approx(whole)


def test_sharded_update_of_a_strategy_that_does_not_scatter_is_an_error():
    with pytest.raises(ConfigError, match=r"strategy='psum'.*torus"):
        network_model.sharded_update_seconds("psum", 2, 4, gradient_bytes=1, parameter_bytes=1, network=NETWORK)


@pytest.mark.parametrize("mesh_shape", [(1, 8), (2, 4), (8, 1), (4, 6)])
@pytest.mark.parametrize("strategy", [name for name, strategy in STRATEGIES.items() if strategy.cost])
def test_cost_volume_is_the_bytes_that_the_busiest_device_sends(strategy, mesh_shape):
    """The server sends after it has received everything, so both directions count."""
    devices = mesh_shape[0] * mesh_shape[1]
    vector = 1024 * devices  # needs no padding
    sent = max(vector_traffic(strategy, mesh_shape, elements=vector // 4).sent_bytes)
    if any(part.among == "server" for part in STRATEGIES[strategy].cost(*mesh_shape)[0]):
        sent *= 2
    least = min(cost.volume for cost in network_model.cost_terms(strategy, *mesh_shape))
    assert least * vector == pytest.approx(sent)


@pytest.mark.parametrize(
    ("strategy", "mesh_shape", "gloo", "between"),
    [
        ("psum", (4, 2), False, 7 / 4),  # one device of a host sends to the next one
        ("ring", (2, 4), False, 7 / 4),
        ("hierarchical", (4, 2), False, 2 * 3 / 2),  # rows inside, then both devices of a host along the columns
        ("hierarchical", (2, 4), False, 3 / 2 + 2 * 1),
        ("torus", (4, 2), False, 2 * 3 / 4),
        ("torus", (4, 2), True, 2 * 3 / 4),
        ("torus", (2, 4), False, 3 / 4 + 2 / 4 + 3 / 4),
        ("torus", (2, 4), True, 4 / 4 + 2 / 4 + 3 / 4),  # two devices send 1/4 to both of the other host
        ("torus", (1, 8), True, 12 / 8 + 7 / 8),
        ("parameter_server", (4, 2), False, 2 * 6),  # six of the seven other devices are on other hosts
        ("parameter_server", (4, 2), True, 2 * 6),
    ],
)
def test_allreduce_seconds_of_four_hosts_of_two_devices_count_what_a_host_and_a_device_send(
    strategy, mesh_shape, gloo, between
):
    """between: messages that the busiest host sends to others; a device itself sends as many as without hosts. Of devices a
    hundred times slower than the links, they alone count; over gloo the links too, except a server's links."""
    link = {"latency": 0.0, "bandwidth": 1e6, "devices_per_host": 2, "gloo": gloo}
    assert seconds(strategy, *mesh_shape, 1e6, **link) == pytest.approx(between)
    (_, own), *_ = network_model.cost_terms(strategy, *mesh_shape)
    expected = 100 * own + (between if gloo and strategy != "parameter_server" else 0)
    assert seconds(strategy, *mesh_shape, 1e6, **link, device_bandwidth=1e4) == pytest.approx(expected)


def test_exchange_of_pairs_counts_the_busiest_link_of_a_host_and_of_a_device():
    """The levels of a tree over four hosts of two devices, whose first devices exchange between hosts, and a ring."""

    def times(pairs, volume=1.0, host_bandwidth=1e6, device_bandwidth=math.inf):
        network = Links(2.0, host_bandwidth, device_bandwidth=device_bandwidth, devices_per_host=2)
        return network.seconds(Exchange(pairs, 3, volume), 4, 2, num_bytes=1e6) - 3 * 2.0

    inside, first_level, second_level = ((1, 0), (3, 2), (5, 4), (7, 6)), ((2, 0), (6, 4)), ((4, 0),)
    assert [times(pairs) for pairs in (inside, first_level, second_level)] == pytest.approx([0, 1, 1])
    assert times(first_level, device_bandwidth=1e5) == pytest.approx(10)
    to_the_root, from_the_root = ((2, 0), (4, 0), (6, 0)), ((0, 2), (0, 4), (0, 6))
    assert times(to_the_root, volume=3.0) == times(from_the_root, volume=3.0) == pytest.approx(3)
    assert times(((0, 2), (1, 3))) == pytest.approx(2)  # both devices of a host over its link
    assert times(((0, 1), (0, 2)), volume=2.0) == pytest.approx(1)  # one of two messages stays in the host
    for among, shift in (("devices", 1), ("column", 2)):
        pairs = tuple((device, (device + shift) % 8) for device in range(8))
        network = Links(0.0, 1e6, devices_per_host=2)
        for exchange in (Exchange(among, 1, 1.0), Exchange(pairs, 1, 1.0)):
            assert network.seconds(exchange, 4, 2, num_bytes=1e6) == pytest.approx(shift)


def test_allreduce_seconds_of_two_hosts_of_eight_gpus_count_the_slower_hop_of_each_exchange():
    """Torus: twice 7/8 of the vector inside the hosts, then eight eighths between them; psum: 15/8 of it between them."""
    link = {"latency": 0.0, "bandwidth": 200e9, "device_bandwidth": 300e9, "devices_per_host": 8}
    assert seconds("torus", 2, 8, 1e9, **link) == pytest.approx(2 * 7 / 8 / 300 + 1 / 200)
    assert seconds("psum", 2, 8, 1e9, **link) == pytest.approx(15 / 8 / 200)


def test_rows_of_one_device_send_nothing_along_them():
    link = {"latency": 0.0, "bandwidth": 1e6, "devices_per_host": 1, "gloo": True}
    assert seconds("torus", 4, 1, 1e6, **link) == pytest.approx(1.5)


def test_devices_of_one_host_send_nothing_over_its_link():
    link = {"latency": 1e-3, "bandwidth": 1.0, "device_bandwidth": 1e6, "devices_per_host": 8}
    assert seconds("torus", 2, 4, 1e6, **link) == pytest.approx(8e-3 + 7 / 4)
    assert seconds("parameter_server", 2, 4, 1e6, **link) == pytest.approx(14e-3 + 14)


def test_turning_points_of_a_ring_bound_by_latency_are_near_the_minimum():
    """With T_comm = 2 (N - 1) a alone, T_N = T_1/N + 2(N - 1)a is least at N = sqrt(T_1 / 2a) = 64."""
    latency = 1 / (2 * 64**2)
    counts = [2**power for power in range(12)]
    diminishing, fastest = network_model.turning_points(1.0, lambda n: 2 * (n - 1) * latency, counts)
    assert fastest == 64
    times = [1 / n + 2 * (n - 1) * latency for n in (16, 32, 64)]
    assert times[0] / times[1] > 1.5 > times[1] / times[2]
    assert diminishing == 32
    assert network_model.turning_points(1.0, lambda n: 0.0, [1, 2, 4]) == (None, None)


@pytest.mark.parametrize(
    ("tpu", "ports", "gigabits_each_way"),  # of a chip, as Google Cloud's pages have them
    [("v5e", 4, 1600), ("v6e", 4, 3200), ("v5p", 6, 1200 * 8 / 2)],
)
def test_the_network_of_a_tpu_is_one_of_its_published_links_whatever_the_hosts(tpu, ports, gigabits_each_way):
    links = network_model.parse_network(tpu)
    assert links.bandwidth * ports * 8 == gigabits_each_way * 1e9
    plan = make_plan(
        Config(model=Model(classes=10), batch=(Phase(256, per_worker_batch=8),)), examples=10_000, devices=32, processes=4
    )
    for hops, taken in ((1, "1 hop"), (7, "7 hops")):
        prediction = predict(plan, model_summary(plan.config), links._replace(hops=hops))
        ring = prediction["phases"][0]["strategies"]["ring"]["communication_seconds"]
        messages = prediction["messages"]  # each in 2 (N - 1) rounds of a N-th
        assert ring == pytest.approx(sum(62 * (hops * 1e-6 + size / 32 / links.bandwidth) for size in messages))
        assert f"A link of TPU {tpu}, one way, as published; not measured. A round takes {taken}." in notes(prediction)


def test_parse_network_returns_latency_and_bandwidth():
    assert network_model.parse_network("5e-6,10e9") == Links(5e-6, 10e9, device_bandwidth=math.inf)
    assert network_model.parse_network("5e-6,10e9,450e9") == Links(5e-6, 10e9, device_bandwidth=450e9)


@pytest.mark.parametrize("text", ["5e-6", "fast,10e9", "1,2,3,4", "1,2,0", "-1,1", "0,0", "nan,1", "1,inf", ""])
def test_parse_network_other_text_raises_config_error(text):
    with pytest.raises(ConfigError, match="must be LATENCY,BANDWIDTH") as error:
        network_model.parse_network(text)
    assert (error.value.field, error.value.value) == ("--network", text)


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
    plan, summary = make_plan(CONFIG, examples=4096, devices=16, processes=2), model_summary(CONFIG)
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
    plan, summary = make_plan(config, examples=4096, devices=8, processes=4), model_summary(config)
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
