"""Benchmarks on Fashion-MNIST, where it is not installed."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_benchmark_without_the_data_set_names_its_package_in_one_line(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import batch_norm_training
    import fashion_vs_pytorch

    monkeypatch.setattr(batch_norm_training, "FASHION", tmp_path / "fashion-mnist")
    monkeypatch.setattr(fashion_vs_pytorch, "RESULT", tmp_path / "none.json")
    monkeypatch.setattr("sys.argv", ["fashion_vs_pytorch.py", "--seeds", "0"])
    batch_norm_training.fashion.cache_clear()
    with pytest.raises(SystemExit) as ended:
        fashion_vs_pytorch.main()
    message = f"{tmp_path}/fashion-mnist not found: install Debian's package dataset-fashion-mnist, then run this again"
    assert ended.value.code == message
