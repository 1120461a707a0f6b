"""Runs read from their directories, and the parts of their wall time."""

from contextlib import closing
from dataclasses import replace

import pytest
from helpers.report import write_result, write_run

from jaxdp.cli import main
from jaxdp.cloud.lease import Lease
from jaxdp.cloud.location import Location, open_location
from jaxdp.loggers.events import EventLog
from jaxdp.report.cards import Seen, card
from jaxdp.report.run_history import read, read_all


def test_read_all_with_equal_directory_names_labels_runs_by_their_paths(tmp_path):
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "run")
    runs = read_all([tmp_path / "x/run", tmp_path / "y/run"])
    assert [run.label for run in runs] == [str(tmp_path / "x/run"), str(tmp_path / "y/run")]


def test_seconds_of_a_finished_run_add_up_to_its_wall_time(tmp_path):
    run = write_run(tmp_path)
    assert read(run).seconds() == {}
    write_result(run)
    seconds = {"input": 1.5, "steps": 8.5, "evaluation": 3.0, "saving": 0.5, "compilation": 4.0, "rest": 2.5}
    assert read(run).seconds() == seconds


def test_status_of_a_run_at_a_url_is_that_of_its_last_event(tmp_path):
    run = write_run(tmp_path / "run")
    with closing(EventLog(run)) as log:
        log.write("stopped", "stopped by SIGTERM after step 9")
    history = read(f"file://{run}")
    assert history.status == "stopped"
    assert card(Seen("run", history)).hint.endswith(", repeat its command.")


def test_run_at_a_url_is_killed_once_its_holder_no_longer_renews_the_lease(tmp_path):
    """On a machine that is not this one, and whose last event says nothing of its end."""
    run = write_run(tmp_path / "run")
    (run / "events.jsonl").write_text('{"event": "start", "host": "another", "text": ""}\n')
    lease = Lease.acquire(open_location(f"file://{run}", "WORKDIR"), 4.0, adopt=lambda _: [])
    assert read(f"file://{run}").status == "running"
    lease.abandon()
    (run / lease.record.name).write_bytes(replace(lease.record, seconds=0.4).to_bytes())
    assert read(f"file://{run}").status == "killed"
    lease.release({})
    assert read(f"file://{run}").status == "unknown"


def test_run_at_a_url_is_read_under_one_lease(tmp_path, monkeypatch):
    """Its files and checkpoints belong to the lease, which also shows whether it is trained."""
    run, sizes, folders = write_run(tmp_path / "run"), Location.sizes, []
    Lease.acquire(open_location(f"file://{run}", "WORKDIR"), 4.0, adopt=lambda _: []).release({})
    monkeypatch.setattr(Location, "sizes", lambda place, folder: folders.append(folder) or sizes(place, folder))
    read(f"file://{run}")
    assert folders.count(".lease") == 1


@pytest.mark.parametrize("place", ["directory", "url"])
def test_run_with_a_damaged_result_is_read_without_it_as_one_line_says(tmp_path, capsys, place):
    run = write_run(tmp_path / "run")
    intact = read(run)
    (run / "result.json").write_text('{"accuracy": 1}')
    where = str(run) if place == "directory" else f"file://{run}"
    history = read(where)
    assert capsys.readouterr().err == f"jaxdp: {where}: its result.json is damaged; the run is shown without it\n"
    assert (history.records, history.result, history.status) == (intact.records, intact.result, "unknown")
    for folder in ("run", "other"):
        write_run(tmp_path / folder)
    main.main(["report", where, str(tmp_path / "other"), "--no-html"])
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), err.count("\n")) == (2, 1)
