"""The tables of commands, on terminals of several widths and elsewhere."""

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios

import pytest
from helpers.report import write_run

from jaxdp.bench import scaling
from jaxdp.cli import bench, main
from jaxdp.doctor import runner
from jaxdp.doctor.check_result import CheckResult
from jaxdp.inference import load_run
from jaxdp.loggers import console, notebook

UNTRUSTED = "\x1b[31mred\x1b[0m [bold]a[/nope] :smile:"
SHOWN = r"\x1b[31mred\x1b[0m [bold]a[/nope] :smile:"
STYLE = re.compile(r"\x1b\[[\d;]*m")
COLOR = re.compile(r"\x1b\[(?:\d+;)*3\dm")

GOOD = {
    "path": "run/7",
    "samples": 1437,
    "epoch": 1.0,
    "steps": 20,
    "accuracy": 0.97,
    "bytes": 10**7,
    "names": ["best", "last"],
}
CORRUPT = {"path": "run/8", "samples": 2874, "epoch": None, "steps": None, "accuracy": None, "bytes": 0, "names": []}
CHECKPOINTS = [GOOD | {"error": None}, CORRUPT | {"error": f"corrupt: default/ocdbt is missing {UNTRUSTED}"}]
CHECKS = [
    CheckResult("control network", "ok", "Python 3.12.1, jaxdp 0.1.0, jax 0.10.2"),
    CheckResult("disk", "error", UNTRUSTED, "mount it"),
]
ROW = {
    "mode": "strong",
    "devices": 8,
    "mesh": [2, 4],
    "global_batch": 512,
    "step_seconds": 0.129,
    "images_per_second": 21999.0,
    "exposed_communication_seconds": 0.0101,
    "exposed_communication_interval": [0.0093, 0.0115],
    "waiting_seconds": 0.002,
    "speed_up": 1.0,
    "efficiency": 0.5,
}
RECORD = {"model": "ResNet-18", "strategy": "torus", "wire_dtype": "float32", "device": "cpu", "virtual": False, "rows": [ROW]}
EXPECTED = {  # words of each command's table
    "checkpoints": [
        "samples",
        "accuracy",
        "97.00 %",
        "best,",
        "valid",
        "corrupt:",
        "[bold]a[/nope]",
        ":smile:",
        r"\x1b[31mred\x1b[0m",
    ],
    "doctor": ["ok", "error", "control", "network", "3.12.1,", "fix:", "[bold]a[/nope]", ":smile:", r"\x1b[31mred\x1b[0m"],
    "bench": ["devices", "communication", "efficiency", "21,999", "50 %", "waiting", "11.5)"],
}
STYLED = {"checkpoints": "\x1b[1msamples", "doctor": "\x1b[32mok", "bench": "\x1b[1mdevices"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def print_table(monkeypatch, tmp_path):
    """A function that runs a command whose stdout is `stream`, and returns the lines of its table."""
    monkeypatch.setattr(load_run, "list_checkpoints", lambda workdir: CHECKPOINTS)
    monkeypatch.setattr(runner, "run_checks", lambda *_: CHECKS)
    monkeypatch.setattr(scaling, "draw", lambda record, path: None, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)

    def run(command, stream, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stdout", stream)
        if command == "bench":
            bench._bench_result(bench.Scaling(output=str(tmp_path)), "scaling", RECORD, bench=scaling)
        else:
            with pytest.raises(SystemExit):
                main.main([command, "--workdir", str(tmp_path)])
        lines = stream.getvalue().split("\n")
        return {"bench": lines[1:-4], "doctor": lines[1:-2], "checkpoints": lines}[command]

    return run


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("command", EXPECTED)
def test_tables_fit_the_terminal_and_break_no_word_that_fits(print_table, command, columns):
    lines = [STYLE.sub("", line) for line in print_table(command, Terminal(), columns)]
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    assert "\x1b" not in text
    for words in EXPECTED[command]:
        assert words in (text if len(words) <= columns else text.replace("\n", ""))


@pytest.mark.parametrize("command", EXPECTED)
def test_rows_of_a_table_too_wide_for_the_terminal_are_lines_of_names_and_values(print_table, command):
    lines = [STYLE.sub("", line) for line in print_table(command, Terminal(), 60 if command == "bench" else 30)]
    first = {"checkpoints": "samples: 1437", "bench": "devices: 8", "doctor": "ok: control network: Python"}
    assert lines[0].rstrip() == first[command]


@pytest.mark.parametrize("command", STYLED)
def test_tables_are_styled_on_the_terminal_that_shows_them_only(monkeypatch, print_table, command):
    assert STYLED[command] in "\n".join(print_table(command, Terminal()))
    assert "\x1b" not in "\n".join(print_table(command, io.StringIO()))
    monkeypatch.setattr(console, "_is_interactive", lambda stream: False)  # a terminal whose output may end in a file
    assert "\x1b" not in "\n".join(print_table(command, Terminal()))


def test_tables_with_no_color_have_none(monkeypatch, print_table):
    assert COLOR.search("\n".join(print_table("doctor", Terminal())))
    monkeypatch.setenv("NO_COLOR", "1")
    text = "\n".join(print_table("doctor", Terminal()))
    assert COLOR.search(text) is None
    assert text.count(r"\x1b") == UNTRUSTED.count("\x1b")


def test_words_longer_than_a_line_stay_whole_where_there_is_no_terminal(print_table, monkeypatch):
    path = "/long" * 40
    monkeypatch.setattr(runner, "run_checks", lambda *_: [CheckResult("disk", "error", f"no space in {path}", "delete it")])
    (line,) = [line for line in print_table("doctor", io.StringIO()) if "/long" in line]
    assert line.endswith(path)


def test_tables_of_notebooks_have_no_escape_codes(capsys):
    notebook.Notebook().table(runner.make_table(CHECKS))
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert output.splitlines()[1].split() == ["error", "disk", *SHOWN.split()]


CONTROLLED = """
import fcntl, sys, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
from jaxdp.cli import main
main.main(sys.argv[1:])
"""


@pytest.mark.parametrize("columns", [20, 100])
def test_checkpoints_in_a_pseudo_terminal_says_which_are_corrupt(tmp_path, columns):
    damaged = write_run(tmp_path / "run") / "checkpoints" / "160"
    damaged.mkdir(parents=True)
    (damaged / "manifest.json").write_text("{")
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    code = subprocess.run(
        [sys.executable, "-c", CONTROLLED, "checkpoints", "--workdir", str(tmp_path / "run")],
        env=environment | {"TERM": "xterm-256color"},
        stdin=terminal,
        stdout=terminal,
        start_new_session=True,
        check=False,
    ).returncode
    shown = os.read(controller, 65536).decode()
    os.close(controller)
    os.close(terminal)
    assert code == 1
    assert "\x1b[1msamples" in shown
    assert r"\x1b" not in shown
    lines = [STYLE.sub("", line) for line in shown.splitlines()]
    assert max(map(len, lines)) <= columns
    assert "corrupt" in STYLE.sub("", shown)
