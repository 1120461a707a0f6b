"""The programs on docs/tasks.md."""

import dataclasses
import re
from pathlib import Path

import pytest

import jaxdp
from jaxdp.config import Phase

PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def titled(text):
    (program,) = [program for program in PROGRAMS if text in program]
    return program


@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize("text", ["balanced_accuracy", '"position"', "TwoHeads"])
def test_program_registers_what_it_describes(text):
    exec(titled(text), {})


@pytest.mark.usefixtures("own_programs")
def test_numbers_and_balanced_accuracy_of_the_page_train_and_evaluate(tiny, tmp_path):
    names: dict = {}
    exec(titled('"position"'), names)
    exec(titled("balanced_accuracy"), {})
    config = dataclasses.replace(names["config"], model=tiny.model, epochs=2.0, batch=(Phase(32),), schedule=tiny.schedule)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, source="given", image_size=16))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, classes=None), logging=tiny.logging)
    result = jaxdp.train(config, tmp_path / "position", datasets=(names["train"], names["held_out"]))
    assert {*result.metrics} == {"absolute_error", "r2"}
    stop = dataclasses.replace(tiny.stop, metric="eval_balanced_accuracy", patience=3)
    result = jaxdp.train(dataclasses.replace(tiny, stop=stop, epochs=2.0), tmp_path / "balanced")
    assert 0 <= result.balanced_accuracy <= 1


@pytest.mark.usefixtures("own_programs")
def test_distillation_of_the_page_trains_with_a_resnet_as_its_teacher(tiny_resnet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = dataclasses.replace(
        tiny_resnet, epochs=2.0, optimizer=dataclasses.replace(tiny_resnet.optimizer, label_smoothing=0.0)
    )
    jaxdp.train(short, "runs/teacher")
    exec(titled("def distill"), {})
    result = jaxdp.train(dataclasses.replace(short, task="distill"), "runs/student")
    assert [*result.metrics] == ["accuracy", "top5"]
