"""Tests of jaxdp.checkpoint.replicas."""

from jaxdp.checkpoint.replicas import StateReport, rejection_reason

HOSTS = ["a", "b", "c"]


def report(checksum="1", *, diverged=(), finite=True, parts=None):
    return StateReport(
        diverged=list(diverged), finite=finite, checksum=checksum, part_checksums=parts or {}, error=None, bad_images={}
    )


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


def test_rejection_reason_of_shards_names_the_rank_whose_part_differs():
    """A mesh of three rows and two columns, one process for each device: rank 3, in row 1 and column 1, has another part 1.

    Rank 2 gathered that part from it, so that the checksums of the whole state differ on both.
    """
    parts = [{"0": "a"}, {"1": "b"}, {"0": "a"}, {"1": "wrong"}, {"0": "a"}, {"1": "b"}]
    wholes = ["ab", "ab", "awrong", "awrong", "ab", "ab"]
    reports = [report(whole, parts=part) for whole, part in zip(wholes, parts, strict=True)]
    reason = rejection_reason(8, reports, [f"host{rank}" for rank in range(6)])
    assert "at samples 8: rank 3 on host3 differs from the others" in reason
