"""The state of a watched run, from its directory."""

import errno
import fcntl
import html
import os
import re
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.report import write_result, write_run
from helpers.watch import append, training_record

from jaxdp import Stopped
from jaxdp.config import Data, Optimizer, Stop
from jaxdp.errors import ConfigError
from jaxdp.loggers.events import EventLog
from jaxdp.report import follow, run_history
from jaxdp.report.cards import card as card_of
from jaxdp.report.cards import messages_html
from jaxdp.report.follow import WatchedRun
from jaxdp.setup import run_dir
from jaxdp.training.callback import Callback, Callbacks


def card(run):
    run.refresh()
    return card_of(run.seen())


def status(run):
    return card(run).status


def test_run_with_early_stopping_says_so_while_it_trains_and_why_it_ended(tmp_path):
    path = write_run(tmp_path / "run", stop=Stop("eval_loss", patience=3))
    append(path, *(training_record(step) for step in range(2, 6)))
    run = WatchedRun(path, "run")
    with run_dir.lock_run_dir(path):
        assert re.fullmatch(r"about [\d:]+, unless it stops early", card(run).facts["remaining"])
    write_result(path, stopped_early=True, stop_reason="eval_loss did not improve for 3 evaluations", best_samples=2000)
    assert status(run) == "finished early: eval_loss did not improve for 3 evaluations"
    assert (card(run).kind, card(run).percent) == ("finished", 100)


def age(path, seconds):
    """Let a run have written its log so many seconds ago."""
    moment = time.time() - seconds
    os.utime(path / "metrics.jsonl", (moment, moment))


def test_run_is_followed_from_its_beginning_to_its_end(tmp_path):
    path = tmp_path / "run"
    run = WatchedRun(path, "run")
    assert status(run) == "waiting for a run in this directory"
    path.mkdir()
    assert status(run) == "waiting for a run in this directory"
    write_run(path)
    (path / "metrics.jsonl").unlink()
    with run_dir.lock_run_dir(path):
        assert status(run) == "starting"
        append(path, training_record(1))
        assert status(run) == "training"
        assert run.history.records[-1]["step"] == 1
    assert status(run) == "killed, or its process was lost, last log line less than a minute ago"
    write_result(path)
    assert status(run) == "finished"
    shutil.rmtree(path)
    assert status(run) == "waiting for a run in this directory"


def test_run_that_is_killed_or_silent_says_when_it_last_wrote(tmp_path):
    run = WatchedRun(write_run(tmp_path), "run")
    for seconds, ago in ((100, "1 minute ago"), (601, "10 minutes ago"), (7200, "2 hours ago"), (3 * 86_400, "3 days ago")):
        age(tmp_path, seconds)
        assert status(run) == f"killed, or its process was lost, last log line {ago}"
    with run_dir.lock_run_dir(tmp_path):
        age(tmp_path, 500)
        assert status(run) == "training"
        age(tmp_path, 1000)
        assert status(run) == "training, last log line 16 minutes ago"


def test_killed_run_stands_out_and_gives_the_command_that_continues_it_from_any_directory(tmp_path, monkeypatch):
    path = write_run(tmp_path / "my run")
    monkeypatch.chdir(tmp_path)
    found = card(WatchedRun(Path("my run"), "run"))
    assert (found.kind, found.facts["epoch"]) == ("killed", "7.00 of 7")  # the last step is beyond the end
    text = html.unescape(re.sub("<.*?>", "", found.hint))
    assert text.endswith(f"jaxdp train --config '{path}/config.json' --workdir '{path}'")


def test_command_of_a_run_with_own_parts_or_callbacks_is_not_given_as_its_config_has_none(tmp_path):
    changes = [{"data": Data(source="my_images")}, {"optimizer": Optimizer(name="my_rule")}, {}]
    runs = [write_run(tmp_path / str(number), **own) for number, own in enumerate(changes)]
    with closing(EventLog(runs[-1])) as log:
        log.on_start(SimpleNamespace(callbacks=Callbacks([], [Callback()])))
    for path in runs:
        assert card(WatchedRun(path, "run")).hint == (
            "To continue from its beginning, as it has saved no checkpoint, repeat its command."
        )


def test_run_of_another_machine_is_not_said_to_be_killed(tmp_path, monkeypatch):
    """Its file system may not share locks between machines."""
    run = WatchedRun(write_run(tmp_path), "run")
    age(tmp_path, 7200)
    monkeypatch.setattr(run_history.socket, "gethostname", lambda: "another")
    found = card(run)
    assert (found.status, found.kind, found.hint) == ("not running here, last log line 2 hours ago", "unknown", "")


