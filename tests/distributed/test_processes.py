"""Real processes of a run: start, exchange of objects, and what each prints when one of them fails."""

import re
import signal
import socket
import sys
import threading
from types import MappingProxyType

import pytest
from helpers.processes import TIMEOUT, place, popen, wait_until

from jaxdp.distributed.launch import reserved_port

PRELUDE = """
import os, signal, sys, threading, time
from pathlib import Path
from jaxdp.distributed import launchers
from jaxdp.distributed.process_group import JoinedProcesses
from jaxdp.distributed.status import Directory, Failure
from jaxdp.distributed.verdict import Limits
start, stuck = float(os.environ.get("START", 60)), float(os.environ.get("STUCK", 3))
limits = Limits(late_seconds=1, stuck_seconds=stuck, silence_seconds=4, start_seconds=start)
group = JoinedProcesses.join(launchers.detect(), Directory(Path(sys.argv[1])), limits)
rank, hosts = group.rank, group.hosts
group.set_activity("step", 7)
"""
START_JAX = """
from jaxdp.config import Mesh
from jaxdp.distributed import runtime
try:
    with runtime.fail_together(group):
        runtime.start(Mesh(cpu_devices=1 + rank * int(os.environ.get("MORE_DEVICES", 0))), group)
except Exception as error:
    print(f"jaxdp: {error}", file=sys.stderr, flush=True)
    os._exit(getattr(error, "exit_code", 1))
"""
EXCHANGE = """
values = group.all_gather_object("values", {"rank": rank, "text": "x" * 1000 * rank})
assert [value["rank"] for value in values] == [0, 1] and len(values[1]["text"]) == 1000, values
assert group.broadcast_object("first", ["of", rank]) == ["of", 0]
def in_thread():
    for number in range(5):
        time.sleep(0.1 * rank)
        gathered.append(group.all_gather_object("ready to save", [rank, number]))
gathered = []
thread = threading.Thread(target=in_thread)
thread.start(); thread.join()
assert gathered == [[[0, n], [1, n]] for n in range(5)], gathered
assert len(hosts) == 2 and group.host_numbers == [0, 0]
print("exchanged", flush=True)
group.close()
os._exit(0)
"""
WAIT = """
while True:
    group.status.record_progress()
    time.sleep(0.1)
"""


CUT_OFF = """
group.follower.board.read = lambda name: time.sleep(600)
def trains():
    time.sleep(600)
trains()
"""
FAULT = """
from jaxdp.distributed import verdict
def breaks(*arguments):
    raise KeyError("a bug")
def fails():
    verdict.report = breaks
    time.sleep(1.2)
    verdict.report = lambda *arguments: []
threading.Thread(target=fails).start()
"""
READ_ONLY = """
def refuse(name, text):
    raise PermissionError(13, "Permission denied", name)
write, group.follower.board.write = group.follower.board.write, refuse
while group.status.clock < 12:
    group.status.record_progress()
    time.sleep(0.1)
group.follower.board.write = write
group.close()
os._exit(0)
"""
STUCK = "def reads_its_data():\n    time.sleep(600)\nreads_its_data()"
HOLDS_THE_GIL = "import ctypes\ndef computes():\n    ctypes.PyDLL(None).sleep(600)\ncomputes()"


HIT_BY = "time.sleep(2); os.kill(os.getpid(), signal."
LIVES_ON = "print('joined', flush=True)" + WAIT.replace("True", "group.status.clock < 8") + "group.close(); os._exit(0)"
LATE_START = {"START": "20"}
# Runs that are started together, for they mostly wait: their processes, and options of `Run`.
RUNS = {
    "stuck": ({0: STUCK, 1: "group.broadcast_object('x', 1)"}, {}),
    "killed": ({0: WAIT, 1: HIT_BY + "SIGKILL)"}, {}),
    "suspended": ({0: WAIT, 1: HIT_BY + "SIGSTOP)"}, {}),
    "holds the GIL": ({0: WAIT, 1: HOLDS_THE_GIL}, {}),
    "without network": ({0: WAIT, 1: CUT_OFF}, {}),
    "fault of the watching thread": ({0: FAULT + WAIT, 1: "threading.Timer(6, os.kill, (os.getpid(), 9)).start()" + WAIT}, {}),
    "faults of the watching thread": ({0: FAULT.replace("1.2", "600") + WAIT, 1: WAIT}, {}),
    "read-only directory": ({0: READ_ONLY, 1: READ_ONLY}, {}),
    "suspended as a whole": ({0: LIVES_ON, 1: LIVES_ON}, {}),
    "rank 0 alone": ({0: WAIT}, {"processes": 2, "environment": LATE_START}),
    "rank 1 alone": ({1: WAIT}, {"processes": 2, "environment": LATE_START}),
    "rank 1 does not start": ({0: WAIT, 2: WAIT}, {"processes": 3, "environment": LATE_START}),
}


