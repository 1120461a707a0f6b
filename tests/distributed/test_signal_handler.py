import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers.processes import RESNET, ROOT, TIMEOUT, TINY, log_lines, outcome, place, popen, wait_for_lines

from jaxdp.checkpoint.listing import latest_valid
from jaxdp.distributed import watchdog
from jaxdp.distributed.signal_handler import SignalHandler
from jaxdp.distributed.status import Failure
from jaxdp.distributed.verdict import Limits
from jaxdp.errors import EXIT_STOPPED
from jaxdp.run_records import read_log

SLOW = [*TINY, *RESNET, "--mesh.cpu-devices", "2", "--epochs", "16", "--batch.0.until-epoch", "8"]  # compiles for seconds
ASKED_BY_HAND = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGQUIT)
LONG = [*TINY, "--mesh.cpu-devices", "2", "--epochs", "40"]  # 240 steps, so that it does not end before a signal


def start(workdir, recipe=SLOW, *, before=(), start_new_session=False, **environment):
    command = [*before, sys.executable, "-u", "-m", "jaxdp", "train", "--workdir", str(workdir), *recipe]
    return popen(command, environment, start_new_session=start_new_session)


def train_to_the_end(workdir) -> tuple:
    process = start(workdir, LONG)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    return outcome(workdir)


SIGNALED_AT_ITS_IMPORT = """
import signal, sys
from jaxdp.cli import main
main.import_module = lambda name: signal.raise_signal(int(sys.argv[2]))
main.main(sys.argv[1:2])
"""


@pytest.mark.parametrize(
    ("command", "number"),
    [("train", signal.SIGUSR1), ("launch", signal.SIGTERM), ("train", signal.SIGHUP), ("launch", signal.SIGXCPU)],
)
def test_a_signal_while_a_command_is_imported_exits_with_75_and_one_line(command, number):
    program = [sys.executable, "-c", SIGNALED_AT_ITS_IMPORT, command, str(number.value)]
    completed = subprocess.run(program, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    resume = "the same command continues from the last checkpoint, if there is one"
    line = f"jaxdp: stopped by {number.name} before the first step of this session; {resume}\n"
    assert (completed.returncode, completed.stderr) == (75, line)


def test_a_signal_while_a_command_without_a_run_is_imported_ends_it():
    program = [sys.executable, "-c", SIGNALED_AT_ITS_IMPORT, "plan", str(signal.SIGTERM.value)]
    completed = subprocess.run(program, cwd=ROOT, stderr=subprocess.DEVNULL, timeout=TIMEOUT)
    assert completed.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_a_signal_during_compilation_exits_with_75_and_one_line(tmp_path):
    process = start(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"))
    for line in process.stdout:
        if line.startswith("compiling"):
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75
    last = err.splitlines()[-1]  # before it, a loaded machine may be reported to make no progress
    assert last == "jaxdp: stopped by SIGTERM before the first step of this session; the same command starts over"


@pytest.mark.parametrize(
    ("arrivals", "forced"),
    [
        ([0, 1.999], [False, False]),  # as of a launcher that forwards Ctrl-C which the terminal has sent too
        ([0, 2], [False, True]),
        ([0, 0, 0, 0], [False, False, True, True]),
        ([0, -3600], [False, False]),  # the system's clock was set
    ],
)
@pytest.mark.parametrize("numbers", list(itertools.permutations(ASKED_BY_HAND, 3)))
def test_a_signal_is_forced_if_it_is_the_second_after_two_seconds_or_the_third(monkeypatch, arrivals, forced, numbers):
    seen, later = [False], iter(arrivals)
    with SignalHandler(lambda: seen.append(True)) as signals:
        monkeypatch.setattr(signals, "_arrival_time", lambda: 1e9 + next(later))
        for number, expected in zip([*numbers, numbers[0]], forced, strict=False):
            seen[:] = [False]
            signal.raise_signal(number)
            assert seen[-1] == expected
        monkeypatch.undo()
        assert signals.stop_reason == numbers[0].name


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGXCPU])
def test_a_closed_terminal_and_a_limit_of_cpu_time_stop_a_run_and_are_never_forced(monkeypatch, first):
    """The shell and the system both send SIGHUP, and Linux repeats SIGXCPU every second until the hard limit.

    SIGTERM after them, as of a machine that shuts down, is the first request by hand.
    """
    forced, clock = [], itertools.count(0, 10)
    with SignalHandler(lambda: forced.append(True)) as signals:
        monkeypatch.setattr(signals, "_arrival_time", lambda: next(clock))
        for number in (first, first, signal.SIGHUP, signal.SIGXCPU, signal.SIGTERM, first):
            signal.raise_signal(number)
        assert (signals.stop_reason, forced) == (first.name, [])
        signal.raise_signal(signal.SIGTERM)
        assert forced == [True]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU])