def test_end_of_a_session_is_shown_until_the_next_begins(tmp_path):
    write_run(tmp_path)
    run = WatchedRun(tmp_path, "run")
    with pytest.raises(Stopped), EventLog(tmp_path).session(Stopped):
        raise Stopped("saved")
    assert status(run).startswith("stopped, last log line")
    with pytest.raises(ValueError, match="boom"), EventLog(tmp_path).session(Stopped):
        raise ValueError("boom <b>")
    assert status(run).startswith("failed, last log line less than a minute ago: boom <b>")
    with run_dir.lock_run_dir(tmp_path):
        assert status(run) == "training"


def test_log_that_grows_without_a_lock_is_of_another_machine(tmp_path, monkeypatch):
    run = WatchedRun(write_run(tmp_path), "run")
    assert status(run).startswith("killed")
    append(tmp_path, training_record(1))
    assert status(run) == "training"
    monkeypatch.setattr(follow, "UNLOCKED_GROWTH_SECONDS", 0.0)
    assert status(run).startswith("killed")


def test_last_lines_of_a_process_that_ends_are_not_of_another_machine(tmp_path):
    run = WatchedRun(write_run(tmp_path), "run")
    with run_dir.lock_run_dir(tmp_path):
        assert status(run) == "training"
        append(tmp_path, training_record(1))
    assert status(run).startswith("killed")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[" * 100_000),
        ("result.json", '{"accuracy": 1}'),
        ("metrics.jsonl", None),
    ],
)
def test_damaged_directory_is_shown_as_such_until_it_is_mended(tmp_path, name, content):
    write_run(tmp_path)
    run, path = WatchedRun(tmp_path, "run"), tmp_path / name
    before = path.read_text() if path.exists() else None
    path.unlink(missing_ok=True)
    path.mkdir() if content is None else path.write_text(content)
    assert re.match(rf"its {re.escape(name)} (cannot be read|is damaged)", status(run))
    assert card(run).kind == "failed"
    path.rmdir() if content is None else path.unlink()
    if before is not None:
        path.write_text(before)
    assert status(run).startswith("killed")


def test_problem_of_the_moment_passes(tmp_path, monkeypatch):
    run = WatchedRun(write_run(tmp_path), "run")

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(follow, "read_directory", fail)
        assert status(run) == status(run) == "cannot be read (Input/output error)"
    assert status(run).startswith("killed")
    monkeypatch.setattr(follow, "read_directory", None)
    assert status(run).startswith("killed")  # an unchanged directory is not read again


def test_watching_never_keeps_a_run_from_starting(tmp_path):
    """Many read the lock, which each holds for a moment; a run that trains still keeps others away."""
    write_run(tmp_path)
    (tmp_path / ".lock").touch()
    stop = threading.Event()

    def look():
        while not stop.is_set():
            run_dir.in_use(tmp_path)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            with run_dir.lock_run_dir(tmp_path):
                pass
        with open(tmp_path / ".lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(ConfigError, match="another process is training in it"), run_dir.lock_run_dir(tmp_path):
                pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_watching_writes_nothing(tmp_path):
    write_run(tmp_path / "run")
    append(tmp_path / "run", training_record(1))
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "run").iterdir()}
    os.chmod(tmp_path / "run", 0o555)
    status(WatchedRun(tmp_path / "run", "run"))
    os.chmod(tmp_path / "run", 0o755)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "run").iterdir()} == before


def test_messages_that_differ_in_numbers_are_shown_once_and_ends_of_sessions_each(tmp_path):
    run = write_run(tmp_path / "run")
    with closing(EventLog(run)) as log:
        for number in range(20):
            log.write("message", chr(ord("a") + number))
        for samples in (100, 200, 200):
            log.write("message", f"resuming from {run}/checkpoints/{samples}: epoch 1.00, step {samples}")
            log.write("message", f"step {samples} took 9 s")
            log.write("stopped", f"stopped by SIGTERM after step {samples + 100}")
    watched = WatchedRun(run, "run")
    watched.refresh()
    text = messages_html([watched.seen()])
    found = [re.sub(r"<.*?>", "", item).rpartition("/")[2] for item in re.findall(r"<li>(.*?)</li>", text)]
    assert found == [
        "stopped by SIGTERM after step 300 (2 times)",
        "step 200 took 9 s (3 times)",
        "200: epoch 1.00, step 200 (2 times)",
        "stopped by SIGTERM after step 200",
        "100: epoch 1.00, step 100",
        *"tsrqponmlkjihgf",
    ]
    assert f"Earlier messages are in {run}/events.jsonl." in text
