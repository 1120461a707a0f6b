"""The step benchmark: rates, ceilings, errors."""

import dataclasses
import json

import pytest

from jaxdp.bench import step
from jaxdp.bench import step as bench_step
from jaxdp.cli.main import main
from jaxdp.config import Config, Data, Model, Phase
from jaxdp.errors import ConfigError
from jaxdp.parallel.mesh import make_mesh
from jaxdp.sizes import model_summary


def test_run_reports_rates_memory_and_ceilings(tiny, monkeypatch):
    monkeypatch.setitem(step.MATRIX_SIDE, "cpu", 64)
    monkeypatch.setitem(step.VECTOR_ELEMENTS, "cpu", 4096)
    record = bench_step.run(tiny, make_mesh(2, 2), batch=8, repeats=2, seconds=0.01)
    assert record["images_per_second"] == pytest.approx(8 / record["step_seconds"])
    assert record["fastest"] <= record["step_seconds"] <= record["slowest"]
    assert record["flops"] == pytest.approx(record["flop_an_image"] * record["images_per_second"])
    assert record["bytes_an_image"] * 8 > 4 * model_summary(tiny)["parameters"]  # at least the parameters, once
    assert record["memory_bytes"] > 2 * 4 * model_summary(tiny)["parameters"]  # parameters and velocity
    assert min(record["ceilings"]["measured"].values()) > 0
    table, notes = bench_step.render(record)
    assert table.row_count == 7
    rows = dict(zip(*(column.cells for column in list(table.columns)[:2]), strict=True))
    assert rows["images/s per device"] == f"{record['images_per_second'] / 4:,.1f}"
    assert "six per multiply-add" in notes


@pytest.mark.slow
def test_timed_step_is_written_before_its_profile(tiny, monkeypatch, tmp_path):
    """A profile can end the process."""

    def profile_kernels(step, steps):
        raise MemoryError

    monkeypatch.setitem(step.MATRIX_SIDE, "cpu", 64)
    monkeypatch.setitem(step.VECTOR_ELEMENTS, "cpu", 4096)
    monkeypatch.setattr(bench_step.kernels, "profile_kernels", profile_kernels)
    words = "bench step --model.depth 18 --model.width 4 --data.source synthetic --data.image-size 32 --model.stem small"
    words += " --mesh.cpu-devices 8 --batch-size 8 --repeats 2 --seconds 0.01 --kernels --output"
    with pytest.raises(SystemExit):
        main([*words.split(), str(tmp_path)])
    record = json.loads((tmp_path / "step.json").read_text())
    assert record["kernels"] is None
    assert record["images_per_second"] == pytest.approx(8 / record["step_seconds"])
    assert record["ceilings"]["measured"]
    assert len([*bench_step.render(record)]) == 2  # the table of the step, and notes


def test_flop_per_image_equals_published_count():
    """ResNet-50 at 224x224: 4.09e9 multiply-adds forward (torchvision), three times that with the backward pass."""
    config = Config(data=Data(source="synthetic", image_size=224), model=Model(classes=1000))
    assert bench_step.FLOP_PER_MULTIPLY_ADD * model_summary(config)["macs"] == pytest.approx(3 * 2 * 4.09e9, rel=0.01)


def test_published_ceilings_equal_data_sheets():
    """Dense bfloat16: H100 and H200 SXM 989 TFLOP/s, A100 312; HBM 3.35, 4.8 and 2.04 TB/s."""
    for kind, flops, moved in (
        ("H200", 989e12, 4.8e12),
        ("H100 80GB HBM3", 989e12, 3.35e12),
        ("A100-SXM4-80GB", 312e12, 2.04e12),
    ):
        ceilings = bench_step.published_ceilings(f"NVIDIA {kind}", "bfloat16", 2)
        assert ceilings["flops"] == pytest.approx(2 * flops, rel=0.001)
        assert ceilings["bytes_per_second"] == pytest.approx(2 * moved, rel=0.001)
    assert bench_step.published_ceilings("TPU v5 lite", "bfloat16", 4) == {"flops": 4 * 197e12, "bytes_per_second": 4 * 819e9}
    assert bench_step.published_ceilings("cpu", "float32", 1) is None


def test_kernels_of_a_tpu_are_refused(monkeypatch):
    monkeypatch.setattr(bench_step.jax, "default_backend", lambda: "tpu")
    with pytest.raises(ConfigError, match=r"--kernels: reads profiles of CPUs and GPUs only; .*--logging.profile 10,5"):
        bench_step.check(Config(), 8, devices=8, profile=True)


@pytest.mark.parametrize(
    ("batch", "more", "field"),
    [(6, {}, "--batch-size"), (0, {}, "--batch-size"), (16, {"profile": True}, "--kernels")],
)
def test_check_impossible_step_raises(tiny, batch, more, field):
    config = dataclasses.replace(tiny, batch=(Phase(global_batch=8, per_worker_batch=2),))
    with pytest.raises(ConfigError) as error:
        bench_step.check(config, batch, devices=4, **more)
    assert error.value.field == field