def test_a_signal_that_nohup_or_the_shell_ignores_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with SignalHandler() as signals:
            signal.raise_signal(number)
            assert signals.stop_reason is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_late_signal_of_a_launcher_to_a_process_whose_stop_the_others_know_exits_with_75(monkeypatch):
    exits, arrivals, reporting = [], iter([0, 3]), watchdog.Watchdog(Limits())
    monkeypatch.setattr(watchdog, "_current", reporting)
    monkeypatch.setattr(os, "_exit", exits.append)
    with SignalHandler(lambda: exits.append("forced")) as signals:
        monkeypatch.setattr(type(signals._arrival_time), "__call__", lambda self: next(arrivals))
        signal.raise_signal(signal.SIGINT)
        reporting.update(failure=Failure("SIGINT", EXIT_STOPPED))
        signal.raise_signal(signal.SIGTERM)
    assert exits[0] == EXIT_STOPPED


def test_the_wake_up_descriptor_of_an_event_loop_is_kept():
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        with SignalHandler() as signals:
            signal.raise_signal(signal.SIGTERM)
        assert os.read(reader, 10) == bytes([signal.SIGTERM])
        assert signals.stop_reason == "SIGTERM"
    finally:
        assert signal.set_wakeup_fd(-1) == writer
        os.close(reader)
        os.close(writer)


WAITS_IN_A_THREAD = """
import os, signal, threading
from jaxdp.distributed.signal_handler import SignalHandler
def waits():
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
with SignalHandler() as signals:
    signals.run_in_thread(waits)
"""


