import contextlib
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from jaxdp.bench import environment
from jaxdp.config import Config, Guard, Mesh
from jaxdp.distributed import runtime
from jaxdp.distributed.signal_handler import Stopped, StopTraining
from jaxdp.distributed.status import Failure
from jaxdp.distributed.watchdog import limits_from
from jaxdp.errors import ConfigError
from jaxdp.setup.prepare import prepare


def test_start_on_a_machine_with_a_gpu_that_jax_does_not_see_raises_unless_the_cpu_is_requested(monkeypatch):
    monkeypatch.setattr(runtime, "nvidia_gpu_present", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ConfigError) as error:
        runtime.start(Mesh(cpu_devices=4))
    assert error.value.reason == "JAX does not see this machine's NVIDIA GPU"
    assert error.value.hint.startswith("install jaxdp with its extra cuda")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert len(runtime.start(Mesh(cpu_devices=4))) == 4


def test_start_with_more_cpu_devices_than_jax_runs_with_raises():
    with pytest.raises(ConfigError) as error:
        runtime.start(Mesh(cpu_devices=9))
    assert (error.value.field, error.value.value) == ("mesh.cpu_devices", 9)
    assert error.value.reason == "JAX already runs in this process with 8 CPU devices"
    assert 'call jax.config.update("jax_num_cpu_devices", 9) before the first use of JAX' in error.value.hint
    assert error.value.hint.endswith("or set --mesh.cpu-devices 8")


def test_start_with_fewer_cpu_devices_returns_the_first_ones():
    assert runtime.start(Mesh(cpu_devices=2)) == jax.devices()[:2]
    assert runtime.start(Mesh()) == jax.devices()[:1]


def test_the_start_of_jax_in_a_run_of_several_processes_can_be_stopped():
    """It waits for other processes in native code, where the main thread would handle no signal."""

    def stop(function, *arguments):
        raise StopTraining("SIGTERM")

    with pytest.raises(StopTraining):
        prepare(Config(), group=SimpleNamespace(num_processes=2), run=stop)


def group_of(host_numbers, rank=0, **fields):
    """A group of processes on hosts of these numbers."""
    hosts = [f"node{number}" for number in host_numbers]
    sizes = {"num_processes": len(host_numbers), "rank": rank, "is_rank0": rank == 0}
    return SimpleNamespace(host_numbers=host_numbers, hosts=hosts, **sizes, **fields)


def devices_of(*processes):
    return [SimpleNamespace(process_index=one, platform="gpu", device_kind="H100", id=n) for n, one in enumerate(processes)]


def test_start_returns_devices_by_host_and_then_by_process_and_refuses_unequal_numbers(monkeypatch):
    monkeypatch.setattr(runtime, "_jax_devices", lambda: devices_of(0, 0, 1, 1, 2, 2, 3, 3))
    devices = runtime.start(Mesh(), group_of([0, 1, 0, 1]))
    assert [device.process_index for device in devices] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert [device.id for device in devices] == [0, 1, 4, 5, 2, 3, 6, 7]
    monkeypatch.setattr(runtime, "_jax_devices", lambda: devices_of(0, 0, 1, 2, 2))
    with pytest.raises(ConfigError, match="rank 1 on node1 has 1 and rank 0 on node0 has 2"):
        runtime.start(Mesh(), group_of([0, 1, 1]))


@pytest.mark.parametrize(
    ("host_numbers", "rows", "text"),
    [
        ([0], 1, "2 x H100"),
        ([0, 0], 1, "2 x H100 of 2 processes on 1 host"),
        ([0, 0, 1, 1], 2, "2 x H100 of 4 processes on 2 hosts"),
        ([0, 1, 2], 3, "2 x H100 of 3 processes on 3 hosts"),
        ([0, 0, 1], 1, "2 x H100 of 3 processes on 2 hosts"),
    ],
)
def test_hosts_become_rows_if_they_have_equally_many_processes(host_numbers, rows, text):
    assert runtime.uniform_host_count(group_of(host_numbers)) == rows
    assert runtime.describe(devices_of(0, 0), group_of(host_numbers)) == text
    assert runtime.describe(devices_of(0, 0)) == "2 x H100"


