"""Answers of docs/faq.md that follow from tables of the code."""

import re
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

from jaxdp.choices import OPTIMIZERS
from jaxdp.config import Model

ROOT = Path(__file__).parents[2]
ANSWERS = dict(re.findall(r"^\| (.*?\?) \| (.*) \|$", (ROOT / "docs/faq.md").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_models_are_the_built_in_depths():
    depths = re.findall(r"\d+", ANSWERS["Which models are built in?"].partition("(")[0])
    assert [int(depth) for depth in depths] == list(get_args(get_type_hints(Model)["depth"]))


def test_named_optimizers_exist():
    named = {name for name in re.findall(r"`(?:--optimizer.name )?(\w+)`", ANSWERS["Adam, AdamW, LAMB?"])}
    assert {"adamw", "lamb"} <= named <= {*OPTIMIZERS}


def test_accelerators_are_those_with_an_extra():
    extras = {name for name in PROJECT["optional-dependencies"] if re.match("cuda|rocm|tpu|metal", name)}
    assert extras == set(re.findall("`(cuda.*?)`", ANSWERS["AMD or Intel GPUs, Apple silicon?"]))


def test_python_version_is_the_declared_one():
    assert ANSWERS["Which Python?"] == f"{PROJECT['requires-python'].removeprefix('>=')} or newer"