@pytest.mark.slow
def test_a_signal_while_a_start_waits_in_a_thread_ends_the_program_although_the_thread_goes_on():
    """As for a directory that does not answer, or for JAX to connect the processes."""
    program = [sys.executable, "-c", WAITS_IN_A_THREAD]
    completed = subprocess.run(program, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    assert completed.returncode == 1
    assert completed.stderr.endswith("StopTraining: SIGTERM\n")


WAITING = """
import sys, time
from pathlib import Path
from jaxdp.distributed.launchers import detect
from jaxdp.distributed.signal_handler import SignalHandler
from jaxdp.distributed.process_group import JoinedProcesses
from jaxdp.distributed.status import Directory
from jaxdp.distributed.verdict import Limits
with SignalHandler() as signals:
    group = JoinedProcesses.join(detect("auto"), Directory(Path(sys.argv[1])), Limits())
    signals.group = group
    print("joined", flush=True)
    while not signals.stop_reason:
        time.sleep(0.01)
    print("stopping", flush=True)
    with group.follower.watchdog._changing:  # as a main thread that is interrupted while it holds the lock
        time.sleep(HOLD)
    time.sleep(300)
"""


@pytest.mark.parametrize(
    ("rank", "locked_seconds", "reason"), [(0, 0, "a second signal ended it at once"), (1, 300, "exited without a")]
)
def test_a_second_signal_to_one_rank_exits_at_once_and_is_named_by_the_others(
    tmp_path, free_port, rank, locked_seconds, reason
):
    script = WAITING.replace("HOLD", str(locked_seconds))
    command = [sys.executable, "-c", script, str(tmp_path)]
    processes = [popen(command, place(number, 2, free_port)) for number in (0, 1)]
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        for process in processes:
            assert process.stdout.readline() == "joined\n", process.communicate(timeout=TIMEOUT)
        processes[rank].send_signal(signal.SIGTERM)
        assert processes[rank].stdout.readline() == "stopping\n"
        processes[rank].send_signal(signal.SIGINT)
        time.sleep(0.2)  # the third is forced at any time
        processes[rank].send_signal(signal.SIGUSR1)
        _, err = processes[rank].communicate(timeout=200)  # shorter than its own timeout
        assert processes[rank].returncode == 1
        assert err.startswith(
            "jaxdp: stopped immediately by a second signal; the same command continues from the last checkpoint"
        )
        _, err = processes[1 - rank].communicate(timeout=TIMEOUT)
        assert processes[1 - rank].returncode == 1
        assert re.search(rf"jaxdp: rank {rank} on \S+ failed .*: {reason}", err), err


@pytest.mark.slow
def test_resume_after_ctrl_c_sigkill_a_crash_and_a_second_signal_equals_an_uninterrupted_run(tmp_path):
    """The same bits, and no line of the log twice or missing.

    Ctrl-C comes under GNU timeout: the terminal signals the whole process group, and timeout forwards the signal.
    """
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    under_timeout = ["timeout", "--foreground", "600"] if shutil.which("timeout") else []
    process = start(cut, LONG, before=under_timeout, start_new_session=True)
    wait_for_lines(cut, 21, process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 75, err
    assert "jaxdp: stopped by SIGINT after step " in err
    assert "the same command continues from it" in err
    assert latest_valid(cut / "checkpoints").samples == read_log(cut / "metrics.jsonl")[-1]["samples"]

    for number in (signal.SIGKILL, signal.SIGSEGV):  # SIGSEGV: a crash in native code
        before = log_lines(cut)
        process = start(cut, LONG)
        wait_for_lines(cut, before + 21, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == -number
    assert err.startswith("Fatal Python error: Segmentation fault\n")
    assert "jaxdp/training/loop.py" in err

    process = start(cut, LONG)
    before = log_lines(cut)
    wait_for_lines(cut, before + 21, process)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(number)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode in (1, 75)  # 75 if the run was saved before the third signal arrived
    assert train_to_the_end(cut) == train_to_the_end(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "number", "workdir"),
    [("clusters.md", signal.SIGTERM, "runs/goyal"), ("imagenet.md", signal.SIGUSR1, "/shared/runs/imagenet")],
)
def test_the_documented_slurm_script_saves_and_requeues(tmp_path, page, number, workdir):
    """Scripts in place of srun and scontrol do the same for one task; the signal goes to the task only, as from Slurm."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert f"--signal={number.name.removeprefix('SIG')}@" in script
    for documented, here in (
        (r"^(source|cd) .*\n", ""),
        (r"--(model\.dtype|batch\.0\.[\w-]+|data\.directory) \S+", ""),  # of ImageNet on many GPUs
        ("python train.py", f"{sys.executable} -u {ROOT / 'train.py'}"),
        ("--config imagenet_goyal_256", shlex.join(SLOW)),
        (workdir, str(tmp_path / "run")),
    ):
        script = re.sub(documented, here, script, flags=re.MULTILINE)
    (tmp_path / "job.sh").write_text(script)
    for name, text in (
        ("srun", f'echo $$ > {tmp_path / "task"}; while [[ $1 == -* ]]; do shift; done; exec "$@"'),
        ("scontrol", f'echo "$@" > {tmp_path / "requeued"}'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    job = popen(["bash", tmp_path / "job.sh"], environment, cwd=tmp_path)
    wait_for_lines(tmp_path / "run", 6, job)
    os.kill(int((tmp_path / "task").read_text()), number)
    _, err = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 75, err
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    assert latest_valid(tmp_path / "run/checkpoints") is not None
