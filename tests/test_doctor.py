"""`jaxdp doctor`: each check finds what is wrong, and none falls or hangs with the machine."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from jaxdp import cli
from jaxdp.config import Checkpoint, Compile, Config, Data, Model
from jaxdp.doctor import images, machine, network, packages, probe, software
from jaxdp.doctor.finding import Findings, guarded, output_of, still_running, summary

ROOT = Path(__file__).parent.parent


def slow(*values):
    """Values of a test that starts commands, and which the quick tests have other values for."""
    return pytest.param(*values, marks=pytest.mark.slow)


def looked(check, *arguments, **named):
    findings = Findings("a")
    check(findings, *arguments, **named)
    return findings.finding()


@pytest.fixture
def program(tmp_path, monkeypatch):
    """program(name, script): the only program of the PATH, beside the system's."""

    def make(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    return make


def test_a_check_that_raises_or_hangs_is_a_line_and_the_others_are_told():
    until = threading.Event()

    def falls(findings):
        raise RuntimeError("no such thing\nand more")

    asked = {"falls": falls, "hangs": lambda findings: until.wait(), "works": lambda findings: findings.ok("there")}
    began = time.monotonic()
    falling, hanging, working = guarded(asked, 0.3)
    assert time.monotonic() - began < 5
    assert still_running()
    until.set()
    assert (falling.state, falling.found) == ("warning", "could not be looked at: RuntimeError: no such thing")
    assert (hanging.state, hanging.found) == ("wrong", "no answer in 0.3 s")
    assert (working.state, working.found, working.mend) == ("ok", "there", None)


def test_a_program_that_does_not_answer_or_fails_is_an_error_in_one_line(program):
    program("nvidia-smi", "exec sleep 30")
    with pytest.raises(OSError, match=r"^nvidia-smi does not answer in 0\.2 s$"):
        output_of(["nvidia-smi"], 0.2)
    program("nvidia-smi", "echo one; echo the driver is gone >&2; exit 9")
    with pytest.raises(OSError, match=r"^nvidia-smi ends with exit code 9: the driver is gone$"):
        output_of(["nvidia-smi"], 5)


H200 = "echo 'NVIDIA H200, {driver}, 143771, {used}'"


@pytest.mark.parametrize(
    ("script", "there", "plugins", "state", "found"),
    [
        (H200.format(driver="580.65.06", used=3), True, {"13": "0.10.2"}, "ok", "1 x NVIDIA H200, driver 580.65.06; plugin"),
        (H200.format(driver="550.54.15", used=3), True, {"13": "0.10.2"}, "wrong", "CUDA 13 wants a driver of 580 or newer"),
        (H200.format(driver="550.54.15", used=3), True, {"12": "0.10.2"}, "ok", "driver 550.54.15"),
        (H200.format(driver="580.65.06", used=90000), True, {"13": "0.10.2"}, "warning", "GPU 0 has 87.9 GiB in use"),
        (H200.format(driver="580.65.06", used=3), True, {"13": "0.9.0"}, "wrong", "the plugin 0.9.0 is not for jax 0.10.2"),
        (H200.format(driver="580.65.06", used=3), True, {}, "wrong", "a GPU is here and cannot be used"),
        ("exit 9", True, {"13": "0.10.2"}, "wrong", "nvidia-smi ends with exit code 9: nothing said"),
        ("exit 9", False, {}, "warning", "nvidia-smi ends with exit code 9"),
        ("echo no, numbers", False, {}, "warning", "not enough values"),
        ("true", False, {}, "warning", "nvidia-smi lists no GPU"),
    ],
)
def test_cuda_is_judged_by_driver_plugin_and_what_jax_sees(monkeypatch, program, script, there, plugins, state, found):
    program("nvidia-smi", script)
    monkeypatch.setattr(software, "nvidia_gpu_present", lambda: there)
    monkeypatch.setattr(software, "plugins", lambda: plugins)
    monkeypatch.setattr(software, "installed", {"jax": "0.10.2"}.get)
    seen = [{"platform": "gpu"}] if plugins and there else []
    told = looked(software.cuda, devices=seen)
    assert (told.state, bool(told.mend)) == (state, state != "ok")
    assert found in told.found


@pytest.mark.parametrize(("asked", "state"), [("", "wrong"), ("cpu", "warning")])
def test_a_gpu_that_jax_does_not_see_is_wrong_unless_the_cpu_is_asked_for(monkeypatch, program, asked, state):
    program("nvidia-smi", H200.format(driver="580.65.06", used=3))
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    monkeypatch.setattr(software, "nvidia_gpu_present", lambda: True)
    monkeypatch.setattr(software, "plugins", lambda: {"13": "0.10.2"})
    monkeypatch.setattr(software, "installed", {"jax": "0.10.2"}.get)
    assert looked(software.cuda, devices=[{"platform": "cpu"}]).state == state


def test_nccl_variables_are_told_and_those_that_slow_it_down_are_warned_of(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    told = looked(software.nccl, devices=[])
    assert told.state == "ok"
    assert "set: NCCL_DEBUG=INFO" in told.found
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert looked(software.nccl, devices=[]).mend == "unset NCCL_P2P_DISABLE unless a fault asks for it"


def test_versions_outside_what_is_declared_are_wrong(monkeypatch):
    assert looked(packages.packages, broken={}).state == "ok"
    assert looked(packages.python).state == "ok"
    monkeypatch.setattr(packages, "declared", lambda: (">=4", ["jax>=99", "no-such-package>=1", "numpy"]))
    told = looked(packages.packages, broken={})
    assert told.state == "wrong"
    assert told.mend == "pip install 'no-such-package>=1'; pip install 'jax>=99'"
    assert "no-such-package is not installed" in told.found
    assert looked(packages.python).state == "wrong"


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("optax", "raise RuntimeError('no such\\nsymbol')", "optax cannot be imported: RuntimeError: no such"),
        slow("numpy", "raise ImportError('libopenblas is gone')", "numpy cannot be imported: ImportError: libopenblas is gone"),
        slow("absl", "raise RuntimeError('half')", "absl-py cannot be imported: RuntimeError: half"),
    ],
)
def test_an_installed_package_that_cannot_be_imported_is_named_and_nothing_else(tmp_path, module, text, found):
    (tmp_path / f"{module}.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxdp", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    told = {one["check"]: one for one in json.loads(done.stdout)["checks"]}["packages"]
    assert (told["state"], told["found"].split("; ")[1:]) == ("wrong", [found])
    assert told["mend"].startswith(f"pip install --force-reinstall --no-deps {chr(39) * (module != 'absl')}{found.split()[0]}")
    done = subprocess.run([*command[:3], "train"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("`jaxdp doctor` says what of jaxdp's packages is missing or broken")
    assert "Traceback" not in done.stderr


BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from importlib import metadata
version = metadata.version
def found(name):
    if name in {missing!r}:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = found
"""


@pytest.mark.parametrize("missing", [("pydantic",), slow(("numpy",)), slow(("packaging", "tyro")), slow(("jax", "jaxlib"))])
def test_it_runs_and_names_what_is_not_installed(tmp_path, missing):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.format(missing=missing))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}

    def run(*arguments):
        command = [sys.executable, "-m", "jaxdp", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    done = run("doctor", "--json")
    assert done.returncode == 1, done.stderr
    told = {one["check"]: one for one in json.loads(done.stdout)["checks"]}
    assert told["python"]["state"] == "ok"
    names = [one for one in missing if one != "jaxlib"]
    (found,) = [one for one in told["packages"]["found"].split("; ") if one.endswith("not installed")]
    assert all(name in found for name in names)
    assert all(f"'{name}>=" in told["packages"]["mend"] for name in names)
    assert "cannot be imported" not in told["packages"]["found"]
    assert run("--help").returncode == 0
    done = run("doctor")
    assert "-> pip install '" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_disk_and_memory_are_judged_against_the_checkpoints_of_the_recipe(tmp_path):
    config = Config(checkpoint=Checkpoint(keep=3))
    told = looked(machine.disk, config, tmp_path / "runs/a", 1000)
    assert told.state == "ok"
    assert "5 checkpoints take 0 MB" in told.found
    assert looked(machine.disk, config, tmp_path, 2**60).state == "wrong"
    assert "what checkpoints take is not known" in looked(machine.disk, config, tmp_path, None).found
    assert looked(machine.disk, config, Path("/proc/runs/a"), 1000).state == "wrong"
    assert looked(machine.memory, 2**20, 2**20).state == "ok"
    assert looked(machine.memory, 2**60, 0).state == "wrong"
    assert "not known" in looked(machine.memory, None, None).found


def test_a_full_cache_without_files_is_not_to_be_emptied(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_space", lambda path: (1000, True, path))
    config = Config(compile=Compile(cache=str(tmp_path)))
    assert looked(machine.cache, config).mend == "free space there, or give another directory by --compile.cache"
    (tmp_path / "program").write_text("")
    assert looked(machine.cache, config).mend.startswith("empty it")


def test_a_tmpdir_that_is_passed_over_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "no"))
    told = looked(machine.disk, Config(), tmp_path, 1000)
    assert (told.state, f"TMPDIR={tmp_path / 'no'} cannot be written, and" in told.found) == ("warning", True)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert looked(machine.disk, Config(), tmp_path, 1000).state == "ok"


def test_cores_are_judged_by_a_measurement_and_only_for_a_rate_that_is_given(monkeypatch):
    pictures = Config(data=Data(source="folder", directory="x", image_size=32, augmentation="random_resized_crop"))
    monkeypatch.setattr(machine, "MEASURED_SECONDS", 0.02)
    assert machine.decoded_per_second(pictures) > 1
    monkeypatch.setattr(machine, "decoded_per_second", lambda config: 1000.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert "give --images-per-second" in looked(machine.cores, pictures, None, 2).found
    assert looked(machine.cores, pictures, 1900.0, 2).state == "ok"
    told = looked(machine.cores, pictures, 2500.0, 2)
    assert (told.state, "5,000 images/s want 5.0 of them" in told.found) == ("warning", True)
    assert looked(machine.cores, Config(data=Data(source="digits")), 1e9, 2).state == "ok"


def test_a_data_directory_is_looked_into(tmp_path):
    from jaxdp.bench.input import make_images

    def of(directory, classes=2):
        return looked(images.data, Config(data=Data(source="folder", directory=str(directory)), model=Model(classes=classes)))

    assert "there is no such folder" in of(tmp_path / "no").found
    for split in ("train", "val"):
        make_images(tmp_path / split, 4, 50, 50)
    told = of(tmp_path)
    assert (told.state, told.found) == ("ok", "train: 4 images; val: 4 images; 2 classes")
    (tmp_path / "val/class0/00000.jpg").write_bytes(b"\xff\xd8 no picture")
    assert "the first image of val cannot be read" in of(tmp_path).found
    (tmp_path / "train/class2").mkdir()
    (tmp_path / "train/class2/a.jpg").write_bytes(b"")
    assert of(tmp_path).state == "wrong"


def test_the_port_of_the_processes_and_their_variables_are_looked_at(monkeypatch):
    for name in list(os.environ):
        if name.startswith(network.LAUNCHERS):
            monkeypatch.delenv(name)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(network.cluster, "PORT", port)
        told = looked(network.launcher)
        assert (told.state, f"one process alone; port {port} is in use" in told.found) == ("warning", True)
        for name, value in {"COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "NUM_PROCESSES": "2", "PROCESS_ID": "0"}.items():
            monkeypatch.setenv(f"JAX_{name}", value)
        told = looked(network.launcher)
        assert (told.state, told.found.split("; ")[0]) == ("wrong", f"jax: rank 0 of 2, rank 0 at 127.0.0.1:{port}")
    assert looked(network.launcher).state == "ok"
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS")
    told = looked(network.launcher)
    assert (told.state, told.mend) == ("wrong", "set it to HOST:PORT of rank 0")


def given(address, rank=1):
    return {"coordinator": address, "processes": 2, "rank": rank}


def test_rank_0_is_tried_from_the_other_ranks(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        told = looked(network.launcher, given=given(address))
        assert (told.state, f"{address} refuses" in told.found) == ("warning", True)
        listener.listen()
        told = looked(network.launcher, given=given(address))
        assert (told.state, f"{address} answers" in told.found) == ("ok", True)

    def silent(address, seconds):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    told = looked(network.launcher, given=given("10.255.255.1:1234"))
    assert told.state == "warning"
    assert "10.255.255.1:1234 does not answer in 3 s: its host is down, or a firewall is between" in told.found


def test_a_name_for_this_host_alone_is_warned_of_where_there_are_others(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.0.1", 0))])
    assert looked(network.host, given={"asked": "none"}).state == "ok"
    assert looked(network.host, given=given("127.0.0.1:1234", 0)).state == "ok"
    assert looked(network.host, given=given("node0:1234", 0)).state == "warning"


def test_the_processes_are_given_as_to_train(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "ask", lambda *_: probe.NOTHING | {"problem": None})
    cli.main(["doctor", "--json", "--coordinator", "127.0.0.1:29411", "--processes", "2", "--rank", "0"])
    found = {one["check"]: one["found"] for one in json.loads(capsys.readouterr().out)["checks"]}
    assert found["launcher"].startswith("flags: rank 0 of 2, rank 0 at 127.0.0.1:29411")
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--json", "--cluster", "slurm"])
    assert "--cluster: 'slurm' is not allowed; its variables are not set" in capsys.readouterr().out


def test_a_host_whose_name_does_not_resolve_is_warned_of(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert looked(network.host).state == "warning"


def test_a_jax_that_does_not_start_is_told_and_everything_else_is_looked_at(monkeypatch, tmp_path, capsys):
    """As after a crash of a driver: the process that asks JAX gives no answer."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert stopped.value.code == 1
    states = {one["check"]: one for one in told["checks"]}
    assert states["devices"]["state"] == "wrong"
    assert "JAX does not start" in states["devices"]["found"]
    assert states["python"]["state"] == "ok"
    assert told["wrong"] == sum(one["state"] == "wrong" for one in told["checks"]) >= 1
    assert all(one["mend"] for one in told["checks"] if one["state"] != "ok")


def test_a_process_that_cannot_even_be_killed_is_left_behind(monkeypatch):
    until = threading.Event()
    monkeypatch.setattr(probe, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(probe, "ask", lambda *_: until.wait())
    told = probe.asked_in_time(Config(), 0.1)
    until.set()
    assert told["problem"] == "JAX does not start: no answer in 0.1 s, and no end"
    assert told["devices"] == []


def test_a_broken_home_no_network_and_other_devices_are_no_reason_to_fall(tmp_path):
    """The whole command, for the recipe that is given: 2 devices, and a run that its data do not allow."""
    environment = os.environ | {"HOME": "/proc/none", "XDG_CACHE_HOME": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    flags = ["--mesh.cpu-devices", "2", "--batch.0.global-batch", "2000"]
    command = [sys.executable, "-m", "jaxdp", "doctor", *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = " ".join(done.stdout.split())
    assert "ok devices 2 x cpu (cpu)" in lines
    assert "wrong plan batch.0.global_batch: 2000 is not allowed" in lines
    assert "-> give --batch.0.global-batch 1437 or less" in lines
    assert "warning cache /proc/none/.cache/jaxdp/programs/" in lines
    assert done.stdout.splitlines()[0] == "this machine, for the recipe digits"
    assert done.stdout.splitlines()[-1].startswith("1 wrong: plan")
    assert "\x1b" not in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_probe_of_a_recipe_knows_devices_and_bytes():
    from jaxdp import load_config

    told = probe.ask(load_config("digits", ["--model.depth", "18"]))
    assert told["problem"] is None
    assert [one["platform"] for one in told["devices"]] == ["cpu"] * 4
    assert told["state_bytes"] > 2 * 4 * 11_181_642  # parameters and velocity of ResNet-18 with ten classes
    assert told["host_bytes"] > 0


def test_the_summary_names_what_is_wrong():
    findings = Findings("disk")
    findings.wrong("full", "free space")
    assert summary([findings.finding()]) == "1 wrong: disk"
    assert summary([]) == "nothing is wrong"
