"""Median, 95th percentile and maximum of positive numbers, followed one by one in constant memory."""

from __future__ import annotations

import math
from collections import Counter

_STEP = math.log(1.02)


class Spread:
    """A histogram over the logarithm: quantiles are right within 1 %, the maximum exactly."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._number = 0
        self._largest = 0.0

    def add(self, value: float) -> None:
        """value > 0"""
        self._counts[round(math.log(value) / _STEP)] += 1
        self._number += 1
        self._largest = max(self._largest, value)

    def quantile(self, fraction: float) -> float:
        """The smallest value that so many are not above. Needs a value."""
        left = math.ceil(fraction * self._number)
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                return min(math.exp(place * _STEP), self._largest)
        return self._largest

    def result(self) -> dict[str, float] | None:
        """None: no value."""
        return {"median": self.quantile(0.5), "p95": self.quantile(0.95), "max": self._largest} if self._number else None
