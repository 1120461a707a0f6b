"""The all-reduce benchmark: fits, detection of wrong sums, recommendation."""

import json

import jax.numpy as jnp
import pytest
from helpers.strategies import set_stages, without_device_three

from jaxdp.analysis.network_model import Links, allreduce_seconds, cost_terms
from jaxdp.bench import allreduce as bench_allreduce
from jaxdp.cli import bench as bench_command
from jaxdp.parallel.mesh import make_mesh
from jaxdp.strategies import STRATEGIES


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_fit_times_of_the_model_recovers_latency_and_bandwidth(name):
    network = {"latency": 7e-6, "bandwidth": 3e9}
    sizes = (1_000, 100_000, 10_000_000)
    points = [(size, allreduce_seconds(name, 4, 8, num_bytes=size, network=Links(**network))) for size in sizes]
    assert bench_allreduce.fit(points, name, (4, 8)) == pytest.approx(network)


def test_fit_psum_times_of_a_double_tree_are_not_fitted_as_a_ring():
    tree = cost_terms("psum", 4, 8)[1]
    points = [(size, tree.rounds * 7e-6 + tree.volume * size / 3e9) for size in (1_000, 100_000, 10_000_000)]
    assert bench_allreduce.fit(points, "psum", (4, 8)) == pytest.approx({"latency": 7e-6, "bandwidth": 3e9})
    assert bench_allreduce.fit(points, "ring", (4, 8))["latency"] < 2e-6


def test_fit_of_inconsistent_times_is_never_negative():
    growing = [(1_000, 1e-6), (1_000_000, 2e-3)]  # more than in proportion: the best line starts below 0
    assert bench_allreduce.fit(growing, "ring", (2, 2))["latency"] == 0
    falling = [(1_000, 2e-3), (1_000_000, 1e-3)]
    assert bench_allreduce.fit(falling, "ring", (2, 2))["bandwidth"] is None


def test_command_with_wrong_sums_names_them_and_exits_with_1(tiny_resnet, tmp_path, capsys, monkeypatch):
    set_stages(monkeypatch, "torus", without_device_three)
    small = ["--mesh.cpu-devices", "4", "--model.depth", "18", "--model.width", "4", "--data.image-size", "16"]
    command = ["allreduce", *small, "--sizes", "4096", "--dtypes", "float32", "--repeats", "2", "--output", str(tmp_path)]
    with pytest.raises(SystemExit) as exit_:
        bench_command.run(command, "jaxdp bench")
    assert exit_.value.code == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "WRONG SUMS: torus, float32, 4,096 B: 3 of 3 calls; torus, full gradient: 3 of 3 calls." in out
    record = json.loads((tmp_path / "allreduce.json").read_text())
    assert record["wrong_sums"] == ["torus"]
    assert record["recommended"] != "torus"
    assert {row["strategy"]: row["wrong_calls"] for row in record["rows"]} == {
        name: 3 * (name == "torus") for name in STRATEGIES
    }


def record_of(seconds: dict) -> dict:
    gradient = {"bytes": 1000, "wire_dtype": "float32", "bucket_bytes": None, "seconds": seconds}
    return {"gradient": gradient, "wrong_sums": [], "recommended": min(seconds, key=seconds.get)}


def test_advice_recommends_the_fastest_strategy():
    assert "psum is fastest, 1.50 times as fast as torus" in bench_allreduce.advice(record_of({"torus": 3.0, "psum": 2.0}))
    text = bench_allreduce.advice(record_of({"torus": 2.0, "psum": 3.0, "ring": 9.0}))
    assert "torus is fastest, 1.50 times as fast as psum. --reduce.strategy torus" in text


def test_run_measures_every_strategy_and_message(tiny):
    record = bench_allreduce.run(
        tiny, make_mesh(2, 2), {"w": jnp.zeros((5, 4))}, sizes=(64,), dtypes=("float32", "bfloat16"), repeats=1
    )
    assert len(record["rows"]) == 2 * len(STRATEGIES)
    assert all(row["fastest"] <= row["seconds"] <= row["slowest"] for row in record["rows"])
    assert set(record["gradient"]["seconds"]) == set(STRATEGIES)
    assert record["gradient"]["bytes"] == 80
    json.dumps(record)
    assert len(list(bench_allreduce.render(record))) == 5
