"""The benches' arithmetic, on made-up times, and that they run: no test depends on how fast this machine is."""

import dataclasses
import json
import time

import jax.numpy as jnp
import pytest

from jaxdp import train
from jaxdp.bench import allreduce as bench_allreduce
from jaxdp.bench import scaling
from jaxdp.bench import step as bench_step
from jaxdp.bench import stepper as stepping
from jaxdp.config import Config, ConfigError, Data, Mesh, Model, Phase, Reduce
from jaxdp.parallel import allreduce, measure
from jaxdp.parallel.cost_model import allreduce_seconds
from jaxdp.parallel.hlo import read_schedule
from jaxdp.parallel.mesh import make_mesh
from jaxdp.planning import make_plan, model_summary
from jaxdp.training import programs, strategy
from jaxdp.training.console import Quiet


@pytest.mark.parametrize("name", ["psum", "ring", "hierarchical", "torus", "parameter_server"])
def test_the_fit_finds_the_latency_and_bandwidth_that_made_the_times(name):
    sizes = (1_000, 100_000, 10_000_000)
    made = "ring" if name == "psum" else name
    points = [(size, allreduce_seconds(made, 4, 8, size, 7e-6, 3e9)) for size in sizes]
    assert bench_allreduce.fit(points, name, 4, 8) == pytest.approx({"latency": 7e-6, "bandwidth": 3e9})


def test_a_fit_is_never_negative():
    growing = [(1_000, 1e-6), (1_000_000, 2e-3)]  # more than in proportion: the best line starts below 0
    assert bench_allreduce.fit(growing, "ring", 2, 2)["latency"] == 0
    falling = [(1_000, 2e-3), (1_000_000, 1e-3)]
    assert bench_allreduce.fit(falling, "ring", 2, 2)["bandwidth"] is None


def test_calls_take_turns_and_the_first_round_is_not_counted(monkeypatch):
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    ticks = iter(range(100))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))
    assert measure.alternated(calls, 2) == {"a": [1, 1], "b": [1, 1]}
    assert order == ["a", "b"] * 3


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("name", list(allreduce.STRATEGIES))
def test_what_is_timed_is_the_average_of_the_tree(name, times):
    shapes = {"a": jnp.zeros((3, 5)), "b": jnp.zeros(7, jnp.bfloat16)}
    out = measure.reduction(make_mesh(2, 4), shapes, name, times=times)()
    assert {key: (value.shape, value.dtype) for key, value in out.items()} == {
        "a": ((8, 3, 5), jnp.float32),
        "b": ((8, 7), jnp.bfloat16),
    }
    for value in out.values():
        assert (value == 1).all()  # the mean of ones


def record_of(seconds: dict) -> dict:
    gradient = {"bytes": 1000, "wire_dtype": "float32", "bucket_bytes": None, "seconds": seconds}
    return {"gradient": gradient, "recommended": min(seconds, key=seconds.get)}


def test_the_advice_says_plainly_when_psum_wins():
    assert "plain psum wins, 1.50 times as fast as torus" in bench_allreduce.advice(record_of({"torus": 3.0, "psum": 2.0}))
    told = bench_allreduce.advice(record_of({"torus": 2.0, "psum": 3.0, "ring": 9.0}))
    assert "torus is fastest, 1.50 times as fast as psum. --reduce.strategy torus" in told


