"""Tests of jaxdp.cli.bench: where the record of a benchmark goes."""

import json
from types import SimpleNamespace

import pytest

from jaxdp.cli import bench


@pytest.mark.parametrize("name", [*bench.BENCHES])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(name, tmp_path, monkeypatch, failing):
    measured = []
    text, kind, _ = bench.BENCHES[name]
    monkeypatch.setitem(bench.BENCHES, name, (text, kind, lambda *_: measured.append(name)))
    (tmp_path / "file").write_text("kept")
    assert failing("bench", name, "--output", tmp_path / "file").startswith(f"--output='{tmp_path / 'file'}/{name}.json': ")
    assert (measured, (tmp_path / "file").read_text()) == ([], "kept")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_record_that_cannot_be_written_is_shown(as_json, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    options = bench.Options(output=str(tmp_path / "file"), json=as_json)
    with pytest.raises(OSError, match="file"):
        bench._bench_result(options, "step", {"speed": 5}, bench=SimpleNamespace(render=lambda record: ["5 images/s"]))
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"speed": 5} if as_json else "5 images/s" in shown


def test_a_record_that_cannot_be_shown_is_written(tmp_path):
    def render(record):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        bench._bench_result(bench.Options(output=str(tmp_path)), "step", {"speed": 5}, bench=SimpleNamespace(render=render))
    assert json.loads((tmp_path / "step.json").read_text()) == {"speed": 5}
