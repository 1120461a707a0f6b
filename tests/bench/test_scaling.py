"""The scaling benchmark: ratios, waiting, errors. No test depends on the speed of the machine."""

import dataclasses
import json
import threading

import pytest

from jaxdp.bench import scaling, step_runner
from jaxdp.cli import bench
from jaxdp.config import Mesh, Phase, Reduce
from jaxdp.errors import ConfigError
from jaxdp.parallel import allreduce, timing
from jaxdp.parallel.mesh import make_mesh
from jaxdp.xla.hlo import read_schedule


def with_batch(config, batch, per_worker=None, **changes):
    return dataclasses.replace(config, batch=(Phase(global_batch=batch, per_worker_batch=per_worker),), **changes)


@pytest.mark.slow
def test_run_reports_strong_and_weak_scaling(tiny_resnet):
    record = scaling.run(with_batch(tiny_resnet, 8), (1, 4), repeats=1)
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
    strong, weak, *notes = scaling.render(record)  # a note more if steps vary by more than communication costs
    assert (strong.row_count, weak.row_count, notes[-1]) == (2, 2, scaling.VIRTUAL_NOTE)


def test_step_without_reductions_has_no_collectives(tiny):
    """Not even for synchronized batch normalization."""
    config = with_batch(tiny, 8, model=dataclasses.replace(tiny.model, norm="synchronized"))
    mesh = make_mesh(2, 2)
    without = step_runner.build_step(config, mesh, global_batch=8, strategy=allreduce.no_reduce).step.as_text()
    assert read_schedule(without, 4).collectives == []
    assert read_schedule(step_runner.build_step(config, mesh, global_batch=8, strategy="torus").step.as_text(), 4).collectives


@pytest.mark.parametrize(
    ("count", "rank"),  # Conover, Practical Nonparametric Statistics; the smallest interval with at least 95 %
    [(1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (30, 10)],
)
def test_interval_of_the_median_has_the_ranks_of_the_sign_test(count, rank):
    values = [float(value) for value in range(1, count + 1)]
    assert scaling.interval_of_median(values[::-1]) == (rank, count + 1 - rank)


def row(devices, *, exposed, interval, mode="strong", step=0.041):
    return {
        "mode": mode,
        "devices": devices,
        "mesh": [1, devices],
        "global_batch": 32,
        "step_seconds": step,
        "images_per_second": 32 / step,
        "exposed_communication_seconds": exposed,
        "exposed_communication_interval": interval,
        "waiting_seconds": 0.002,
        "speed_up": 1.0,
        "efficiency": 0.5,
    }


def record_of(rows):
    names = {"model": "ResNet-18", "strategy": "torus", "wire_dtype": "float32", "device": "cpu", "virtual": False}
    return names | {"rows": rows, "stopped": True}


def test_negative_communication_is_shown_with_its_interval():
    rows = [row(1, exposed=0.0, interval=None), row(2, exposed=-0.0074, interval=[-0.0201, 0.0032])]
    table, note = scaling.render(record_of(rows))  # of an interrupted benchmark, without weak scaling
    (cells,) = [list(column.cells) for column in table.columns if column.header.startswith("exposed")]
    assert cells == ["0.0 ms", "-7.4 ms (-20.1 to 3.2)"]
    assert note.startswith("If an interval includes 0")


def test_exposed_communication_is_the_median_of_the_alternating_differences(tiny_resnet, monkeypatch):
    seconds = {"with": [5.0, 9.0, 6.0], "without": [4.0, 5.0, 7.0]}  # the machine is slow in the second round
    monkeypatch.setattr(scaling, "build_with_and_without", lambda *_, **__: {"with": None, "without": None})
    monkeypatch.setattr(timing, "time_alternately", lambda calls, repeats: seconds)
    monkeypatch.setattr(scaling, "_waiting_seconds", lambda step, repeats: [0.0])
    measured = scaling._measure(with_batch(tiny_resnet, 8), make_mesh(2, 2), global_batch=8, repeats=3)
    assert measured["exposed_communication_seconds"] == 1
    assert measured["exposed_communication_interval"] == [-1, 4]


def test_interrupted_benchmark_shows_its_progress_and_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    def measure(config, mesh, *, global_batch, repeats):
        if mesh.size == 4:
            raise KeyboardInterrupt
        return row(mesh.size, exposed=0.0, interval=None)

    monkeypatch.setattr(scaling, "_measure", measure)
    command = ["scaling", "--devices", "1", "2", "4", "--mesh.cpu-devices", "4", "--batch.0.global-batch", "8"]
    with pytest.raises(KeyboardInterrupt):
        bench.run([*command, "--output", str(tmp_path)], "jaxdp bench")
    record = json.loads((tmp_path / "scaling.json").read_text())
    assert (record["stopped"], [each["devices"] for each in record["rows"]]) == (True, [1, 2])
    printed = capsys.readouterr()
    assert "2 of 6: strong scaling on 2 of 4 devices: 41.0 ms per step" in printed.err
    assert "strong scaling" in printed.out


def test_waiting_is_slowest_device_less_mean(monkeypatch):
    times = threading.local()  # of the thread that waits for a device
    monkeypatch.setattr(scaling.time, "perf_counter", lambda: getattr(times, "now", 0.0))

    class Shard:
        def __init__(self, seconds):
            self.data, self.seconds = self, seconds

        def block_until_ready(self):
            times.now = self.seconds

    class Step:
        state = ()

        def __call__(self):
            return (), {"loss": Loss()}

    class Loss:
        addressable_shards = [Shard(0.0), Shard(0.0), Shard(0.0), Shard(0.4)]  # noqa: RUF012

    (waited,) = scaling._waiting_seconds(Step(), 1)
    assert waited == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("changes", "counts", "field"),
    [
        ({}, (2, 1), "--devices"),
        ({"mesh": Mesh(vertical=1, horizontal=2)}, (1, 4), "mesh"),
        ({}, (1, 16), "--devices"),
        ({}, (1, 3), "batch.0.global_batch"),
    ],
)
def test_check_impossible_device_counts_raises(tiny_resnet, changes, counts, field):
    with pytest.raises(ConfigError) as error:
        scaling.check(with_batch(tiny_resnet, 8, **changes), counts, available=8)
    assert error.value.field == field
    config = with_batch(tiny_resnet, 72, reduce=Reduce(strategy="parameter_server"))
    with pytest.raises(ConfigError, match=r"reduce\.strategy='parameter_server': cannot run on 72 devices"):
        scaling.check(config, (1, 72), available=72)
