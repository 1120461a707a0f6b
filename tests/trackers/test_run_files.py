"""Tests of jaxdp.trackers.run_files."""

import threading

import pytest

from jaxdp.trackers.run_files import TrackerState, exclusive, picture_path, pictures, run_facts
from jaxdp.validation import to_json


def test_identity_is_kept_for_a_target(tmp_path):
    identity = TrackerState(tmp_path, "wandb", "digits").identify()
    again = TrackerState(tmp_path, "wandb", "digits")
    assert (again.exists, again.identify()) == (True, identity)
    other = TrackerState(tmp_path, "wandb", "flowers")
    assert not other.exists
    assert other.identify() != identity


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"id": 5, "target": "digits"}', '{"target": "digits"}', "\0"])
def test_damaged_state_is_replaced(tmp_path, damaged):
    state = TrackerState(tmp_path, "wandb", "digits")
    state.identify()
    state.path.write_text(damaged)
    assert not TrackerState(tmp_path, "wandb", "digits").exists
    identity = TrackerState(tmp_path, "wandb", "digits").identify()
    assert TrackerState(tmp_path, "wandb", "digits").identify() == identity


def test_complete_is_stored(tmp_path):
    state = TrackerState(tmp_path, "wandb", "digits")
    state.identify()
    for complete in (True, False):
        state.set_complete(complete)
        assert TrackerState(tmp_path, "wandb", "digits").complete is complete


def test_two_processes_do_not_send_to_one_tracker_at_once(tmp_path):
    order = []

    def second():
        with exclusive(tmp_path, "wandb"):
            order.append("second")

    thread = threading.Thread(target=second)
    with exclusive(tmp_path, "wandb"), exclusive(tmp_path, "mlflow"):
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(120)
    assert order == ["first", "second"]


def test_run_facts_of_a_run_without_checkpoint_and_result(tiny, tmp_path):
    (tmp_path / "config.json").write_text(to_json(tiny))
    for samples in (1024, 64):
        picture_path(tmp_path, samples).parent.mkdir(exist_ok=True)
        picture_path(tmp_path, samples).touch()
    (tmp_path / "trackers/held_out-x.png").touch()
    assert list(pictures(tmp_path)) == [64, 1024]
    facts = run_facts(tmp_path)
    assert (facts.name, facts.checkpoint, facts.plot, facts.result) == ("tiny", None, None, {})
    assert facts.config["batch.0.global_batch"] == 8
    assert facts.directory == str(tmp_path)
