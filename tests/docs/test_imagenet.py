"""Figures on the ImageNet pages follow from the plan, the recipes and the tables of the code."""

import re
from pathlib import Path

import pytest

from jaxdp import ConfigError, load_config
from jaxdp.choices import SOURCES
from jaxdp.cli import main
from jaxdp.distributed.launchers import assign_gpus
from jaxdp.doctor.cuda import OLDEST_DRIVERS
from jaxdp.planning import make_plan

DOCS = Path(__file__).parents[2] / "docs"
ONE_HOST, SLURM = ((DOCS / name).read_text() for name in ("imagenet_8_gpus.md", "imagenet_slurm.md"))
IMAGES = SOURCES.entries["imagenet2012"].train_images


def batches(page: str, devices: int):
    """(phase 0 of the plan, text of images per GPU, text of the learning rate, config) of each row of a page's table."""
    for flags, images, rate in re.findall(r"^\| `(--[^`]*)`[^|]* \| ([^|]*) \| ([\d.]+)[^|]* \|", page, re.MULTILINE):
        words = flags.split()
        name = words[words.index("--config") + 1] if "--config" in words else "imagenet_goyal_256"
        config = load_config(name, [word for word in words if word not in ("--config", name)])
        yield make_plan(config, examples=IMAGES, devices=devices).phases[0], images, float(rate), config


@pytest.mark.parametrize(("page", "devices", "rows"), [(ONE_HOST, 8, 4), (SLURM, 16, 2)])
def test_images_per_gpu_and_learning_rates_are_those_of_the_plan(page, devices, rows):
    found = list(batches(page, devices))
    assert len(found) == rows
    for phase, images, rate, config in found:
        micro = f"{phase.accumulation} micro-batches of " if phase.accumulation > 1 else ""
        assert images == f"{micro}{phase.per_worker_batch}"
        assert phase.devices == devices
        scale = phase.global_batch / 256 if config.schedule.name == "goyal" else 1
        assert rate == pytest.approx(config.schedule.learning_rate * scale)


@pytest.mark.parametrize(("page", "devices"), [(ONE_HOST, 8), (SLURM, 16)])
def test_hours_are_those_of_the_plan(page, devices):
    (hours,) = re.findall(r"([\d.]+) hours", page)
    (rate,) = set(re.findall(r"--images-per-second (\d+)", page))
    config = load_config("imagenet_goyal_256", ["--batch.0.per-worker-batch", "16"])
    found = make_plan(config, examples=IMAGES, devices=devices).training_hours(float(rate))
    assert hours == f"{found:.1f}"
    assert found == pytest.approx(90 * IMAGES / (devices * float(rate)) / 3600, rel=1e-3)


def test_drivers_are_those_that_doctor_requires():
    found = re.findall(r"(\d{3}) or newer for CUDA (\d\d)", ONE_HOST)
    assert {cuda: int(driver) for driver, cuda in found} == OLDEST_DRIVERS


def test_tasks_that_each_see_a_gpu_0_are_taken_for_processes_of_one_gpu():
    """As the page says of --gpus-per-task."""
    with pytest.raises(ConfigError, match="cannot be divided evenly"):
        assign_gpus([["0"]] * 8, 3)


@pytest.mark.slow
def test_memory_per_gpu_is_that_of_the_plan(capsys):
    rows = re.findall(r"^\| `(--[^`]*)` \|.*\| ([\d.]+ GB) \|", ONE_HOST, re.MULTILINE)
    assert len(rows) == 4
    for flags, memory in rows:
        main.main(["plan", *flags.split(), "--model.dtype", "bfloat16", "--devices", "8"])
        assert f"about {memory} per device" in capsys.readouterr().out
