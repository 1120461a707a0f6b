"""Tests of jaxdp.loggers.writers."""

from pathlib import Path

import pytest
from helpers.writers import RecordingWriter

from jaxdp import ConfigError, train
from jaxdp.loggers.tensorboard import TensorBoard
from jaxdp.loggers.writers import RECORD_FIELDS, JsonLines, create_writers, to_json


def test_to_json_writes_numbers_that_are_not_finite_as_null():
    assert to_json({"a": float("nan"), "b": float("inf"), "c": 1.5, "d": 3}) == '{"a": null, "b": null, "c": 1.5, "d": 3}'


def test_manual_has_every_field_of_a_record():
    page = (Path(__file__).parents[2] / "docs/watching.md").read_text()
    assert "".join(f"| `{name}` | {meaning} |\n" for name, meaning in RECORD_FIELDS.items()) in page


def test_train_with_a_failing_writer_warns_once_and_continues(with_tensorboard, tmp_path):
    class FailingWriter(RecordingWriter):
        def write(self, record):
            super().write(record)
            if len(self.records) == 2:
                raise ConnectionError("no network\nat all")

    failing, working = FailingWriter(), RecordingWriter()
    message = "FailingWriter raised ConnectionError: no network; training continues without it"
    with pytest.warns(RuntimeWarning, match=message) as warnings:
        train(with_tensorboard, tmp_path, writers=[failing, working])
    assert len(warnings) == 1
    assert (len(failing.records), failing.closed, working.closed) == (2, 1, 1)
    assert len(working.records) == len((tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize("writers", [RecordingWriter, [RecordingWriter], [object()], 5, "wandb"])
def test_train_with_objects_that_are_not_writers_raises(tiny, tmp_path, writers):
    with pytest.raises(ConfigError) as error:
        train(tiny, tmp_path, writers=writers)
    assert (error.value.field, error.value.reason) == ("writers", "not a writer")
    assert not list(tmp_path.iterdir())


def test_full_disk_disables_tensorboard_and_fails_the_log(tmp_path, monkeypatch):
    messages = []

    def fail(*_):
        raise OSError(28, "No space left on device")

    log, tensorboard, plot = create_writers(tmp_path, tensorboard=True, info=messages.append)
    monkeypatch.setattr(TensorBoard, "write", fail)
    for _ in range(2):
        tensorboard.write({"samples": 1, "loss": 2.0})
    (message,) = messages
    assert "TensorBoard raised OSError" in message
    monkeypatch.setattr(JsonLines, "_flush", fail)
    with pytest.raises(OSError, match="No space left"):
        log.write({"samples": 1})
    monkeypatch.undo()
    for writer in (plot, tensorboard, log):
        writer.close()
