"""Checks before a save that all processes hold the same finite state."""

from dataclasses import dataclass

from jaxdp.checkpoint.checksums import minority


@dataclass(frozen=True)
class StateReport:
    """One process's view of the state to save, exchanged as JSON.

    diverged: names of its devices whose parameters differ from the majority. finite: no parameter is NaN or infinite. checksum:
    of all arrays; None if it could not be computed. part_checksums: of sharded arrays, by the part that its devices hold.
    error: why this process cannot save. bad_images: name -> reason of images that this process skipped.
    """

    diverged: list[str]
    finite: bool
    checksum: str | None
    part_checksums: dict[str, str]
    error: str | None
    bad_images: dict[str, str]


def rejection_reason(samples: int, reports: list[StateReport], hosts: list[str]) -> str | None:
    """Why the state must not be saved; None if it may. reports and hosts: one for each process, by rank."""
    diverged = [name for report in reports for name in report.diverged]
    checksums = {rank: report.checksum for rank, report in enumerate(reports) if report.checksum}
    if not diverged and len(set(checksums.values())) > 1:
        diverged = [f"rank {rank} on {hosts[rank]}" for rank in _diverged_ranks(reports) or minority(checksums)]
    if diverged:
        detail = "differs from the others" if len(diverged) == 1 else "differ from one another"
        return (
            f"the devices do not hold the same parameters at samples {samples}: {' and '.join(diverged)} {detail}; no "
            "checkpoint was saved; check the memory and the link of these devices"
        )
    if not all(report.finite for report in reports):
        return f"the parameters are not finite at samples {samples}; no checkpoint was saved"
    return None


def _diverged_ranks(reports: list[StateReport]) -> list[int]:
    """The ranks that hold another value of a part of the sharded arrays than most of the ranks with the same part."""
    by_part: dict[str, dict[int, str]] = {}
    for rank, report in enumerate(reports):
        for part, checksum in report.part_checksums.items():
            by_part.setdefault(part, {})[rank] = checksum
    differing = [checksums for checksums in by_part.values() if len(set(checksums.values())) > 1]
    return sorted({rank for checksums in differing for rank in minority(checksums)})
