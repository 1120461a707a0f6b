"""Benchmarks on Fashion-MNIST, where it is not installed."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_benchmark_without_the_data_set_names_its_package_in_one_line(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import accuracy
    import common

    monkeypatch.setattr(accuracy, "FASHION", tmp_path / "fashion-mnist")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["accuracy.py", "pytorch", "--seeds", "0"])
    accuracy.fashion.cache_clear()
    with pytest.raises(SystemExit) as ended:
        accuracy.main()
    message = f"{tmp_path}/fashion-mnist not found: install Debian's package dataset-fashion-mnist, then run this again"
    assert ended.value.code == message