def test_each_process_of_a_host_has_its_share_of_the_gpus_that_all_of_the_host_see(monkeypatch):
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    gpus = [["a", "b"], ["c", "d", "e", "f"], ["a", "b"], ["c", "d", "e", "f"], ["g"]]
    ids = [runtime._local_device_ids(group_of([0, 1, 0, 1, 2], rank, gpus=gpus)) for rank in range(5)]
    assert ids == [[0], [0, 1], [1], [2, 3], None]
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "3,1")
    assert runtime._local_device_ids(group_of([0], gpus=[["a"]])) == [3, 1]


@pytest.mark.parametrize(("processes", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("code", [0, 3])
def test_processes_exit_together_and_rank_0_removes_their_files(monkeypatch, tmp_path, processes, rank, code):
    done, folder = [], tmp_path / "processes"
    folder.mkdir()
    monkeypatch.setattr(os, "_exit", lambda number: done.append((number, folder.exists())))
    group = group_of([0] * processes, rank, close=lambda: done.append("left"))
    with pytest.raises(SystemExit, match="3") if code else contextlib.nullcontext():  # the patched exit returns
        runtime.exit_together(group, code, directory=folder)
    assert done == (["left", (code, rank != 0)] if processes > 1 else [])


def test_an_error_is_reported_to_the_others_and_raised():
    failures = []
    with pytest.raises(ConfigError), runtime.fail_together(SimpleNamespace(fail=failures.append)):
        raise ConfigError("a", 1, reason="b")
    assert [failure.code for failure in failures] == [2]
    with runtime.fail_together(SimpleNamespace(fail=failures.append)):
        pass
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("error", "failed", "has_group", "expected"),
    [
        (None, None, True, ["left"]),
        (None, None, False, []),
        (KeyError("a"), None, True, [("KeyError: 'a'", 1), 1]),
        (KeyError("a"), Failure("b", 2), True, [2]),  # which the run has reported
        (Stopped("c"), None, True, ["left", 75]),
        (Stopped("c"), None, False, [75]),
        (KeyError("a"), None, False, []),
    ],
)
def test_what_a_process_does_at_its_exit(monkeypatch, error, failed, has_group, expected):
    done = []

    class Group:
        failure = failed

        def fail(self, failure):
            self.failure = failure
            done.append((failure.reason, failure.code))

        def close(self):
            done.append("left")

    monkeypatch.setattr(runtime, "_group", Group() if has_group else None)
    monkeypatch.setattr(sys, "last_exc", None, raising=False)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(os, "_exit", done.append)
    runtime._at_exit()
    assert done == expected


def test_a_process_joins_once_and_needs_a_directory_that_the_others_share(monkeypatch, tmp_path):
    joined = []
    monkeypatch.setattr(runtime, "_group", None)
    monkeypatch.setattr(runtime.JoinedProcesses, "join", lambda *given, **_: joined.append(given) or "group")
    flags = {"coordinator": "a:1", "processes": 2, "rank": 1}
    assert runtime.join("none").num_processes == 1
    with pytest.raises(ConfigError, match="is missing: several processes need a directory"):
        runtime.join(**flags)
    assert [runtime.join(directory=tmp_path, **flags) for _ in range(2)] == ["group"] * 2
    ((cluster, board, limits),) = joined
    assert (cluster.rank, board.path, limits) == (1, tmp_path / "processes", limits_from(Guard()))
    assert runtime.current_group() == "group"


SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")
STEPS = """
import resource, statistics, sys
from jaxdp.config import Mesh
from jaxdp.distributed import runtime

if sys.argv[1] == "kept":
    runtime.start(Mesh())
import jax, jax.numpy as jnp

@jax.jit
def step(x):  # allocates 48 MB while it runs
    return (x @ x.T) @ x

x = jnp.ones((3548, 8))
each = []
for _ in range(15):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    each.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(statistics.median(each[5:]))  # after every thread has allocated its arena
"""
PAGES = 48 * 2**20 // 4096


def page_faults(memory: str) -> float:
    """Page faults of the median step, as the kernel counts them."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    command = [sys.executable, "-c", STEPS, memory]
    return float(subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc has this option")
@pytest.mark.skipif(environment.huge_pages() == "always", reason="large pages everywhere: too few page faults to count")
def test_freed_memory_is_kept_and_reuses_the_memory_of_a_step_without_page_faults():
    assert page_faults("kept") < PAGES / 5
    assert page_faults("returned") > PAGES / 2
