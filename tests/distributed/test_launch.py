import errno
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers.processes import popen, wait_until

from jaxdp.distributed import launch as launch_module
from jaxdp.distributed.launch import Process, launch, reserved_port
from jaxdp.errors import ConfigError


def test_reserved_port_is_free_for_rank_0_only():
    port = reserved_port()
    with (
        socket.socket() as other,
        pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)),
    ):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)) as connection:
        server.accept()[0].close()
        assert connection.recv(1) == b""


def test_launch_with_a_rank_that_exits_with_0_before_the_others_names_it(tmp_path):
    """Rank 0 waits until the launcher has seen the end of rank 1, whose number no process has then."""
    script = tmp_path / "process.py"
    script.write_text(
        "import contextlib, os, pathlib, sys, time\n"
        f"number = pathlib.Path({str(tmp_path / 'number')!r})\n"
        "if os.environ['JAX_PROCESS_ID'] == '1':\n"
        "    number.with_suffix('.partial').write_text(str(os.getpid()))\n"
        "    number.with_suffix('.partial').rename(number)\n"
        "    os._exit(0)\n"
        "with contextlib.suppress(ProcessLookupError):\n"
        "    while not number.exists() or os.kill(int(number.read_text()), 0) is None:\n"
        "        time.sleep(0.01)\n"
        "sys.exit('jaxdp: rank 1 on host failed in step 3: exited without a message (killed or crashed)')\n"
    )
    command = [sys.executable, "-m", "jaxdp", "launch", "--processes", "2", "--", str(script)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert completed.returncode == 1
    (line,) = [line for line in completed.stderr.splitlines() if line.startswith("jaxdp launch: ")]
    assert line.startswith("jaxdp launch: rank 1 exited first, with exit code 0, before the end of the run, after ")


def test_launch_with_a_rank_that_exits_with_75_counts_a_rank_that_sigterm_ended_as_stopped():
    script = "import os, sys, time; os.environ['JAX_PROCESS_ID'] == '0' and time.sleep(300); sys.exit(75)"
    assert launch([sys.executable, "-c", script], 2) == 75


def test_launch_forwards_one_of_two_copies_of_a_signal():
    """As from `uv run`, which forwards Ctrl-C that the terminal has sent to both."""
    script = (
        "import signal, sys, time; "
        "signal.signal(signal.SIGINT, lambda *_: (print('saving', flush=True), time.sleep(0.5), sys.exit(75))); "
        "print('ready', flush=True); time.sleep(300)"
    )
    code = (
        "import sys; from jaxdp.distributed import launch, signal_handler; signal_handler.COPY_SECONDS = 1e6; "
        f"sys.exit(launch.launch([sys.executable, '-c', {script!r}], 1))"
    )
    launcher = popen([sys.executable, "-c", code])
    assert launcher.stdout.readline() == "[0] ready\n"
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout.readline() == "[0] saving\n"
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=300)
    assert (launcher.returncode, err) == (75, "")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGKILL])
