import json
import threading
from dataclasses import asdict

import pytest

from jaxdp.distributed import messages, stack_traces
from jaxdp.distributed.status import Heartbeat, ProcessStatus

HEARTBEAT = json.loads(json.dumps(asdict(ProcessStatus().heartbeat())))


def validated(heartbeat):
    message = {"heartbeat": heartbeat, "steps": [], "ping": 1.0}
    return messages.validate(message, messages.TO_RANK_0)["heartbeat"]


def test_validate_truncates_text_of_a_heartbeat():
    heartbeat = Heartbeat.from_message(validated(HEARTBEAT | {"detail": "x" * 9999 + "\x1b"}))
    assert len(heartbeat.detail) < 9999


@pytest.mark.parametrize(
    ("field", "value"),
    [("position", [1]), ("idle_seconds", "no"), ("typical_seconds", []), ("step", {}), ("idle_seconds", float("nan"))],
)
def test_validate_of_a_heartbeat_with_a_wrong_type_raises(field, value):
    with pytest.raises(messages.InvalidMessage, match=field):
        validated(HEARTBEAT | {field: value})


def test_validate_of_an_empty_heartbeat_raises():
    with pytest.raises(messages.InvalidMessage):
        validated({})


def test_validate_accepts_captured_stacks_and_rejects_too_many_or_malformed_ones():
    stacks = []
    thread = threading.Thread(target=lambda: stacks.extend(stack_traces.capture(threading.main_thread().ident)))
    thread.start()
    thread.join()
    assert messages.validate({"stacks": stacks}, messages.TO_RANK_0) == {"stacks": stacks}
    for invalid in (stacks * 99, [{"name": "x"}], [{"name": "x", "frames": ["f"] * 9999, "waits_for": ""}]):
        with pytest.raises(messages.InvalidMessage):
            messages.validate({"stacks": invalid}, messages.TO_RANK_0)