def test_allreduce_is_measured_drawn_and_told(tiny, tmp_path):
    record = bench_allreduce.run(tiny, make_mesh(2, 2), {"w": jnp.zeros((5, 4))}, sizes=(64, 4096), repeats=1)
    assert len(record["rows"]) == 5 * 2 * 2
    assert all(row["fastest"] <= row["seconds"] <= row["slowest"] for row in record["rows"])
    assert set(record["gradient"]["seconds"]) == set(allreduce.STRATEGIES)
    assert record["gradient"]["bytes"] == 80
    json.dumps(record)
    assert len(list(bench_allreduce.shown(record))) == 5
    bench_allreduce.draw(record, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def with_batch(config, batch, per_worker=None, **changes):
    return dataclasses.replace(config, batch=(Phase(global_batch=batch, per_worker_batch=per_worker),), **changes)


@pytest.mark.slow
def test_scaling_measures_both_kinds_and_their_ratios(tiny, tmp_path):
    record = scaling.run(with_batch(tiny, 8), (1, 4), repeats=1)
    rows = {(row["mode"], row["devices"]): row for row in record["rows"]}
    assert [rows[key]["global_batch"] for key in [("strong", 1), ("strong", 4), ("weak", 1), ("weak", 4)]] == [8, 8, 2, 8]
    for mode in scaling.MODES:
        one, four = rows[mode, 1], rows[mode, 4]
        assert (one["speed_up"], one["efficiency"], one["exposed_communication_seconds"]) == (1, 1, 0)
        assert four["speed_up"] == pytest.approx(four["images_per_second"] / one["images_per_second"])
        assert four["efficiency"] == pytest.approx(four["speed_up"] / 4)
        exposed = four["step_seconds"] - four["without_reduction_seconds"]
        assert four["exposed_communication_seconds"] == pytest.approx(exposed)
        assert four["waiting_seconds"] >= 0
    assert rows["strong", 4]["step_seconds"] == rows["weak", 4]["step_seconds"]  # the same step, measured once
    json.dumps(record)
    assert len(list(scaling.shown(record))) == 3
    scaling.draw(record, tmp_path / "picture.png")


@pytest.mark.parametrize("norm", ["per_worker", "synchronised"])
def test_the_step_without_its_reductions_sends_nothing(tiny, norm):
    config = with_batch(tiny, 8, model=dataclasses.replace(tiny.model, norm=norm))
    mesh = make_mesh(2, 2)
    without = stepping.stepper(config, mesh, 8, allreduce.local).step.as_text()
    assert read_schedule(without, 4).collectives == []
    assert read_schedule(stepping.stepper(config, mesh, 8, "torus").step.as_text(), 4).collectives


def test_both_steps_are_those_that_are_timed(tiny, monkeypatch):
    made = []
    monkeypatch.setattr(stepping, "stepper", lambda config, mesh, batch, strategy: made.append(strategy))
    monkeypatch.setattr(measure, "alternated", lambda calls, repeats: {name: [1.0] for name in calls})
    monkeypatch.setattr(scaling, "_waiting", lambda stepper, repeats: [0.0])
    scaling._measured(with_batch(tiny, 8), make_mesh(2, 2), 8, 1)
    assert made == ["torus", allreduce.local]


def test_waiting_is_how_much_longer_the_slowest_device_takes_than_the_mean():
    class Shard:
        def __init__(self, seconds):
            self.data, self.seconds = self, seconds

        def block_until_ready(self):
            time.sleep(self.seconds)

    class Stepper:
        state = ()

        def __call__(self):
            return (), {"loss": Loss()}

    class Loss:
        addressable_shards = [Shard(0.0), Shard(0.0), Shard(0.0), Shard(0.4)]  # noqa: RUF012

    (waited,) = scaling._waiting(Stepper(), 1)
    assert waited == pytest.approx(0.3, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "counts", "message"),
    [
        ({}, (2, 1), r"--devices: \(2, 1\) is not allowed; give growing numbers of devices"),
        ({"mesh": Mesh(vertical=1, horizontal=2)}, (1, 4), "mesh: 1x2 is not allowed with --devices 4; it has 2"),
        ({}, (1, 16), "--devices: 16 is not allowed; there are 8; on a CPU give --mesh.cpu-devices 16"),
        ({}, (1, 3), "batch.0.global_batch: 8 is not allowed with --devices 3; it must be a multiple of 3; the nearest is 9"),
        ({"reduce": Reduce(strategy="auto")}, (1, 2), "reduce.strategy: 'auto' is not allowed here; give one by name"),
    ],
)
def test_a_ladder_that_cannot_be_climbed_is_an_error(tiny, changes, counts, message):
    with pytest.raises(ConfigError, match=message):
        scaling.check(with_batch(tiny, 8, **changes), counts, 8)


@pytest.mark.slow
def test_auto_takes_the_fastest_writes_it_down_and_keeps_it(tiny, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny, reduce=Reduce(strategy="auto"))
    monkeypatch.setattr(measure, "fastest", lambda *_, **__: ("ring", {"psum": 2.0, "ring": 1.0}))
    assert train(config, tmp_path).strategy == "ring"
    (held,) = json.loads((tmp_path / strategy.FILE).read_text())
    assert (held["mesh"], held["strategy"], held["seconds"]) == ([2, 2], "ring", {"psum": 2.0, "ring": 1.0})
    (tmp_path / "result.json").unlink()
    monkeypatch.setattr(measure, "fastest", lambda *_, **__: pytest.fail("measured again"))
    assert train(config, tmp_path).strategy == "ring"


@pytest.mark.parametrize(
    "change",
    [
        lambda config: dataclasses.replace(config, reduce=Reduce(strategy="auto", wire_dtype="bfloat16")),
        lambda config: dataclasses.replace(config, reduce=Reduce(strategy="auto", bucket_bytes=7)),
        lambda config: dataclasses.replace(config, model=dataclasses.replace(config.model, width=5)),
    ],
)
def test_a_choice_holds_for_its_message_alone(tiny, tmp_path, monkeypatch, change):
    config = dataclasses.replace(tiny, reduce=Reduce(strategy="auto"))
    chosen = []
    for one, fastest in ((config, "ring"), (change(config), "torus"), (config, "psum")):
        monkeypatch.setattr(measure, "fastest", lambda *_, fastest=fastest, **__: (fastest, {fastest: 1.0}))
        plan = make_plan(one, 50, 4)
        chosen.append(strategy.chosen_strategies(plan, programs.models.create(one.model), tmp_path, Quiet())[2, 2])
    assert chosen == ["ring", "torus", "ring"]