def test_the_processes_of_a_launcher_that_a_signal_ends_are_asked_to_stop(tmp_path, number):
    """A closed terminal signals only the launcher, and no process learns that it was killed."""
    script = (
        "import os, pathlib, signal, sys, time\n"
        "def save(number, frame):\n"
        f"    pathlib.Path({str(tmp_path)!r}, os.environ['JAX_PROCESS_ID']).write_text(signal.Signals(number).name)\n"
        "    sys.exit(75)\n"
        "for each in (1, 3, 15, 24): signal.signal(each, save)\n"
        "print('ready', flush=True); time.sleep(300)"
    )
    command = [sys.executable, "-m", "jaxdp", "launch", "--processes", "2", "--", sys.executable, "-c", script]
    launcher = popen(command)
    assert {launcher.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    launcher.send_signal(number)
    launcher.communicate(timeout=300)
    is_killed = number == signal.SIGKILL
    assert launcher.returncode == (-number if is_killed else 75)
    expected = "SIGTERM" if is_killed else number.name
    wait_until(lambda: [path.read_text() for path in sorted(tmp_path.glob("[01]"))] == [expected] * 2)


def test_launch_of_jaxdp_needs_no_activated_environment(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch(["jaxdp", "--version"], 1) == 0
    assert capfd.readouterr().out.startswith("[0] jaxdp ")


class Fake(Process):
    """A process that ends after some seconds, and after each signal that it does not ignore."""

    def __init__(self, rank, ends=1e9, code=0, reported=None, **after_signal):
        self.rank, self.reported, self.ended, self.killed = rank, reported, None, False
        self.on_end, self._readers, self.ends, self.code = (lambda: None), [], ends, code
        self.after_signal, self.received = {"SIGKILL": (0, -9)} | after_signal, []
        self.process = SimpleNamespace(pid=rank, returncode=None)

    def poll(self, now):
        if self.process.returncode is None and now >= self.ends:
            self.process.returncode, self.ended = self.code, now
        return self.process.returncode

    def signal(self, number):
        self.received.append((launch_module.time.monotonic(), number.name))
        if self.ended is None and number.name in self.after_signal:
            seconds, self.code = self.after_signal[number.name]
            self.ends = min(self.ends, launch_module.time.monotonic() + seconds)


SAVES = {"SIGTERM": (1, 75), "SIGINT": (1, 75)}
KILLS, FAILS_3 = "rank {} is still running or suspended; killing it", "rank 1 failed first, with exit code 3, after {} s"
KILLED_2ND = "killed after a second signal; the same command continues from the last checkpoint, if there is one"


@pytest.mark.parametrize(
    ("processes", "signals", "code", "received", "printed"),
    [
        ([{"ends": 5}, {"ends": 9}], {}, 0, [[], []], []),
        ([{"ends": 5, "code": 75}, {"ends": 6}], {}, 75, [[], []], []),
        ([{"ends": 5, "code": 75}, SAVES], {}, 75, [[(7.5, "SIGTERM")]] * 2, []),
        (
            [{"ends": 5, "code": 75}, {"ends": 6, "code": 3}],
            {},
            3,
            [[], []],
            [FAILS_3.format(6)],
        ),
        (
            [{}, {"ends": 5, "code": 3}, {"SIGKILL": (25, -9)}],
            {},
            3,
            [[(15.25, "SIGKILL")], [], [(15.25, "SIGKILL"), (25.5, "SIGKILL"), (35.75, "SIGKILL")]],
            [KILLS.format(0), *[KILLS.format(2)] * 3, FAILS_3.format(5)],
        ),
        ([SAVES, SAVES], {3: signal.SIGINT}, 75, [[(3, "SIGINT")]] * 2, []),
        ([SAVES, {"SIGINT": (0, -2)}], {3: signal.SIGINT}, 75, [[(3, "SIGINT")]] * 2, []),
        ([{}, SAVES], {3: signal.SIGINT, 6: signal.SIGTERM}, 137, [[(3, "SIGINT"), (6, "SIGKILL")]] * 2, [KILLED_2ND]),
        ([{"ends": 9, "code": -11}], {}, 139, [[]], ["rank 0 failed first, by SIGSEGV, after 9 s"]),
        (
            [{"ends": 9, "code": 1}, {"ends": 8, "code": -6}],
            {},
            1,
            [[], []],
            ["rank 0 failed first, with exit code 1"],
        ),
        ([{"ends": 8, "code": -6}, {"ends": 9, "code": 1}], {}, 134, [[], []], ["rank 0 failed first, by SIGABRT, after 8 s"]),
        (
            [{"ends": 5, "code": 2, "reported": 1}, {"ends": 6, "code": 3, "reported": 1}],
            {},
            3,
            [[], []],
            [FAILS_3.format(6)],
        ),
        ([{"ends": 5, "code": 2, "reported": 7}, {"ends": 6}], {}, 2, [[], []], ["rank 0 failed first, with exit code 2"]),
        (
            [{"ends": 5, "code": 2, "reported": 1}, {"ends": 6}],
            {},
            2,
            [[], []],
            ["rank 1 exited first, with exit code 0"],
        ),
        (
            [{"ends": 5, "code": 2, "reported": 1}, {}],
            {},
            2,
            [[], [(15.25, "SIGKILL")]],
            [
                "rank 1 is still running or suspended; killing it",
                "rank 1 failed first, and was killed by this launcher, after 16 s",
            ],
        ),
    ],
)
def test_when_a_launcher_signals_its_processes_and_how_it_ends(monkeypatch, processes, signals, code, received, printed):
    clock, lines, asked = [0.0], [], []

    def sleep(_):
        clock[0] += 0.25  # exact in binary
        asked.extend(signals.pop(second) for second in list(signals) if clock[0] >= second)

    monkeypatch.setattr(launch_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(launch_module, "_print", lines.append)
    run = [Fake(rank, **each) for rank, each in enumerate(processes)]
    assert launch_module._wait_for_all(run, asked, 0.0) == code
    assert [each.received for each in run] == received
    assert [line[: len(start)] for line, start in zip(lines, printed, strict=True)] == printed


@pytest.mark.parametrize(
    ("codes", "restarts", "messages"),
    [
        ([0], 2, []),
        ([1, 139, 0], 2, ["1 more restart after", "0 more restarts after"]),
        ([1, 3, 1], 2, ["1 more restart after", "0 more restarts after"]),
        ([1], 0, []),
        ([1, 75], 3, ["2 more restarts after"]),
        ([2], 2, []),
    ],
)
def test_a_launcher_restarts_its_processes_after_a_failure_only(monkeypatch, capfd, codes, restarts, messages):
    left, commands = iter(codes), []
    monkeypatch.setattr(launch_module, "_run_once", lambda command, *_, **__: commands.append(command) or next(left))
    assert launch(["train.py", "--x"], 1, restarts) == codes[-1]
    assert commands == [[sys.executable, "train.py", "--x"]] * len(codes)
    expected = [f"jaxdp launch: restarting; {message} this one" for message in messages]
    assert capfd.readouterr().err.splitlines() == expected


def test_a_launcher_that_was_signaled_does_not_restart(monkeypatch):
    def run_once(command, processes, *, signals, guardian):
        signal.raise_signal(signal.SIGTERM)
        return 1

    monkeypatch.setattr(launch_module, "_run_once", run_once)
    assert launch(["x"], 1, 5) == 1


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(([], 1), "command"), ((["x"], 0), "--processes"), ((["x"], 1025), "--processes"), ((["x"], 1, -1), "--restarts")],
)
def test_a_launcher_refuses(arguments, field):
    with pytest.raises(ConfigError) as error:
        launch(*arguments)
    assert error.value.field == field


def test_a_program_that_cannot_be_started_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be started"):
        launch([str(tmp_path / "none")], 1)
