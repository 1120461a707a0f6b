"""Runs a single check of `jaxdp doctor`."""

from jaxdp.doctor.check_result import CheckResult, ResultBuilder


def run_check(check, *args, **kwargs) -> CheckResult:
    """Run one check and return its result."""
    builder = ResultBuilder("check")
    check(builder, *args, **kwargs)
    return builder.build()
