"""Tests of jaxdp.checkpoint.replicas."""

from jaxdp.checkpoint.replicas import StateReport, rejection_reason

HOSTS = ["a", "b", "c"]


def report(checksum="1", *, diverged=(), finite=True):
    return StateReport(list(diverged), finite, checksum, None, {})


def test_rejection_reason_of_equal_finite_states_is_none():
    assert rejection_reason(8, [report(), report(), report(None)], HOSTS) is None


def test_rejection_reason_names_the_rank_whose_checksum_differs_from_the_majority():
    reason = rejection_reason(8, [report(), report("2"), report()], HOSTS)
    assert "at samples 8: rank 1 on b differs from the others" in reason


def test_rejection_reason_without_a_majority_names_all_ranks():
    reason = rejection_reason(8, [report("1"), report("2"), report("3")], HOSTS)
    assert "rank 0 on a and rank 1 on b and rank 2 on c differ from one another" in reason


def test_rejection_reason_prefers_diverged_devices_to_ranks():
    reason = rejection_reason(8, [report(), report("2", diverged=["gpu:3"]), report()], HOSTS)
    assert "gpu:3 differs from the others" in reason


def test_rejection_reason_of_infinite_parameters():
    assert "not finite at samples 8" in rejection_reason(8, [report(), report(finite=False), report()], HOSTS)
