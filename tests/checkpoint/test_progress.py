"""Position and requests of a run: what is counted, and after which step a request takes effect."""

import dataclasses
import itertools

import pytest
from pydantic import TypeAdapter, ValidationError

from jaxdp.checkpoint.progress import Count, Progress

REQUESTS = [steps for length in range(4) for steps in itertools.product((2, 3, 4), repeat=length)]


@pytest.mark.parametrize("request_name", ["evaluate_after", "stop_after"])
def test_of_all_requests_the_earliest_step_and_the_first_reason_count(request_name):
    """Also after an evaluation that has met an earlier request. A request is due at its step and at later ones."""
    for steps, at in itertools.product(REQUESTS, range(6)):
        progress = Progress(steps=at, evaluation_step=1, stop_step=1)
        for number, step in enumerate(steps):
            getattr(progress, request_name)(step, *[f"reason {number}"][: request_name == "stop_after"])
        is_due = bool(steps) and at >= min(steps)
        is_stop = request_name == "stop_after"
        assert (progress.evaluates_now, progress.ends_now) == (is_due and not is_stop, is_due and is_stop), (steps, at)
        assert progress.stop_reason == ("reason 0" if is_stop and steps else None)


def test_steps_and_seconds_add_up_from_nothing_in_the_first_session():
    progress = Progress()
    assert {name: value for name, value in dataclasses.asdict(progress).items() if value} == {"sessions": 1}
    activities = [name.removesuffix("_seconds") for name in vars(progress) if name.endswith("_seconds")]
    activities = [name for name in activities if name not in ("wall", "first_step")]
    for number, activity in enumerate(activities * 2):
        progress.add_seconds(activity, number)
    assert [vars(progress)[f"{name}_seconds"] for name in activities] == [6 + 2 * n for n in range(len(activities))]
    assert len(activities) == 6
    for images in (8, 8, 4):
        progress.finish_step(images)
    assert progress.position(examples=16) == {"step": 3, "samples": 20, "epoch": 1.25}


def test_counters_are_those_of_64_bits_and_other_fields_are_refused():
    counters = [field.name for field in dataclasses.fields(Progress) if field.type in (Count, Count | None)]
    assert len(counters) == 11
    read = TypeAdapter(Progress).validate_python
    for name in counters:
        assert [getattr(read({name: value}), name) for value in (0, 2**63 - 1)] == [0, 2**63 - 1]
        for value in (-1, 2**63, 0.5):
            with pytest.raises(ValidationError, match=name):
                read({name: value})
    position = {"step": 1.0, "samples": 2.0, "epoch": 0.5}
    assert read({"best": position | {"eval_loss": 1.0}}).best == position | {"eval_loss": 1.0}
    for bad in ({"unknown": 1}, {"retained": [-1]}, *({"best": position | {name: "x"}} for name in position)):
        with pytest.raises(ValidationError):
            read(bad)
    for name in position:
        with pytest.raises(ValidationError, match=f"lacks {name}"):
            read({"last_evaluation": {key: value for key, value in position.items() if key != name}})
