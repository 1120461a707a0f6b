import dataclasses
import time
from types import SimpleNamespace

import pytest
from helpers.images import GraySquares
from helpers.runs import Recorder, read_records, train_shown

from jaxdp.config import Data, Phase
from jaxdp.loggers.warnings import InputAdvice, input_warning


@pytest.mark.parametrize(("input_seconds", "needed", "cores"), [(5.0, 200, "4 more cores"), (2.0, 125, "1 more core in")])
def test_input_warning_names_the_missing_cores(input_seconds, needed, cores):
    warning = input_warning(1000, 10.0, input_seconds=input_seconds, source=SimpleNamespace(threads=4))
    assert f"{10 * input_seconds:.0f} % of the time" in warning
    assert f" 100 images/s are loaded, {needed} are needed: {cores}" in warning


@pytest.mark.parametrize(("share", "advises_cores"), [(0.4, True), (0.9, False)])
def test_input_warning_advises_no_cores_for_threads_that_wait_for_storage(share, advises_cores):
    source = SimpleNamespace(threads=4, storage_share=share)
    warning = input_warning(1000, 10.0, input_seconds=5.0, source=source)
    assert ("4 more cores" in warning) == advises_cores
    assert ("wait 90 % of their time for storage" in warning) != advises_cores


def test_input_warning_below_a_tenth_of_the_time_is_none():
    assert input_warning(1000, 10.0, input_seconds=0.9, source=object()) is None


def test_first_bad_image_is_named_once():
    messages, advice = [], InputAdvice()
    for bad_images in ({}, {"a.png": "truncated"}, {"a.png": "truncated", "b.png": "empty"}):
        datasets = SimpleNamespace(bad_images=bad_images)
        advice.after_step(SimpleNamespace(progress=None, datasets=datasets, info=messages.append, is_logged=True), {"step": 1})
    assert messages == ["skipped a.png: truncated; all skipped images are listed at the end of the run"]


class SlowSquares(GraySquares):
    def __getitem__(self, index):
        time.sleep(0.02)
        return super().__getitem__(index)


def test_train_input_bound_warns_once_and_logs_wait_time(tiny, tmp_path):
    screen = Recorder()
    config = dataclasses.replace(tiny, data=Data(image_size=80, augmentation="none"), batch=(Phase(8),), epochs=2.0)
    result = train_shown(config, tmp_path, screen=screen, datasets=(SlowSquares(48), GraySquares(9)))
    assert len([text for text in screen.lines if text.startswith("input-bound")]) == 1
    lines = read_records(tmp_path)
    assert sum(line.get("input_seconds", 0) for line in lines) == pytest.approx(result.input_seconds, rel=1e-6)
    assert result.input_seconds > 0.14
