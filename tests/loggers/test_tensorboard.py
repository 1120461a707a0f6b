"""Tests of jaxdp.loggers.tensorboard; the event files are read back with the protocol buffers of tensorboardX."""

import dataclasses
import io
import itertools
import json

import numpy as np
import pytest
from helpers.runs import Recorder, read_records, tensorboard_scalars, train_shown
from PIL import Image
from tensorboardX.proto import event_pb2
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from jaxdp import Callback, train
from jaxdp.config import Config, Phase
from jaxdp.data.sources import open_datasets
from jaxdp.loggers.tensorboard import EventFile
from jaxdp.run_records import read_log
from jaxdp.validation import flatten, to_json


@pytest.fixture
def with_tensorboard(tiny) -> Config:
    """A short run that writes TensorBoard events."""
    logging = dataclasses.replace(tiny.logging, tensorboard=True)
    return dataclasses.replace(tiny, epochs=1.5, batch=(Phase(16),), logging=logging)


def summaries(folder):
    """(samples, summary value) pairs of an event file. A record is length (8 bytes), checksum (4), event, checksum (4)."""
    (file,) = folder.iterdir()
    data, offset, values = file.read_bytes(), 0, []
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 8], "little")
        event = event_pb2.Event.FromString(data[offset + 12 : offset + 12 + length])
        values += [(event.step, value) for value in event.summary.value]
        offset += 16 + length
    return values


class Examples(Callback):
    """Keeps the held-out images of evaluations."""

    def __init__(self):
        self.seen = []

    def after_evaluation(self, run, evaluation):
        self.seen.append((evaluation["samples"], *run.example_images))


def test_train_writes_records_config_mesh_and_pictures(with_tensorboard, tmp_path):
    recorder = Examples()
    result = train(with_tensorboard, tmp_path, callbacks=[recorder])
    lines = read_records(tmp_path)
    scalars = tensorboard_scalars(tmp_path / "tensorboard")
    assert scalars["training/loss"] == pytest.approx({line["samples"]: line["loss"] for line in lines if "loss" in line})
    evaluated = {line["samples"]: line["eval_accuracy"] for line in lines if "eval_accuracy" in line}
    assert scalars["evaluation/accuracy"] == pytest.approx(evaluated)
    values = summaries(tmp_path / "tensorboard")

    texts = {
        value.tag.removesuffix("/text_summary"): value.tensor.string_val[0].decode()
        for _, value in values
        if "text" in value.tag
    }
    assert json.loads(texts["config"]) == json.loads(to_json(with_tensorboard))

    plugin = [value.metadata.plugin_data for _, value in values if value.tag.startswith("_hparams_/")]
    experiment, start = (HParamsPluginData.FromString(data.content) for data in plugin)
    fields = flatten(json.loads(to_json(with_tensorboard)))
    assert start.session_start_info.hparams.keys() == fields.keys()
    assert start.session_start_info.hparams["schedule.learning_rate"].number_value == 2.0
    assert start.session_start_info.hparams["reduce.strategy"].string_value == "torus"
    (metric,) = [info.name.tag for info in experiment.experiment.metric_infos]
    assert [value.simple_value for _, value in values if value.tag == metric][-1] == pytest.approx(result.accuracy)

    about = {value.tag: value.metadata.summary_description for _, value in values if value.HasField("simple_value")}
    assert about["training/loss"].startswith("Cross entropy on training batches with labels smoothed by 0.1;")
    assert about["evaluation/loss"] == "Cross entropy on held-out images with plain labels"

    source, (samples, images, labels, predicted) = open_datasets(with_tensorboard).evaluation, recorder.seen[-1]
    expected = source.batch(np.linspace(0, 22, 16).round().astype(int))
    np.testing.assert_array_equal(images, expected[0])
    np.testing.assert_array_equal(labels, expected[1])
    assert predicted.shape == (16,)
    grids = {step: value.image for step, value in values if value.HasField("image")}
    (tag,) = {value.tag for _, value in values if value.HasField("image")}
    assert tag not in {value.tag for _, value in values if value.HasField("simple_value")}  # a tag shows only one kind of data
    assert sorted(grids) == [example[0] for example in recorder.seen] == [64, 80]
    tiles = np.asarray(Image.open(io.BytesIO(grids[samples].encoded_image_string)))
    for number, (row, column) in enumerate(itertools.product(range(4), range(4))):
        tile = tiles[198 * row : 198 * (row + 1), 160 * column : 160 * (column + 1)]
        np.testing.assert_array_equal(tile[5:160:10, 5:160:10], images[number])
        assert tuple(tile[-1, -1]) == ((0, 0, 0) if labels[number] == predicted[number] else (213, 94, 0))


def test_every_event_is_in_the_file_of_its_session_at_once(tmp_path):
    for samples in (0, 112):  # two sessions in the same second
        writer = EventFile(tmp_path, samples, Config())
        writer.write({"samples": samples + 16, "loss": 0.5})
        assert tensorboard_scalars(tmp_path)["training/loss"][samples + 16] == 0.5
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_values_of_callbacks_are_in_the_group_of_their_record(tmp_path):
    writer = EventFile(tmp_path, 0, Config())
    writer.write({"samples": 16, "loss": 0.5, "norm": 1.0})
    writer.write({"samples": 16, "eval_loss": 0.5, "epoch": 1.0, "recall": 2.0})
    writer.close()
    tags = {"training/loss", "training/norm", "training/epoch", "evaluation/loss", "evaluation/recall"}
    assert {tag for tag in tensorboard_scalars(tmp_path) if tag.startswith(("training/", "evaluation/"))} == tags


def test_integer_that_64_bits_do_not_hold_is_logged(with_tensorboard, tmp_path):
    class LogsOperations(Callback):
        def after_evaluation(self, run, evaluation):
            run.log(operations=3 * 10**20, images=2**62)

    train(with_tensorboard, tmp_path, callbacks=[LogsOperations()])
    scalars = tensorboard_scalars(tmp_path / "tensorboard")
    for name, value in (("operations", 3e20), ("images", 2.0**62)):
        assert set(scalars[f"evaluation/{name}"].values()) == {np.float32(value)}
    assert read_log(tmp_path / "metrics.jsonl")[-1]["images"] == 2**62


def test_run_whose_tensorboard_directory_cannot_be_written_continues_without(with_tensorboard, tmp_path):
    class Blocks(Callback):
        def on_start(self, run):
            (tmp_path / "tensorboard").write_text("a file")

    screen = Recorder()
    result = train_shown(with_tensorboard, tmp_path, screen=screen, callbacks=[Blocks()])
    assert [line for line in screen.lines if "TensorBoard" in line] == [
        f"TensorBoard.on_start raised FileExistsError: [Errno 17] File exists: '{tmp_path}/tensorboard'; "
        "the run continues without it"
    ]
    assert result.steps == read_records(tmp_path)[-1]["step"]