class Run:
    """Processes that run PRELUDE and their own code."""

    def __init__(self, folder, port, codes, processes=None, environment=MappingProxyType({})):
        self.running = []
        for rank, code in codes.items():
            variables = place(rank, processes or len(codes), port) | environment
            self.running.append(popen([sys.executable, "-c", PRELUDE + code, str(folder / "processes")], variables))

    def wait(self):
        """(exit code, last line of jaxdp on stderr) of each process; a busy machine adds lines on slow progress at any time."""
        results = []
        for process in self.running:
            out, err = process.communicate(timeout=TIMEOUT)
            lines = [line for line in err.splitlines() if line.startswith("jaxdp:") and "The run ends after" not in line]
            results.append((process.returncode, lines[-1] if lines else out + err))
        return results

    def kill(self):
        for process in self.running:
            process.kill()
            process.communicate()


def signal_all(run, number):
    for process in run.running:
        process.send_signal(number)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    runs = {
        name: Run(tmp_path_factory.mktemp("run"), reserved_port(), codes, **options) for name, (codes, options) in RUNS.items()
    }
    folder, port = tmp_path_factory.mktemp("run"), reserved_port()
    for rank, host in enumerate(("127.0.0.1", "localhost")):
        environment = LATE_START | {"JAX_COORDINATOR_ADDRESS": f"{host}:{port}"}
        runs[host] = Run(folder, port, {rank: WAIT}, processes=2, environment=environment)
    suspended = runs["suspended as a whole"]
    for process in suspended.running:
        assert process.stdout.readline() == "joined\n", process.communicate()
    signal_all(suspended, signal.SIGSTOP)
    threading.Timer(6, signal_all, (suspended, signal.SIGCONT)).start()  # the limit for a silent process is 4 s
    yield runs
    for run in runs.values():
        run.kill()


@pytest.fixture
def start(tmp_path, free_port):
    runs = []

    def make(codes, **options):
        runs.append(Run(tmp_path, free_port, codes, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.kill()


def test_objects_are_exchanged_by_the_main_thread_and_by_others(start):
    for code, text in start({0: EXCHANGE, 1: EXCHANGE}).wait():
        assert code == 0, text


def test_an_error_is_printed_by_every_process_with_the_place_where_it_was_raised(start):
    raises = """
def reads():
    raise RuntimeError("the disk is on fire")
try:
    reads()
except RuntimeError as error:
    group.fail(Failure.of(error))
    os._exit(1)
"""
    results = start({0: WAIT, 1: raises, 2: WAIT}).wait()
    for code, line in (results[0], results[2]):
        assert code == 1
        assert re.match(r"jaxdp: rank 1 on .* failed in step 7: the disk is on fire; raised at <string>:.* in reads", line)


def test_a_process_that_is_stuck_ends_the_run_with_its_place(faulty):
    for code, line in faulty["stuck"].wait():
        assert code == 1
        assert re.match(r"jaxdp: rank 0 on \S+ failed in step 7: stuck: no progress for .*in reads_its_data", line), line


FAILED = r"jaxdp: rank 1 on \S+ failed in step 7: "


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("killed", [f"{FAILED}exited without a message"]),
        ("suspended", [f"{FAILED}sent no sign of life for 4 s"]),
        ("holds the GIL", [r"rank 1 on \S+ failed .*; main thread at <string>:\d+ in computes"]),
        (
            "fault of the watching thread",  # supervision continues
            [
                r"the thread status-files raised KeyError: 'a bug'; raised at .*follower.py:\d+ in _judge_all",
                f"{FAILED}exited without a message",
            ],
        ),
        ("faults of the watching thread", [r"rank 0 on \S+ failed in step 7: the thread status-files raised KeyError"]),
    ],
)
def test_rank_0_names_the_process_that_has_failed(faulty, name, patterns):
    run = faulty[name]
    assert run.running[0].wait(TIMEOUT) == 1
    err = run.running[0].stderr.read()
    for pattern in patterns:
        assert re.search(pattern, err), err


