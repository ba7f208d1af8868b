"""Means and their intervals. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence

_QUANTILE = 1.96
"""97.5 % of the normal distribution."""


def mean_with_interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of its 95 % interval by the normal approximation); (0, 0) without values."""
    count = len(values)
    if count == 0:
        return 0.0, 0.0
    mean = math.fsum(values) / count
    if count == 1:
        return mean, 0.0
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, _QUANTILE * math.sqrt(variance / count)


def interval95(values: Sequence[float]) -> tuple[float, float]:
    """(low, high) of the 95 % interval of the values' mean; (0, 0) without values.

    Values that are all 0 or 1: Wilson's score interval, which stays inside [0, 1] and has a width also where all are alike (E. B. Wilson,
    "Probable inference, the law of succession, and statistical inference", JASA 22, 1927; L. D. Brown, T. T. Cai, A. DasGupta,
    "Interval estimation for a binomial proportion", Statistical Science 16, 2001, recommends it for small samples). Other values:
    the normal approximation.
    """
    mean, half_width = mean_with_interval(values)
    if not values or any(value not in (0.0, 1.0) for value in values):
        return mean - half_width, mean + half_width
    weight = _QUANTILE**2 / len(values)
    middle = (mean + weight / 2) / (1 + weight)
    reach = math.sqrt(mean * (1 - mean) * weight + weight**2 / 4) / (1 + weight)
    return max(0.0, middle - reach), min(1.0, middle + reach)
