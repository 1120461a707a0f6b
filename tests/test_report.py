import dataclasses
import json

import pytest

from jaxdp import cli
from jaxdp.config import ConfigError
from jaxdp.recipes import load_config
from jaxdp.report import as_text, page, report
from jaxdp.validation import to_json


def a_run(path, name="imagenet_mlperf_8192", accuracies=(0.5, 0.7, 0.7601, 0.759), every=20.0, **changes):
    path.mkdir(exist_ok=True)
    config = dataclasses.replace(load_config(name), **changes)
    (path / "config.json").write_text(to_json(config))
    records = [{"step": 1, "epoch": 0.1, "loss": 7.0}]
    records += [{"epoch": every * (i + 1), "eval_accuracy": a} for i, a in enumerate(accuracies)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_imagenet_runs_stand_beside_the_mlperf_reference(tmp_path):
    told = report(a_run(tmp_path))
    assert (told["accuracy"], told["best_accuracy"], told["best_epoch"]) == (0.759, 0.7601, 60.0)
    assert (told["epochs_to_target"], told["reference_epochs"]) == (60.0, 41.88)
    assert told["ratio"] == pytest.approx(60 / 41.88)
    assert as_text(told).splitlines()[1] == ("75.9 % after 60.00 epochs; MLPerf's reference 41.88 in the mean, ratio 1.433")


def test_what_does_not_apply_is_left_open(tmp_path):
    short = report(a_run(tmp_path / "a", accuracies=(0.5, 0.7)))
    assert (short["epochs_to_target"], short["reference_epochs"], short["ratio"]) == (None, 41.88, None)
    assert "75.9 % not reached" in as_text(short)
    other = report(a_run(tmp_path / "b", name="imagenet_goyal_256"))
    assert (other["reference_epochs"], other["ratio"]) == (None, None)
    assert "no reference for this batch" in as_text(other)
    digits = report(a_run(tmp_path / "c", name="digits"))
    assert digits["epochs_to_target"] is None
    assert len(as_text(digits).splitlines()) == 1


def test_a_line_cut_off_by_a_kill_is_left_out_and_a_damaged_one_named(tmp_path):
    run = a_run(tmp_path)
    log = run / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole + '{"epoch": 100.0, "eval_acc')
    assert report(run)["epochs"] == 80.0
    log.write_text("{broken\n" + whole)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 1 is damaged"):
        report(run)


@pytest.mark.parametrize(
    ("name", "content"), [("config.json", b"\xff\xfe{"), ("config.json", b"{broken"), ("config.json", b"{}}")]
)
def test_a_damaged_config_is_one_line_with_the_file(tmp_path, name, content):
    run = a_run(tmp_path)
    (run / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"^[^\n]*config\.json: [^\n]*; restore the file$"):
        report(run)


@pytest.mark.parametrize("line", [b"5", b"\xff\xfe", b"[1]"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    run = a_run(tmp_path)
    log = run / "metrics.jsonl"
    log.write_bytes(line + b"\n" + log.read_bytes())
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 1 is damaged"):
        report(run)


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        report(tmp_path)


def test_a_run_without_an_evaluation_is_told_so(tmp_path):
    told = report(a_run(tmp_path, accuracies=()))
    assert (told["epochs"], told["accuracy"], told["best_accuracy"], told["epochs_to_target"]) == (0.1, None, None, None)
    assert as_text(told) == "imagenet_mlperf_8192: no evaluation yet after 0.10 epochs"


def test_the_command_prints_text_or_one_json_document(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "_png", lambda figure: b"picture")
    first, second = a_run(tmp_path / "a"), a_run(tmp_path / "b", name="digits")
    cli.main(["report", str(first), str(second), "--no-html"])
    assert len(capsys.readouterr().out.splitlines()) == 3
    cli.main(["report", str(first), str(second), "--json", "--output", str(tmp_path / "page"), "--no-evaluate"])
    assert [told["name"] for told in json.loads(capsys.readouterr().out)] == ["imagenet_mlperf_8192", "digits"]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", str(tmp_path)])
    assert stopped.value.code == 2