def test_a_run_that_is_suspended_as_a_whole_continues(faulty):
    results = faulty["suspended as a whole"].wait()
    assert [code for code, _ in results] == [0, 0], results


def test_processes_that_do_not_start_are_named_by_those_that_do(faulty):
    for code, line in faulty["rank 1 does not start"].wait():
        assert code == 1
        assert re.fullmatch(
            r"jaxdp: 1 of 3 processes did not start within 20 s: rank 1 \(started: rank 0 on \S+, rank 2 on \S+\); .*", line
        ), line


@pytest.mark.parametrize("name", ["rank 0 alone", "rank 1 alone"])
def test_a_process_without_others_is_told_how_to_train_alone(faulty, name):
    """The variables of a launcher that has not started it: of a shell, or left over."""
    ((code, line),) = faulty[name].wait()
    assert code == 1
    assert re.search(r" did not start .*; if nothing has started more processes, .* use --cluster none$", line), line


def test_two_processes_of_the_same_rank_are_refused(start):
    """Started together, one of them or both."""
    (first,) = start({1: WAIT}, processes=3).running
    second, _ = start({1: WAIT, 0: WAIT}, processes=3).running
    wait_until(lambda: first.poll() is not None or second.poll() is not None)
    refused = first if first.poll() is not None else second
    assert refused.wait() == 2
    text = r"rank=1: process \d+ on \S+ and process \d+ on \S+ both have it; give each process its own rank\n$"
    assert re.search(text, refused.stderr.read())


def test_two_runs_that_start_together_in_the_same_directory_are_not_mixed(start, free_port):
    """Both ranks 0 may find no file of another, and write theirs."""
    environment = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port + 1}", "START": "20"}
    first, second = start({0: WAIT}, processes=2), start({0: WAIT}, processes=2, environment=environment)
    wait_until(lambda: any(run.running[0].poll() is not None for run in (first, second)))
    refused = first if first.running[0].poll() is not None else second
    ((code, line),) = refused.wait()
    assert code == 2
    assert re.search(r"rank 0 on \S+ failed.*: a run that 127.0.0.1:\d+ coordinates uses this directory", line), line


def test_processes_that_name_the_coordinator_differently_are_told_so(faulty):
    for rank, own, other in ((0, "127.0.0.1", "localhost"), (1, "localhost", "127.0.0.1")):
        ((code, line),) = faulty[own].wait()
        hint = rf"rank {1 - rank} on \S+ names the coordinator {other}:\d+, and this process {own}:\d+"
        assert code == 1
        assert re.search(rf"did not start .*; {hint}: give all processes the same HOST:PORT", line), line


def test_a_directory_that_can_only_be_read_ends_no_run_and_is_reported_once(faulty):
    for process in faulty["read-only directory"].running:
        _, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, err
        (line,) = [line for line in err.splitlines() if "status files" in line]
        reason = r"status files cannot be .* for \d+ s: Permission denied; training continues"
        assert re.match(rf"jaxdp: \S+/processes: {reason}", line)


def test_a_stop_ends_waiting_for_others_before_the_first_step_and_at_barriers_only(start):
    """If it ended another exchange on one process, the other would begin a collective alone."""
    steps = """
def stop():
    raise SystemExit("stopped")
group.attach(before_exit=lambda: None, while_waiting=stop)
group.take_request(None)
time.sleep(2 * rank)
assert group.all_gather_object("findings", rank) == [0, 1]
time.sleep(2 * (1 - rank))
stopped = False
try:
    group.barrier("the evaluation")
except SystemExit:
    stopped = True
group.attach(before_exit=lambda: None, while_waiting=lambda: None)  # a run where the other has begun more operations
group.barrier("the evaluation")
assert group.all_gather_object("in the second run", rank) == [0, 1]
group.close()
os._exit(0 if stopped == (rank == 1) else 3)
"""
    results = start({0: steps, 1: steps}).wait()
    assert [code for code, _ in results] == [0, 0], results


