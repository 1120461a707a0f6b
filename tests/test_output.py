"""What a run writes and shows."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from jaxdp.config import Config, ConfigError, Model
from jaxdp.planning import make_plan, model_summary, summary_table
from jaxdp.recipes import load_config
from jaxdp.training import console, workdir
from jaxdp.training.metrics import to_json
from jaxdp.training.picture import draw

STEP = {"epoch": 1.5, "phase": 0, "global_batch": 64, "loss": 0.25, "learning_rate": 0.1, "images_per_second": 300.0}


def test_a_number_that_is_not_finite_becomes_null_in_json():
    assert to_json({"a": float("nan"), "b": float("inf"), "c": 1.5, "d": 3}) == '{"a": null, "b": null, "c": 1.5, "d": 3}'


class Clock:
    seconds = 100.0

    def monotonic(self):
        return self.seconds


def test_without_a_terminal_lines_are_few_plain_and_tell_the_time_left(monkeypatch):
    now = Clock()
    monkeypatch.setattr(console, "time", now)
    stream = io.StringIO()
    screen = console.Screen(stream)
    screen.begin(200)
    screen.busy("compiling")
    for step in range(1, 101):
        screen.step(STEP | {"step": step})
        now.seconds += 1.0
    screen.evaluated({"epoch": 2.0, "eval_accuracy": 0.5, "eval_top5": 1.0, "eval_loss": 1.0, "eval_examples": 360})
    screen.end()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "compiling ..."
    assert lines[2] == "step 16/200  epoch 1.5  loss 0.250  300 img/s  lr 0.1  phase 0 batch 64  eta 3:04"
    assert lines[-1] == "epoch 2.0: held-out accuracy 50.00 %  top-5 100.00 %  loss 1.0000  (360 images)"
    assert len(lines) == 2 + 7
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("columns", [50, 80, 100, 160])
def test_a_terminal_of_any_width_shows_steps_and_time_left(monkeypatch, columns):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    screen = console.Screen(stream)
    screen.begin(158)
    screen.step(STEP | {"step": 45})
    screen.progress.refresh()
    screen.end()
    shown = stream.getvalue()
    assert " 45/158" in shown
    assert "eta" in shown
    assert "epoch 1.5" in shown
    assert ("batch 64" in shown) == (columns >= 100)


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_durations_read_as_clocks(seconds, shown):
    assert console.clock(seconds) == shown


def test_the_plan_shows_the_highest_rate_and_idle_devices():
    config = load_config("digits", ["--schedule.learning-rate", "7", "--schedule.warmup-epochs", "4"])
    stream = io.StringIO()
    console.Screen(stream).table(summary_table(make_plan(config, 1280, 5), "5 of them", model_summary(config)))
    text = " ".join(stream.getvalue().split())
    assert "devices 5 of them" in text
    assert "4 devices (2x2) x 32, 1 idle; learning rate 0 up to 7, then down to" in text


def test_the_picture_has_all_four_panels_even_before_the_first_evaluation(tmp_path):
    records = [STEP | {"accuracy": 0.5, "epoch": float(e)} for e in range(3)]
    draw(records, tmp_path / "a.png")
    evaluated = {"epoch": 2.0, "eval_accuracy": 0.9, "eval_loss": float("nan")}
    draw([*records, evaluated], tmp_path / "b.png")
    a, b = (np.asarray(Image.open(tmp_path / name).convert("L")) for name in ("a.png", "b.png"))
    assert a.shape == b.shape == (780, 1200)
    for quarter in (a[:390, :600], a[:390, 600:], a[390:, :600], a[390:, 600:]):
        assert (quarter < 128).mean() > 0.002
    assert not np.array_equal(a, b)


def test_a_directory_whose_config_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"seed": 0, "colour": "red"}')
    with pytest.raises(ConfigError, match=r"its config\.json cannot be read \(colour: unknown field"):
        workdir.settle(tmp_path, Config(model=Model(classes=10)))


def test_the_next_free_directory_is_the_first_without_a_run(tmp_path):
    for name in ("run", "run-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "run-3").mkdir()
    assert workdir.next_free(tmp_path / "run") == tmp_path / "run-3"
    assert workdir.next_free(tmp_path / "other") == tmp_path / "other"


def test_a_file_is_replaced_whole(tmp_path):
    workdir.write_atomically(tmp_path / "x.json", json.dumps([1, 2]))
    workdir.write_atomically(tmp_path / "x.json", json.dumps([3]))
    assert json.loads((tmp_path / "x.json").read_text()) == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_in_a_terminal_something_can_be_said_before_the_steps_are_counted(monkeypatch):
    """A run compiles before it knows where it stands."""
    monkeypatch.setenv("TERM", "xterm")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    screen = console.Screen(stream)
    assert screen.live
    screen.busy("compiling")
    screen.begin(10)
    screen.busy("evaluating")
    screen.step(STEP | {"step": 1})
    screen.end()
    assert "compiling ..." in stream.getvalue()
