"""Means and their intervals. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_with_interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of its 95 % interval by the normal approximation); (0, 0) without values."""
    count = len(values)
    if count == 0:
        return 0.0, 0.0
    mean = math.fsum(values) / count
    if count == 1:
        return mean, 0.0
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, 1.96 * math.sqrt(variance / count)
