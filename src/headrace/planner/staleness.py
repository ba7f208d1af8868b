"""How old the mean trained token is, in updates: closed forms, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from headrace.planner.distributions import Distribution
from headrace.planner.profile import Profile

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    in_flight: float
    """Updates published between a token's drawing and the end of its group."""
    in_pool: float
    """Updates published after that, until it is trained."""

    @property
    def mean(self) -> float:
        return self.in_flight + self.in_pool


def mean_staleness(
    *, step_seconds: float, learn_seconds: float, max_staleness: int, draw_to_end_seconds: float, group_seconds: float, resequencing: float, rate_ratio: float
) -> Staleness:  # fmt: skip
    """Of the mean trained token. Updates published in an interval of L seconds that ends when a batch is taken: L/step + u - 1/2.

    u = min(1, learn / step) is the learner's busy share: the last update came out learn seconds after the take before. With L half a
    step of assembly this is the in-queue staleness rho of Applied Compute (2026); the part before the pool is theirs without its
    throttle, C M / B = rollout x M / step, less the time before the token was drawn, since weights change in flight. Where the
    learner is the slower one the pool fills to the bound, and Little's law gives the time in it: (s + 1) B / rate in all.

    `draw_to_end_seconds`: from a token's drawing to the end of its group; `group_seconds`: from the group's start. `resequencing`:
    seconds that finished groups wait for older ones (oldest_first). `rate_ratio`: production / consumption.
    """
    busy = min(1.0, learn_seconds / step_seconds)
    before = draw_to_end_seconds / step_seconds
    waiting = 0.5 + resequencing / step_seconds
    if rate_ratio > 1.0:
        filled = max(waiting, max_staleness - group_seconds / step_seconds)
        # just above balance the pool has not filled for good: it drifts between empty and full
        waiting += (filled - waiting) * min(1.0, 10.0 * (rate_ratio - 1.0))
    pool = max(0.0, waiting + busy - 0.5)
    total = before + pool
    most = max_staleness * 1.0
    if total > most:  # what is older is not trained
        before, pool = before * most / total, pool * most / total
    return Staleness(in_flight=before, in_pool=pool)


def queue_drop_staleness(*, concurrency: float, batch: float, rho: float, tailness: float, queue_batches: float) -> Staleness:
    """Since a sample's start, FIFO that drops its oldest on overflow (Applied Compute, 3 Jul 2026; `rho` = sampler / trainer rate).

    In flight C M / (B max(1, rho)); in the queue rho below 1, else (2 q + rho - 1) / (2 rho).
    """
    before = concurrency * tailness / (batch * max(1.0, rho))
    inside = rho if rho < 1.0 else (2 * queue_batches + rho - 1) / (2 * rho)
    return Staleness(in_flight=before, in_pool=inside)


def prefetch_staleness(*, concurrency: float, batch: float, rho: float, queue: float, bound: float, prefetched: float = 1.0) -> Staleness:
    """Since a group's start, weights swapped in place, one batch fetched ahead (balance model of the miles study; all in groups).

    In flight C / (B max(1, rho)); below balance only the prefetched batch waits, above it the queue fills to K: + K / B; at most `bound`.
    """
    before = concurrency / (batch * max(1.0, rho))
    inside = prefetched + (queue / batch if rho > 1.0 else 0.0)
    total = min(before + inside, bound)
    before = min(before, total)
    return Staleness(in_flight=before, in_pool=total - before)


def resequencing_seconds(durations: Distribution, group_size: int, groups_per_second: float) -> float:
    """How long finished groups wait until every older one is finished, when groups start at an even rate and leave in order.

    A group leaves at max over k >= 0 of (D_k - k / rate), D_k durations of those that started k before it:
    P(it leaves within x) = product over k of F(x + k / rate)^G. Its mean less the group's own.
    """
    if groups_per_second <= 0 or durations.most <= 0 or durations.table_mean <= 0:
        return 0.0
    unit = durations.table_mean
    grid, logs, integral = _log_distribution(tuple((level, round(value / unit, 9)) for level, value in durations.quantiles))
    gap, cell = 1.0 / (groups_per_second * unit), float(grid[1] - grid[0])
    if grid[-1] / gap > _MANY:  # a sum over many close groups is an integral (Euler and Maclaurin)
        sums = integral / gap + logs / 2
    else:
        later = grid[:, None] + gap * np.arange(_MANY + 1)[None, :]
        sums = np.interp(later, grid, logs, right=0.0).sum(axis=1)
    leaves = np.exp(group_size * sums)
    return max(0.0, unit * (float((1.0 - leaves).sum()) * cell) - durations.expected_max(group_size))


_MANY = 40
_POINTS = 400


@lru_cache(maxsize=64)
def _log_distribution(table: tuple[tuple[float, float], ...]) -> tuple[Array, Array, Array]:
    """(x, log F(x), the integral of log F from x on) at cell centres up to the largest value."""
    levels, values = np.asarray([level for level, _ in table]), np.asarray([value for _, value in table])
    values = values + 1e-9 * np.arange(len(values))  # a step of the distribution, told apart
    cell = float(values[-1]) / _POINTS
    grid: Array = (np.arange(_POINTS, dtype=np.float64) + 0.5) * cell
    logs: Array = np.log(np.clip(np.interp(grid, values, levels), 1e-12, 1.0))
    integral: Array = np.cumsum(logs[::-1])[::-1] * cell - logs * cell / 2
    return grid, logs, integral


def draw_to_end(profile: Profile, group_factor: float) -> float:
    """Mean time from the drawing of a token to when its group may be trained / mean rollout seconds.

    Measured, or from independent members whose seconds go with their answers: a token's own rollout is long (it counts once for each
    of its tokens), its group ends with the longer of it and the others, and it was drawn halfway: E[A max(A, others)] / E[A]^2 -
    E[A^2] / (2 E[A]^2).
    """
    full = profile.group.seconds_tailness or profile.group.tailness
    measured = profile.group.draw_to_end
    if measured is None:
        values = profile.distributions.answer_tokens.stratified(64)
        mean = sum(values) / len(values)
        if mean <= 0:
            return 0.5
        together = 0.0
        for index, value in enumerate(values):
            below = ((index + 0.5) / 64) ** (profile.group.size - 1)
            longer = sum(values[k] * (((k + 1) / 64) ** (profile.group.size - 1) - (k / 64) ** (profile.group.size - 1)) for k in range(index + 1, 64))
            together += value * (value * below + longer)
        measured = together / 64 / mean**2 - sum(value**2 for value in values) / 64 / (2 * mean**2)
    return max(0.0, measured - (full - group_factor))
