"""What a run can be watched by: TensorBoard, read back by another reader, and writers of the caller's own."""

import dataclasses
import io
import itertools
import json

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto import event_pb2
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from jaxdp import ConfigError, train
from jaxdp.config import Config, Phase
from jaxdp.data.sources import open_datasets
from jaxdp.training.evaluation import Examples
from jaxdp.training.metrics import JsonLines, writers_for
from jaxdp.training.tensorboard import About, TensorBoard
from jaxdp.validation import flatten, to_json


def summaries(folder):
    """(samples, value) of every event. A record is length (8 bytes), its checksum (4), the event, its checksum (4)."""
    (file,) = folder.iterdir()
    data, offset, found = file.read_bytes(), 0, []
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 8], "little")
        event = event_pb2.Event.FromString(data[offset + 12 : offset + 12 + length])
        found += [(event.step, value) for value in event.summary.value]
        offset += 16 + length
    return found


@pytest.fixture
def short(tiny) -> Config:
    return dataclasses.replace(
        tiny, epochs=1.5, batch=(Phase(16),), logging=dataclasses.replace(tiny.logging, tensorboard=True)
    )


class Notebook:
    """A writer as a user may have one."""

    def __init__(self):
        self.records, self.examples, self.closed = [], [], 0

    def write(self, record):
        self.records.append(dict(record))
        record.clear()

    def write_examples(self, record, images, labels, predicted):
        self.examples.append((record["samples"], images, labels, predicted))

    def close(self):
        self.closed += 1


def test_a_run_is_watched_by_tensorboard_and_by_writers_of_the_callers_own(short, tmp_path):
    mine = Notebook()
    result = train(short, tmp_path, writers=[mine])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert mine.records == lines
    assert mine.closed == 1
    found = summaries(tmp_path / "tensorboard")

    texts = {
        value.tag.removesuffix("/text_summary"): value.tensor.string_val[0].decode()
        for _, value in found
        if "text" in value.tag
    }
    assert json.loads(texts["config"]) == json.loads(to_json(short))
    assert "| 0 | 2x2 cpu | 16 | 4 | 1 | torus |" in texts["mesh"]

    plugin = [value.metadata.plugin_data for _, value in found if value.tag.startswith("_hparams_/")]
    experiment, start = (HParamsPluginData.FromString(one.content) for one in plugin)
    fields = flatten(json.loads(to_json(short)))
    assert start.session_start_info.hparams.keys() == fields.keys()
    assert start.session_start_info.hparams["schedule.learning_rate"].number_value == 2.0
    assert start.session_start_info.hparams["reduce.strategy"].string_value == "torus"
    (metric,) = [info.name.tag for info in experiment.experiment.metric_infos]
    assert [value.simple_value for _, value in found if value.tag == metric][-1] == pytest.approx(result.accuracy)

    source, (samples, images, labels, predicted) = open_datasets(short).evaluation, mine.examples[-1]
    expected = source.batch(np.linspace(0, 22, 16).round().astype(int))
    np.testing.assert_array_equal(images, expected[0])
    np.testing.assert_array_equal(labels, expected[1])
    assert predicted.shape == (16,)
    pictures = {step: value.image for step, value in found if value.HasField("image")}
    (tag,) = {value.tag for _, value in found if value.HasField("image")}
    assert tag not in {value.tag for _, value in found if value.HasField("simple_value")}  # which would hide it
    assert sorted(pictures) == [one[0] for one in mine.examples] == [64, 80]
    tiles = np.asarray(Image.open(io.BytesIO(pictures[samples].encoded_image_string)))
    for place, (row, column) in enumerate(itertools.product(range(4), range(4))):
        tile = tiles[198 * row : 198 * (row + 1), 160 * column : 160 * (column + 1)]
        np.testing.assert_array_equal(tile[5:160:10, 5:160:10], images[place])
        assert tuple(tile[-1, -1]) == ((0, 0, 0) if labels[place] == predicted[place] else (213, 94, 0))


def test_a_writer_that_raises_is_warned_of_once_and_the_run_goes_on(short, tmp_path):
    class Broken(Notebook):
        def write(self, record):
            super().write(record)
            if len(self.records) == 2:
                raise ConnectionError("no network\nat all")

    broken, sound = Broken(), Notebook()
    with pytest.warns(RuntimeWarning, match="Broken raised ConnectionError: no network; the run goes on without it") as told:
        train(short, tmp_path, writers=[broken, sound])
    assert len(told) == 1
    assert (len(broken.records), broken.closed, sound.closed) == (2, 1, 1)
    assert len(sound.records) == len((tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize("given", [Notebook, [Notebook], [object()], 5, "wandb"])
def test_what_is_no_writer_is_refused(tiny, tmp_path, given):
    with pytest.raises(
        ConfigError, match=r"^writers: .* is not allowed; give a list of objects with write\(record\) and close\(\)$"
    ):
        train(tiny, tmp_path, writers=given)
    assert not list(tmp_path.iterdir())


def test_tensorboard_that_cannot_write_costs_a_remark_and_the_log_costs_the_run(tmp_path, monkeypatch):
    said = []

    def full(*_):
        raise OSError(28, "No space left on device")

    log, board, picture = writers_for(tmp_path, tensorboard=True, say=said.append)
    monkeypatch.setattr(TensorBoard, "write", full)
    for _ in range(2):
        board.write({"samples": 1, "loss": 2.0})
    (line,) = said
    assert "TensorBoard raised OSError" in line
    monkeypatch.setattr(JsonLines, "_write_waiting", full)
    with pytest.raises(OSError, match="No space left"):
        log.write({"samples": 1})
    monkeypatch.undo()
    for writer in (picture, board, log):
        writer.close()


def test_examples_are_spread_over_all_images_and_leave_out_padding_and_bad_ones():
    examples = Examples(100, most=5)
    assert examples.wanted.tolist() == [0, 25, 50, 74, 99]
    weights = np.array([1, 1, 0, 0], np.int32)  # 50 is left out; the last row is padding
    positions = np.array([25, 26, 50, 0], np.uint32)
    part = {"positions": positions, "weights": weights, "labels": np.arange(4), "images": np.zeros((4, 2, 2, 3), np.uint8)}
    examples(part)(np.array([7, 8, 9, 9]))
    _, labels, predicted = examples.arrays()
    assert (labels.tolist(), predicted.tolist()) == ([0], [7])


def test_names_of_classes_stand_under_the_images(tmp_path, monkeypatch):
    from PIL import ImageDraw

    written = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, place, text, **_: written.append(text))
    board = TensorBoard(tmp_path, 0, About(Config(), "", ("cat", "dog")))
    board.write_examples({"samples": 1}, np.zeros((3, 4, 4, 3), np.uint8), np.array([0, 0, 2]), np.array([0, 1, 2]))
    board.close()
    assert written == ["cat", "cat", "taken for dog", "2"]
