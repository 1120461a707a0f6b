"""Figures on the ImageNet pages follow from the plan, the recipes and the tables of the code."""

import re
from pathlib import Path

import pytest

from jaxdp import load_config
from jaxdp.choices import SOURCES
from jaxdp.cli import main
from jaxdp.doctor.checks import OLDEST_DRIVERS
from jaxdp.planning import make_plan

PAGE = (Path(__file__).parents[2] / "docs/imagenet.md").read_text()
IMAGES = SOURCES.entries["imagenet2012"].train_images
ROWS = [
    [cell.strip(" `") for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| `--.*\|$", PAGE, re.MULTILINE)
]  # flags, GPUs, images per GPU, learning rate, memory per GPU, accuracy


@pytest.mark.parametrize(("flags", "devices", "images", "rate"), [row[:4] for row in ROWS])
def test_images_per_gpu_and_learning_rate_are_those_of_the_plan(flags, devices, images, rate):
    _, name, *others = flags.split()
    config = load_config(name, others)
    phase = make_plan(config, examples=IMAGES, devices=int(devices)).phases[0]
    micro = f"{phase.accumulation} micro-batches of " if phase.accumulation > 1 else ""
    assert images == f"{micro}{phase.per_worker_batch}"
    assert phase.devices == int(devices)
    scale = phase.global_batch / 256 if config.schedule.name == "goyal" else 1
    assert float(rate.split()[0]) == pytest.approx(config.schedule.learning_rate * scale)


def test_hours_are_those_of_the_plan():
    (rate,) = set(re.findall(r"--images-per-second (\d+)", PAGE))
    found = re.findall(r"([\d.]+) hours on (\d+) GPUs", PAGE)
    assert len(found) == 2
    for hours, devices in found:
        config = load_config("imagenet_goyal_256", ["--batch.0.per-worker-batch", "16"])
        planned = make_plan(config, examples=IMAGES, devices=int(devices)).training_hours(float(rate))
        assert hours == f"{planned:.1f}"
        assert planned == pytest.approx(90 * IMAGES / (int(devices) * float(rate)) / 3600, rel=1e-3)


def test_drivers_are_those_that_doctor_requires():
    found = re.findall(r"(\d{3}) or newer for CUDA (\d\d)", PAGE)
    assert {cuda: int(driver) for driver, cuda in found} == OLDEST_DRIVERS


@pytest.mark.slow
def test_memory_per_gpu_is_that_of_the_plan(capsys):
    assert len(ROWS) == 6
    for flags, devices, _, _, memory, _ in ROWS:
        main.main(["plan", *flags.split(), "--model.dtype", "bfloat16", "--devices", devices])
        assert f"about {memory} per device" in capsys.readouterr().out
