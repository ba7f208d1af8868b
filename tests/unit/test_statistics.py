"""Intervals of means."""

from __future__ import annotations

import pytest

from headrace.statistics import interval95


@pytest.mark.parametrize(
    ("num_ones", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (1, 10, 0.0179, 0.4042), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (90, 100, 0.8256, 0.9448), (1, 1, 0.2065, 1.0)],
)
def test_rewards_of_0_and_1_have_wilsons_interval(num_ones: int, count: int, low: float, high: float) -> None:
    """Numbers of R's prop.test(num_ones, count, correct = FALSE)."""
    assert interval95([1.0] * num_ones + [0.0] * (count - num_ones)) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_other_rewards_have_the_normal_interval() -> None:
    assert interval95([0.0, 0.5, 1.0]) == (pytest.approx(0.5 - 1.96 * 0.5 / 3**0.5), pytest.approx(0.5 + 1.96 * 0.5 / 3**0.5))
    assert interval95([]) == (0.0, 0.0)
