"""TPU chips and their users in trees like those of a TPU VM, and the workers of a slice from a metadata server."""

import contextlib
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import jax
import pytest

from jaxdp.config import Mesh
from jaxdp.distributed import runtime, tpu
from jaxdp.distributed.launchers import Cluster, detect
from jaxdp.doctor import checks
from jaxdp.errors import ConfigError


@pytest.fixture
def machine(tmp_path):
    """machine(chips): a tree with these chips of v5e and a network card of Google. machine.process(...): adds a process."""

    def make(chips, driver="vfio-pci"):
        for number, device in enumerate([*["0x0063"] * chips, "0x0042"]):
            folder = tmp_path / f"sys/bus/pci/devices/0000:00:{number:02}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text("0x1ae0\n")
            (folder / "device").write_text(f"{device}\n")
            if driver:
                (tmp_path / driver).mkdir(exist_ok=True)
                (folder / "driver").symlink_to(tmp_path / driver)
        return tmp_path

    def process(pid, name, parent=1, opens="/dev/null"):
        (folder := tmp_path / f"proc/{pid}/fd").mkdir(parents=True)
        (folder / "7").symlink_to(opens)
        (folder.parent / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1\n")

    make.process = process
    return make


def test_chips_are_googles_devices_with_the_ids_of_tpus(machine, tmp_path):
    assert tpu.chip_drivers(tmp_path) == []
    assert tpu.chip_drivers(machine(4)) == ["vfio-pci"] * 4


def test_users_have_opened_a_chip_or_hold_the_lock_of_libtpu(machine, tmp_path):
    root = machine(1)
    machine.process(10, "python) (x", opens="/dev/vfio/0")
    machine.process(11, "train", opens="/dev/accel3")
    machine.process(12, "shell")
    machine.process(13, "child", parent=os.getpid(), opens="/dev/accel3")
    assert tpu.users(root) == "process 10 (python) (x), process 11 (train)"
    (root / "tmp").mkdir()
    (root / "tmp/libtpu_lockfile").touch()
    inode = (root / "tmp/libtpu_lockfile").stat().st_ino
    (root / "proc/locks").write_text(
        f"1: POSIX  ADVISORY  WRITE 12 fe:00:{inode} 0 EOF\n2: FLOCK ADVISORY WRITE 9 fe:00:1{inode} 0 EOF\n"
    )
    assert tpu.users(root) == "process 10 (python) (x), process 11 (train), process 12 (shell)"


@contextlib.contextmanager
def metadata_server(attributes):
    """A server of GCE's metadata; yields its address. Status 500 for the attribute None; bytes are the whole answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            if isinstance(raw := attributes.get(name), bytes):
                self.wfile.write(raw)
                return
            is_known = self.headers["Metadata-Flavor"] == "Google" and name in attributes
            self.send_response((500 if attributes[name] is None else 200) if is_known else 404)
            self.end_headers()
            self.wfile.write((attributes.get(name) or "").encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


POD = {"agent-worker-number": "2", "worker-network-endpoints": "w0:1:10.0.0.3,w1:2:10.0.0.4,w2:3:10.0.0.5"}
OF_TWO_SLICES = {
    "tpu-env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.9'\n"
}


@pytest.mark.parametrize(
    ("attributes", "environment", "chips", "cluster"),
    [
        (POD, {}, 4, Cluster("tpu", "10.0.0.3", 29_400, 2, 3)),
        (POD | {"worker-network-endpoints": "a,b,c"}, {}, 4, Cluster("tpu", "a", 29_400, 2, 3)),
        ({"agent-worker-number": "0", "worker-network-endpoints": "w0:1:10.0.0.3"}, {}, 4, None),
        ({}, {}, 4, None),  # no TPU VM
        ({"agent-worker-number": None}, {}, 4, None),
        (POD | {"agent-worker-number": b"no HTTP"}, {}, 4, None),
        (POD | {"worker-network-endpoints": b"HTTP/1.0 200 OK\r\n\r\n\xff"}, {}, 4, None),  # no text
        (POD | {"worker-network-endpoints": b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nw0"}, {}, 4, None),  # cut off
        (POD | {"worker-network-endpoints": ""}, {}, 4, None),
        (POD, {}, 0, None),
        (POD | {"worker-network-endpoints": "w0:1:10.0.0.3:8470"}, {}, 4, None),  # one worker, with its port
        (POD | OF_TWO_SLICES, {}, 4, Cluster("tpu", "10.0.0.9", 29_400, 3 + 2, 6)),
        (POD | OF_TWO_SLICES, {"MEGASCALE_NUM_SLICES": "1"}, 4, Cluster("tpu", "10.0.0.3", 29_400, 2, 3)),
        (POD, {"TPU_SKIP_MDS_QUERY": "1"}, 4, None),
        (POD, {"TPU_WORKER_HOSTNAMES": "localhost"}, 4, None),
        (POD, {"JAX_PLATFORMS": "cpu"}, 4, None),
    ],
)
def test_workers_of_a_tpu_vm_are_those_of_its_metadata(monkeypatch, attributes, environment, chips, cluster):
    monkeypatch.setattr(tpu, "chip_drivers", lambda: ["vfio-pci"] * chips)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with metadata_server(attributes) as address:
        monkeypatch.setenv("GCE_METADATA_IP", address)
        assert detect("auto", environment) == cluster


def test_a_start_elsewhere_does_not_import_urllib():
    code = "import sys, jaxdp.distributed.launchers as one; one.detect('auto', {}); print('urllib.request' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_machine_without_a_metadata_server_is_alone_unless_its_slice_has_other_workers(monkeypatch):
    monkeypatch.setattr(tpu, "chip_drivers", lambda: ["vfio-pci"])
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")
    assert detect("auto", {}) is None
    with pytest.raises(ConfigError, match="--cluster='tpu': the variables of this launcher are not set"):
        detect("tpu", {})
    devices = [SimpleNamespace(process_index=n // 4, platform="tpu") for n in range(8)]
    monkeypatch.setattr(runtime, "_jax_devices", lambda: devices)
    with pytest.raises(ConfigError) as error:
        runtime.start(Mesh())
    assert str(error.value) == (
        "processes=1: this is rank 0; in the TPU slice it is rank 0 of 2; start the same command on every worker "
        "(--worker=all), or set TPU_WORKER_HOSTNAMES and TPU_WORKER_ID"
    )
    monkeypatch.setattr(runtime, "_jax_devices", lambda: devices[:4])
    assert runtime.start(Mesh()) == devices[:4]


def test_a_tpu_that_jax_does_not_see_is_an_error_unless_the_cpu_is_requested(monkeypatch):
    monkeypatch.setattr(tpu, "chip_drivers", lambda: ["vfio-pci"])
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ConfigError) as error:
        runtime.start(Mesh(cpu_devices=4))
    assert str(error.value) == (
        "JAX_PLATFORMS: JAX does not see this machine's TPU; install jaxdp with its extra tpu (pip install -e '.[tpu]'), "
        "or set JAX_PLATFORMS=cpu to train on the CPU"
    )
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert len(runtime.start(Mesh(cpu_devices=4))) == 4


def test_a_tpu_that_does_not_start_names_the_process_that_uses_it(monkeypatch):
    def fails():
        raise RuntimeError("Unable to initialize backend 'tpu': ABORTED: the TPU is already in use\nmore")

    monkeypatch.setattr(jax, "devices", fails)
    monkeypatch.setattr(tpu, "chip_drivers", lambda: ["vfio-pci"])
    monkeypatch.setattr(tpu, "users", lambda: "process 10 (python)")
    with pytest.raises(ConfigError, match=r"already in use\); end process 10 \(python\), which uses the TPU$"):
        runtime.start(Mesh())


def test_users_are_found_while_processes_end(machine, monkeypatch):
    root = machine(1)
    machine.process(10, "python", opens="/dev/vfio/0")
    machine.process(11, "gone")
    scan = os.scandir

    def gone(path):
        if str(path).endswith("/11/fd"):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert tpu.users(root) == "process 10 (python)"


@pytest.mark.parametrize(
    ("chips", "driver", "libtpu", "status", "message"),
    [
        (4, "vfio-pci", "0.0.42.1", "ok", "4 TPU chips, driver vfio-pci; libtpu 0.0.42.1, jax 0.10.2"),
        (0, "", "0.0.42", "ok", "0 TPU chips, driver none; libtpu 0.0.42, jax 0.10.2"),
        (1, "", "0.0.42", "error", "1 TPU chip, driver none; a chip has no driver; libtpu 0.0.42, jax 0.10.2"),
        (1, "accel", None, "error", "1 TPU chip, driver accel; libtpu is not installed"),
        (
            1,
            "accel",
            "0.0.4",
            "error",
            "1 TPU chip, driver accel; libtpu 0.0.4 does not match jax 0.10.2, which needs libtpu==0.0.42.*",
        ),
        (
            1,
            "accel",
            "0.0.421",
            "error",
            "1 TPU chip, driver accel; libtpu 0.0.421 does not match jax 0.10.2, which needs libtpu==0.0.42.*",
        ),
    ],
)
def test_doctor_compares_chips_driver_and_libtpu(monkeypatch, machine, chips, driver, libtpu, status, message):
    monkeypatch.setattr(checks, "installed_version", {"jax": "0.10.2", "libtpu": libtpu}.get)
    monkeypatch.setattr(checks, "requires", lambda name: ["numpy>=2", 'libtpu==0.0.42.*; extra == "tpu"'])
    checks.check_tpu(result := checks.CheckResult("tpu"), machine(chips, driver))
    assert (result.status, result.message) == (status, message)


def test_doctor_names_a_process_that_uses_the_chips(monkeypatch, machine):
    monkeypatch.setattr(checks, "installed_version", {"jax": "0.10.2", "libtpu": "0.0.42"}.get)
    root = machine(1)
    machine.process(10, "python", opens="/dev/vfio/0")
    checks.check_tpu(result := checks.CheckResult("tpu"), root)
    assert (result.status, result.messages[-1]) == ("error", "process 10 (python) uses the TPU")
