"""The summary of a run as a dict and as text."""

import dataclasses
from pathlib import Path

import pytest
from helpers.report import write_run

from jaxdp.checkpoint.listing import by_metric
from jaxdp.checkpoint.manifest import Manifest
from jaxdp.config import Stop
from jaxdp.errors import ConfigError
from jaxdp.recipes import load_config
from jaxdp.report import as_text, report, summarize
from jaxdp.report.follow import WatchedRun
from jaxdp.report.run_history import read
from jaxdp.report.tables import more_numbers_table


def test_report_of_an_imagenet_run_compares_it_with_the_mlperf_reference(tmp_path):
    summary = report(write_run(tmp_path, "imagenet_mlperf_8192"))
    assert (summary["accuracy"], summary["best_accuracy"], summary["best_epoch"]) == (0.759, 0.7601, 60.0)
    assert (summary["epochs_to_target"], summary["reference_epochs"]) == (60.0, 41.88)
    assert summary["ratio"] == pytest.approx(60 / 41.88)
    text = "75.9 % reached after 60.00 epochs; MLPerf reference: 41.88 epochs (mean), ratio 1.433"
    assert as_text(summary).splitlines()[1] == text


def test_report_without_target_reference_or_imagenet_leaves_fields_empty(tmp_path):
    short = report(write_run(tmp_path / "a", "imagenet_mlperf_8192", accuracies=(0.5, 0.7)))
    assert (short["epochs_to_target"], short["reference_epochs"], short["ratio"]) == (None, 41.88, None)
    assert "75.9 % not reached" in as_text(short)
    other_batch = report(write_run(tmp_path / "b", "imagenet_goyal_256"))
    assert (other_batch["reference_epochs"], other_batch["ratio"]) == (None, None)
    assert "no MLPerf reference for this batch size" in as_text(other_batch)
    digits = report(write_run(tmp_path / "c"))
    assert digits["epochs_to_target"] is None
    assert len(as_text(digits).splitlines()) == 1


DAMAGED = {
    "broken": b"{broken",
    "not UTF-8": b"\xff\xfe",
    "without its position": b'{"samples": 5}',
    "text for a number": b'{"samples": 5, "epoch": 1.0, "eval_accuracy": "high"}',
    "NaN for its position": b'{"samples": 5, "epoch": NaN, "eval_accuracy": 0.5}',
    "several records": b'{"samples": 5, "epoch": 1.0}{"samples": 5, "epoch": 1.0}',
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_damaged_line_is_skipped_and_counted_by_report_and_watch(tmp_path, line):
    log = write_run(tmp_path) / "metrics.jsonl"
    log.write_text(log.read_text() + '{"epoch": 100.0, "eval_acc')  # torn by a kill
    intact = report(tmp_path)
    assert (intact["damaged_lines"], intact["epochs"]) == (0, 80.0)
    first, *rest = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(line + b"\n" + first + line + b"\n" + b"".join(rest))
    summary = report(tmp_path)
    assert summary == intact | {"damaged_lines": 2}
    assert as_text(summary).splitlines()[-1] == "digits: skipped 2 damaged lines of metrics.jsonl"
    run = WatchedRun(tmp_path, "digits")
    run.refresh()
    assert run.history.damaged == read(tmp_path).damaged == 2
    assert run.history.records == read(tmp_path).records
    assert "damaged log lines, skipped" in more_numbers_table([run.history])


@pytest.mark.parametrize(
    ("metric", "evaluations", "best"),
    [  # (samples, accuracy, loss); the best epoch is the epoch of `--checkpoint best`
        ("eval_accuracy", [(10, 0.7, 1.0), (20, 0.7, 2.0), (30, 0.6, 3.0)], 2.0),  # of equal ones the newer
        ("eval_accuracy", [(10, 0.7, 1.0), (20, 0.8, 2.0), (20, 0.6, 2.0)], 1.0),  # a repeated evaluation replaces the first
        ("eval_loss", [(10, 0.5, 1.0), (20, 0.7, 2.0), (30, 0.6, 3.0)], 1.0),
        ("eval_loss", [(10, 0.5, None), (20, 0.7, 2.0), (30, 0.6, 3.0)], 2.0),
        ("eval_top5", [(10, 0.5, 1.0)], None),
    ],
)
def test_best_epoch_is_that_of_the_best_checkpoint(metric, evaluations, best):
    records = [
        {"samples": samples, "epoch": samples / 10, "eval_accuracy": accuracy, "eval_loss": loss}
        for samples, accuracy, loss in evaluations
    ]
    config = dataclasses.replace(load_config("digits"), stop=Stop(metric=metric))
    assert summarize(config, records)["best_epoch"] == best
    saved = {record["samples"]: record for record in records}  # a checkpoint replaces an earlier one of the same samples
    manifests = [Manifest(Path(), samples, {"evaluation": record}, {}, {}) for samples, record in saved.items()]
    assert [saved[manifest.samples]["epoch"] for manifest in by_metric(manifests, metric)][:1] == [best] * (best is not None)


def test_report_names_a_damaged_config_or_a_missing_file_in_one_line(tmp_path):
    write_run(tmp_path)
    for content in (b"\xff\xfe{", b"{broken", b"{}}"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"^[^\n]*config\.json[^\n]*$"):
            report(tmp_path)
    reasons = {"metrics.jsonl": "its metrics.jsonl is missing", "config.json": "holds no run: config.json not found"}
    for missing, reason in reasons.items():
        (tmp_path / missing).unlink()
        with pytest.raises(ConfigError) as error:
            report(tmp_path)
        assert (error.value.field, error.value.reason) == ("WORKDIR", reason)
