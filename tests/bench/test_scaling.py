"""The scaling benchmark: ratios, waiting, errors. No test depends on the speed of the machine."""

import dataclasses
import json
import time

import pytest

from jaxdp.bench import scaling, step_runner
from jaxdp.config import Mesh, Phase, Reduce
from jaxdp.errors import ConfigError
from jaxdp.parallel import allreduce, timing
from jaxdp.parallel.mesh import make_mesh


def with_batch(config, batch, per_worker=None, **changes):
    return dataclasses.replace(config, batch=(Phase(global_batch=batch, per_worker_batch=per_worker),), **changes)


@pytest.mark.slow
def test_run_reports_strong_and_weak_scaling(tiny_resnet, tmp_path):
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
    assert len(list(scaling.render(record))) == 3
    scaling.draw(record, tmp_path / "picture.png")


def test_measure_times_the_step_with_and_without_reductions(tiny_resnet, monkeypatch):
    built = []
    monkeypatch.setattr(step_runner, "build_step", lambda config, mesh, global_batch, strategy: built.append(strategy))
    monkeypatch.setattr(timing, "time_alternately", lambda calls, repeats: {name: [1.0] for name in calls})
    monkeypatch.setattr(scaling, "_waiting_seconds", lambda step, repeats: [0.0])
    scaling._measure(with_batch(tiny_resnet, 8), make_mesh(2, 2), global_batch=8, repeats=1)
    assert built == ["torus", allreduce.no_reduce]


def test_waiting_is_slowest_device_less_mean():
    class Shard:
        def __init__(self, seconds):
            self.data, self.seconds = self, seconds

        def block_until_ready(self):
            time.sleep(self.seconds)

    class Step:
        state = ()

        def __call__(self):
            return (), {"loss": Loss()}

    class Loss:
        addressable_shards = [Shard(0.0), Shard(0.0), Shard(0.0), Shard(0.4)]  # noqa: RUF012

    (waited,) = scaling._waiting_seconds(Step(), 1)
    assert waited == pytest.approx(0.3, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "counts", "message"),
    [
        ({}, (2, 1), r"--devices=\(2, 1\): must be growing numbers of devices"),
        ({"mesh": Mesh(vertical=1, horizontal=2)}, (1, 4), "mesh='1x2': has 2 devices, not 4"),
        ({}, (1, 16), "--devices=16: only 8 available; on a CPU give --mesh.cpu-devices 16"),
        ({}, (1, 3), "batch.0.global_batch=8: must be a multiple of 3 for --devices 3; the nearest is 9"),
        (
            {"reduce": Reduce(strategy="auto")},
            (1, 2),
            "reduce.strategy='auto': a benchmark times a single strategy; give one by name",
        ),
    ],
)
def test_check_impossible_device_counts_raises(tiny_resnet, changes, counts, message):
    with pytest.raises(ConfigError, match=message):
        scaling.check(with_batch(tiny_resnet, 8, **changes), counts, available=8)
