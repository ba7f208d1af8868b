"""A distribution as a table of quantiles: lengths, steps and waits of rollouts, with their tails."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

GRID = (0.0, 0.005, 0.01, 0.02, *(round(0.05 * step, 2) for step in range(1, 19)), 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0)
"""Levels of the quantiles kept, closer towards the upper tail."""
_CLEAR_DRIFT = 3.0
"""Standard errors from 0; what is nearer counts as no drift."""


def _check_table(table: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    levels, values = [level for level, _ in table], [value for _, value in table]
    if len(table) < 2 or levels[0] != 0.0 or levels[-1] != 1.0:
        raise ValueError("quantiles begin at level 0 and end at level 1")
    if any(b <= a for a, b in itertools.pairwise(levels)) or any(b < a for a, b in itertools.pairwise(values)):
        raise ValueError("levels must rise and values must not fall")
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise ValueError("values are finite and not below 0")
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    mean: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    quantiles: Annotated[tuple[tuple[float, float], ...], AfterValidator(_check_table)]
    """(level 0 to 1, value), both ascending; between them values are interpolated."""
    drift_per_update: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """By how much the mean rose with each update of the run; 0 where that cannot be told from noise."""

    @classmethod
    def constant(cls, value: float) -> Distribution:
        return cls(mean=value, quantiles=((0.0, value), (1.0, value)))

    @classmethod
    def of(cls, values: Sequence[float], updates: Sequence[float] | None = None, groups: Sequence[int] | None = None) -> Distribution:
        """Of measured values; `updates`: at which policy version each began, for the drift. At least one value.

        `groups`: values of one task are alike, so that it is tasks that a drift must be clear of.
        """
        data = np.asarray(values, dtype=float)
        levels = np.asarray(GRID)
        # plotting positions (i - 0.5) / n, so that few values are not taken for a sharper distribution than they show
        positions = (np.arange(len(data)) + 0.5) / len(data)
        table = np.interp(levels, positions, np.sort(data)) if len(data) > 1 else np.full(len(levels), data[0])
        drift = 0.0
        if updates is not None:
            began = np.asarray(updates, dtype=float)
            drift = _drift(data, began) if groups is None else _drift(*_means(np.asarray(groups), data, began))
        return cls(mean=float(data.mean()), quantiles=tuple(zip(GRID, map(float, table), strict=True)), drift_per_update=drift)

    @classmethod
    def lognormal(cls, mean: float, deviation: float) -> Distribution:
        """With this mean and standard deviation, its tail cut at one in 10,000."""
        if mean <= 0 or deviation <= 0:
            return cls.constant(max(0.0, mean))
        sigma = math.sqrt(math.log1p((deviation / mean) ** 2))
        center = math.log(mean) - sigma * sigma / 2
        levels = [min(max(level, 1e-4), 1 - 1e-4) for level in GRID]
        values = [math.exp(center + sigma * _normal_quantile(level)) for level in levels]
        return cls(mean=mean, quantiles=tuple(zip(GRID, values, strict=True)))

    def quantile(self, level: float) -> float:
        """The inverse distribution function; given a uniform number, one draw."""
        table = self.quantiles
        upper = min(max(1, bisect.bisect_left(table, (level,))), len(table) - 1)
        (a, low), (b, high) = table[upper - 1], table[upper]
        return low + (high - low) * min(1.0, max(0.0, (level - a) / (b - a)))

    def share_above(self, value: float) -> float:
        """1 - F(value)."""
        table = self.quantiles
        if value < table[0][1]:
            return 1.0
        for (a, low), (b, high) in itertools.pairwise(table):
            if value < high:
                return 1.0 - (a + (b - a) * (value - low) / (high - low))
        return 0.0

    def stratified(self, count: int) -> list[float]:
        """`count` values that stand for as many draws: one from each of as many equally likely parts, ascending; the last is the expected largest."""
        values = [self.quantile((index + 0.5) / count) for index in range(count)]
        values[-1] = max(values[-1], self.expected_max(count))
        return values

    def expected_max(self, count: float) -> float:
        """E[largest of `count` draws], the integral of Q(u) d(u^count)."""
        total = 0.0
        for (a, low), (b, high) in zip(self.quantiles, self.quantiles[1:], strict=False):
            slope = (high - low) / (b - a)
            base = low - slope * a
            total += base * (b**count - a**count) + slope * count / (count + 1) * (b ** (count + 1) - a ** (count + 1))
        return total

    @property
    def table_mean(self) -> float:
        """Of what `quantile` draws."""
        return self.expected_max(1)

    @property
    def deviation(self) -> float:
        """Standard deviation of what `quantile` draws."""
        square = 0.0
        for (a, low), (b, high) in zip(self.quantiles, self.quantiles[1:], strict=False):
            square += (b - a) * (low * low + low * high + high * high) / 3
        return math.sqrt(max(0.0, square - self.table_mean**2))

    @property
    def most(self) -> float:
        return self.quantiles[-1][1]

    def scaled(self, factor: float) -> Distribution:
        """Every value times `factor`: for what-if."""
        return replace(
            self,
            mean=self.mean * factor,
            quantiles=tuple((level, value * factor) for level, value in self.quantiles),
            drift_per_update=self.drift_per_update * factor,
        )

    def capped(self, limit: float) -> Distribution:
        """No value over `limit`."""
        quantiles = tuple((level, min(value, limit)) for level, value in self.quantiles)
        cut = replace(self, quantiles=quantiles)
        return replace(cut, mean=min(self.mean, self.mean * cut.table_mean / self.table_mean if self.table_mean else 0.0))

    def tailness(self, group_size: int) -> float:
        """E[largest of a group] / E[one]."""
        return max(1.0, self.expected_max(group_size) / self.table_mean) if self.table_mean > 0 else 1.0


def _means(groups: np.ndarray[Any, Any], *columns: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Of each column, by group."""
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return [np.bincount(index, weights=column) / counts for column in columns]


def _drift(values: np.ndarray[Any, Any], updates: np.ndarray[Any, Any]) -> float:
    """Least-squares slope of the values over the updates, if it is clear of noise."""
    centered = updates - updates.mean()
    spread = float((centered**2).sum())
    if len(values) < 30 or spread == 0.0:
        return 0.0
    slope = float((centered * (values - values.mean())).sum()) / spread
    residual = values - values.mean() - slope * centered
    error = math.sqrt(float((residual**2).sum()) / (len(values) - 2) / spread)
    return slope if abs(slope) > _CLEAR_DRIFT * error else 0.0


def _normal_quantile(level: float) -> float:
    return NormalDist().inv_cdf(level)
