"""Confidence intervals compared with SciPy's and with a published table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from jaxdp.inference.interval import wilson_interval


@given(st.integers(1, 200_000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_wilson_interval_equals_scipy(counts):
    successes, total = counts
    expected = binomtest(successes, total).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes, total) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("successes", "total", "interval"), [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611))]
)
def test_wilson_interval_equals_published_values(successes, total, interval):
    """Newcombe, "Two-sided confidence intervals for the single proportion", Stat. Med. 17 (1998), Table I, method 3."""
    assert wilson_interval(successes, total) == pytest.approx(interval, abs=5e-5)


def test_interval_of_none_or_all_touches_the_bound():
    assert wilson_interval(0, 7)[0] == 0
    assert wilson_interval(7, 7)[1] == 1
