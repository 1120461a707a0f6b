"""The benchmark of all-reduces between virtual hosts: its picture and table from the stored record."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from helpers.strategies import set_stages

from jaxdp.parallel import allreduce

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "cluster"), *sys.path])
    spec = importlib.util.spec_from_file_location("network", BENCHMARKS / "cluster/network.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_draw_picture_of_a_record_without_a_new_strategy_writes_the_picture(network, monkeypatch, tmp_path):
    record = json.loads(network.RESULT.read_text())
    set_stages(monkeypatch, "new", allreduce.psum)
    network.draw_picture(record, tmp_path / "network.png")
    assert (tmp_path / "network.png").stat().st_size > 5000
    assert "| psum |" in network.bytes_table(record)