def test_a_process_whose_host_has_lost_the_network_ends_too(faulty):
    """It cannot learn that the other processes have given up."""
    alone, other = faulty["without network"].wait()[::-1]
    assert alone[0] == other[0] == 1
    assert re.match(r"jaxdp: rank 1 on \S+ failed in step 7: no progress, and no answer of .* in trains", alone[1])
    assert re.match(r"jaxdp: rank 1 on \S+ failed in step 7: ", other[1])


@pytest.mark.slow
def test_a_taken_port_is_a_config_error_on_every_process(start, free_port):
    with socket.create_server(("127.0.0.1", free_port)):
        for code, line in start({0: START_JAX, 1: START_JAX}, environment={"STUCK": "60"}).wait():
            assert code == 2
            assert f"coordinator port={free_port}: rank 0 cannot listen on 127.0.0.1" in line


HEALTHY = """
import numpy
from jax.experimental import multihost_utils
print("started", flush=True)
while not Path(sys.argv[1]).with_name("others have ended").exists():
    group.status.record_progress()
    time.sleep(0.05)
assert multihost_utils.process_allgather(numpy.array(rank)).tolist() == [0, 1]
group.close()
os._exit(0)
"""


@pytest.mark.slow
def test_a_run_that_names_the_port_of_another_one_does_not_end_it(start, tmp_path, free_port):
    """Its rank 0 is refused, and no other rank of it connects to the service that it finds at the port."""
    patient = {"STUCK": "60"}
    healthy = start({0: START_JAX + HEALTHY, 1: START_JAX + HEALTHY}, environment=patient)
    for process in healthy.running:
        assert process.stdout.readline() == "started\n", process.communicate()
    other = Run(tmp_path / "other", free_port, {0: START_JAX, 1: START_JAX}, environment=patient)
    for code, line in other.wait():
        assert code == 2
        assert f"coordinator port={free_port}: rank 0 cannot listen on 127.0.0.1" in line
    (tmp_path / "others have ended").touch()
    assert [code for code, _ in healthy.wait()] == [0, 0]


@pytest.mark.slow
def test_a_proxy_of_the_environment_is_not_asked_for_rank_0(start, free_port):
    """It would not answer: it listens, and accepts no connection."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
        environment = dict.fromkeys([*names, *map(str.upper, names)], address) | {"no_proxy": "example.org", "STUCK": "60"}
        run = start({rank: START_JAX + "group.close(); os._exit(0)" for rank in (0, 1)}, environment=environment)
        for process in run.running:
            _, err = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, err
            assert "detected proxy variable" not in err  # JAX's warning
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.mark.slow
def test_unequal_numbers_of_devices_are_a_config_error_on_every_process(start):
    for code, line in start({0: START_JAX, 1: START_JAX}, environment={"MORE_DEVICES": "1", "STUCK": "60"}).wait():
        assert code == 2
        assert re.search(r"devices: rank 0 on \S+ has 1 and rank 1 on \S+ has 2", line), line


def test_a_directory_that_cannot_be_written_is_a_config_error(start, tmp_path):
    (tmp_path / "processes").write_text("")
    for code, text in start({0: WAIT, 1: WAIT}).wait():
        assert code == 1
        assert "--workdir" in text
        assert "File exists" in text


REQUESTS = """
for step in range(6):
    if rank == 1 and step == 2:
        assert not group.request_save()
    reason = "SIGTERM" if rank == 1 and step == 4 else None
    request = group.take_request(reason)
    group.record_request(max(group.all_gather_object("the metrics of a step", request)))
    if stopped := group.check_stop(reason):
        assert stopped == ("SIGTERM" if rank else f"SIGTERM (rank 1 on {hosts[1]})"), stopped
    print(step, "stop" if stopped else "save" if group.take_agreed_save() else None, flush=True)
    if stopped:
        break
group.close()
os._exit(0)
"""


def test_processes_save_and_stop_at_the_same_step_when_one_asks(start):
    run = start({0: REQUESTS, 1: REQUESTS})
    expected = ["0 None", "1 None", "2 save", "3 None", "4 stop"]
    assert [process.communicate(timeout=TIMEOUT)[0].splitlines() for process in run.running] == [expected] * 2


def test_a_stop_before_the_first_step_ends_all_processes_with_75(start):
    code, _ = start({0: WAIT, 1: "assert group.check_stop('SIGTERM') == 'SIGTERM'; os._exit(75)"}).wait()
    assert code[0] == 75
    assert re.match(r"jaxdp: rank 1 on \S+ was stopped in step 7: SIGTERM", code[1]), code