def test_each_mesh_has_the_strategy_chosen_for_it(tiny):
    plan = make_plan(with_batch(tiny, 8), 50, 4)
    one = programs.Programs(plan, None, (0.0, 1.0), 9, {(2, 2): "ring", (1, 2): "torus"})
    assert one.strategy(plan.phases[0]) == "ring"
    assert one.strategy(dataclasses.replace(plan.phases[0], vertical=1)) == "torus"
    assert one.strategy(dataclasses.replace(plan.phases[0], vertical=1, horizontal=1)) == "torus"  # the config's own
    one.close()


@pytest.mark.parametrize("content", ["{broken", "5", "[5]", '[{"mesh": [2, 2], "strategy": "tree"}]'])
def test_a_damaged_choice_is_measured_again(tiny, tmp_path, monkeypatch, content):
    (tmp_path / strategy.FILE).write_text(content)
    monkeypatch.setattr(measure, "fastest", lambda *_, **__: ("torus", {"torus": 1.0}))
    plan = make_plan(dataclasses.replace(tiny, reduce=Reduce(strategy="auto")), 50, 4)
    model = programs.models.create(tiny.model)
    chosen = strategy.chosen_strategies(plan, model, tmp_path, Quiet())
    assert chosen == {(2, 2): "torus"}


def test_the_fastest_has_the_shortest_median(monkeypatch):
    times = {"psum": [3.0, 1.0, 5.0], "torus": [2.0, 2.0, 2.0], "hierarchical": [4.0, 4.0, 4.0], "ring": [9.0, 1.0, 9.0]}
    monkeypatch.setattr(measure, "alternated", lambda calls, repeats: times)
    name, medians = measure.fastest(make_mesh(2, 2), {"w": jnp.zeros(3)})
    assert (name, medians["psum"]) == ("torus", 3.0)
    assert measure.fastest(make_mesh(1, 1), {"w": jnp.zeros(3)}) == ("psum", {})


def test_a_measured_step_says_what_it_did_and_what_the_devices_can_do(tiny):
    record = bench_step.run(tiny, make_mesh(2, 2), 8, repeats=2, seconds=0.01)
    assert record["images_per_second"] == pytest.approx(8 / record["step_seconds"])
    assert record["fastest"] <= record["step_seconds"] <= record["slowest"]
    assert record["flops"] == pytest.approx(record["flop_an_image"] * record["images_per_second"])
    assert record["bytes_an_image"] * 8 > 4 * model_summary(tiny)["parameters"]  # at least the parameters, once
    assert record["memory_bytes"] > 2 * 4 * model_summary(tiny)["parameters"]  # parameters and velocity
    assert min(record["ceilings"]["measured"].values()) > 0
    table, told = bench_step.shown(record | {"first_steps": {"cold": {"to_first_step": 3.0, "whole_command": 4.0}}})
    assert table.row_count == 7
    assert "six a multiply-add" in told


def test_the_flop_of_a_training_image_are_the_published_ones():
    """ResNet-50 at 224x224: 4.09e9 multiply-adds forward (torchvision), three times that with the backward pass."""
    config = Config(data=Data(source="synthetic", image_size=224), model=Model())
    assert bench_step.FLOP_PER_MULTIPLY_ADD * model_summary(config)["macs"] == pytest.approx(3 * 2 * 4.09e9, rel=0.01)


def test_published_ceilings_are_those_of_the_data_sheets():
    """Dense bfloat16: H100 and H200 SXM 989 TFLOP/s, A100 312; HBM 3.35, 4.8 and 2.04 TB/s."""
    for kind, flops, moved in (
        ("H200", 989e12, 4.8e12),
        ("H100 80GB HBM3", 989e12, 3.35e12),
        ("A100-SXM4-80GB", 312e12, 2.04e12),
    ):
        found = bench_step.published(f"NVIDIA {kind}", "bfloat16", 2)
        assert found["flops"] == pytest.approx(2 * flops, rel=0.001)
        assert found["bytes_per_second"] == pytest.approx(2 * moved, rel=0.001)
    assert bench_step.published("cpu", "float32", 1) is None


@pytest.mark.parametrize(
    ("batch", "change", "message"),
    [
        (6, {}, r"--batch-size: 6 is not allowed; it must be a multiple of 4; the nearest is 8"),
        (0, {}, r"--batch-size: 0 is not allowed"),
        (8, {"reduce": Reduce(strategy="auto")}, r"reduce.strategy: 'auto' is not allowed here; give one by name"),
        (512, {"reduce": Reduce(strategy="parameter_server")}, None),
    ],
)
def test_a_step_that_cannot_be_measured_is_one_line(tiny, batch, change, message):
    config = dataclasses.replace(tiny, **change)
    if message is None:
        bench_step.check(config, batch, 4)
        return
    with pytest.raises(ConfigError, match=message):
        bench_step.check(config, batch, 4)


@pytest.mark.slow
def test_starts_with_a_cold_and_a_warm_cache_are_timed_by_the_command_itself(tiny, monkeypatch):
    told = bench_step.first_steps(dataclasses.replace(tiny, model=Model(depth=18, width=4, stem="small", classes=6)), 8)
    assert list(told) == ["cold", "warm"]
    for start in told.values():
        assert 0 < start["to_first_step"] < start["whole_command"]
    assert bench_step.devices_there(tiny) == 4
