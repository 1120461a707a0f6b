"""Tests of jaxdp.trackers.client."""

import math

from jaxdp.trackers.client import RESULT, position, values

STEP = {"samples": 64, "step": 8, "loss": 0.5, "gradient_norm": None}
EVALUATION = {"samples": 64, "step": 8, "eval_accuracy": 0.75, "eval_loss": 1.5}


def test_positions_are_in_the_order_of_the_log():
    later = STEP | {"samples": 65}
    result = 3 * STEP["samples"] + RESULT
    assert position(STEP) < position(EVALUATION) < result < position(later)


def test_values_are_grouped_and_null_is_nan():
    of_step, of_evaluation = values(STEP), values(EVALUATION)
    assert math.isnan(of_step.pop("training/gradient_norm"))
    assert of_step == {"training/samples": 64, "training/step": 8, "training/loss": 0.5}
    assert of_evaluation == {
        "evaluation/samples": 64,
        "evaluation/step": 8,
        "evaluation/accuracy": 0.75,
        "evaluation/loss": 1.5,
    }


def test_values_leave_out_what_is_no_number():
    assert values(STEP | {"note": "x" * 10_000}).keys() == values(STEP).keys()
