import pytest

from jaxdp.distributed import messages
from jaxdp.distributed.failure import Failure
from jaxdp.distributed.status import Location


def test_failure_text_names_rank_host_activity_step_and_background_save():
    location = Location("step", 9, "the checkpoint of 64 samples")
    failure = Failure("killed", 1, rank=1, host="h", location=location)
    assert str(failure) == "rank 1 on h failed in step 9, saving the checkpoint of 64 samples: killed"
    fields = messages.validate(failure.to_message() | {}, messages.FROM_RANK_0)["failure"]
    assert Failure.from_message(fields) == failure


@pytest.mark.parametrize("code", [0, -1, 256, 2**70, True, False, None, "75", 75.0, [1]])
def test_failure_code_of_an_invalid_value_is_1(code):
    assert messages.failure_code(code) == 1


@pytest.mark.parametrize("code", [1, 2, 75, 137, 255])
def test_failure_code_of_a_valid_code_is_that_code(code):
    assert messages.failure_code(code) == code
