import contextlib
import io
import os
from types import SimpleNamespace

import pytest

from jaxdp.loggers import console

STEP = {"epoch": 1.5, "phase": 0, "global_batch": 64, "loss": 0.25, "learning_rate": 0.1, "images_per_second": 300.0}


def test_screen_without_a_terminal_prints_few_plain_lines_with_the_time_left(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    stream = io.StringIO()
    screen = console.Screen(stream)
    screen.begin(200)
    screen.status("compiling")
    for step in range(1, 101):
        screen.step(STEP | {"step": step})
        now.seconds += 1.0
    screen.evaluated({"epoch": 2.0, "eval_accuracy": 0.5, "eval_top5": 1.0, "eval_loss": 1.0, "eval_examples": 360})
    screen.end()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "compiling ..."
    assert lines[2] == "step 16/200  epoch 1.5  training loss 0.250  300 img/s  lr 0.1  phase 0 batch 64  eta 3:04"
    assert lines[-1] == "epoch 2.0: held-out accuracy 50.00 %  top-5 100.00 %  held-out loss 1.0000  (360 images)"
    assert len(lines) == 2 + 7  # a step line every 15 seconds
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("columns", [50, 160])
def test_screen_in_a_terminal_of_any_width_shows_steps_and_time_left(monkeypatch, columns):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    screen = console.Screen(stream)
    screen.status("compiling")  # before the run knows where it stands
    screen.begin(158)
    screen.step(STEP | {"step": 45})
    screen.progress.refresh()
    screen.end()
    shown = stream.getvalue()
    assert "compiling ..." in shown
    assert " 45/158" in shown
    assert "eta" in shown
    assert "epoch 1.5" in shown
    assert ("batch 64" in shown) == (columns >= 100)


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_format_duration(seconds, shown):
    assert console.format_duration(seconds) == shown


def test_screen_in_a_pseudo_terminal_of_a_launcher_shows_no_bar(monkeypatch):
    """mpirun gives every process a pseudo-terminal as stdout, whether its own output is a file or not."""
    monkeypatch.setenv("TERM", "xterm")
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream:
        assert stream.isatty()
        assert not console.Screen(stream).live
    os.close(controller)


def test_info_escapes_control_characters_and_keeps_line_breaks(capsys):
    console.Screen().info("bad\x1b[31m file\r\nsecond \u202e line")
    assert capsys.readouterr().out == "bad\\x1b[31m file\\r\nsecond \\u202e line\n"


def without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def full():
    return open("/dev/full", "w")


@pytest.mark.parametrize(
    ("opened", "reason", "terminal"),
    [(without_reader, "Broken pipe", True), (full, "No space left on device", False), (full, "No space left on device", True)],
)
def test_screen_that_outlasts_its_reader_says_so_once(monkeypatch, capfd, opened, reason, terminal):
    monkeypatch.setattr(console, "_is_interactive", lambda stream: terminal)
    monkeypatch.setenv("TERM", "xterm")
    stream = opened()
    screen = console.Screen(stream)
    screen.outlast_reader()
    screen.begin(200)
    screen.status("compiling")
    for step in range(1, 5):
        screen.step(STEP | {"step": step})
        screen.info("a message")
    screen.end()
    name = stream.name
    with contextlib.suppress(OSError):
        stream.close()
    assert screen.lost == f"{name} cannot be written ({reason}); the run continues without it"
    assert capfd.readouterr() == ("", f"jaxdp: {screen.lost}\n")


def test_screen_raises_the_error_of_its_stream():
    stream = without_reader()
    with pytest.raises(BrokenPipeError):
        console.Screen(stream).info("a message")
    with contextlib.suppress(OSError):
        stream.close()
