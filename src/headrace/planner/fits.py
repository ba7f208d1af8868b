"""Curves through few and noisy measurements: what a decode step and an update take.

Both minimise relative errors, give less weight to outliers (Huber), and keep every coefficient at or above 0, so that they
stay sensible beyond the points. What the points cannot tell apart is held near a stated prior.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

Array = np.ndarray[Any, np.dtype[np.float64]]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

SHARPNESSES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Tried for the blend; 1 is a plain sum, 6 nearly the larger of the two."""
_PRIOR_WEIGHT = 0.02
_HUBER = 1.5
"""Robust standard deviations beyond which a point's weight falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFit:
    """Seconds of one decode step with b running sequences of c context tokens each and x more tokens (observations, prompts):

        (floor^p + (per_sequence b)^p)^(1/p) + per_context_token b c + per_extra_token x

    A memory-bound floor (weights are read once a step) that blends into a compute-bound slope, plus reading the KV cache
    (Applied Compute, talk of Dec 2025: a roofline blended by a sigmoid; p = 1 is the latency t0 + c b of vLLM below its KV limit).
    """

    floor_seconds: NotNegative
    seconds_per_sequence: NotNegative
    seconds_per_context_token: NotNegative
    seconds_per_extra_token: NotNegative
    sharpness: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """p"""
    relative_error: NotNegative = 0.0
    """Standard deviation of measured / fitted; what an interval of a prediction starts from."""

    def seconds(self, running: float, context_tokens: float = 0.0, extra_tokens: float = 0.0) -> float:
        """`context_tokens`: of one sequence, mean."""
        if running <= 0:
            return 0.0
        p, work = self.sharpness, self.seconds_per_sequence * running
        largest = max(self.floor_seconds, work)
        if largest <= 0:
            return self.seconds_per_context_token * running * context_tokens + self.seconds_per_extra_token * extra_tokens
        # divided by the larger one, so that no power overflows
        blended: float = largest * ((self.floor_seconds / largest) ** p + (work / largest) ** p) ** (1 / p)
        return blended + self.seconds_per_context_token * running * context_tokens + self.seconds_per_extra_token * extra_tokens

    def scaled(self, factor: float) -> DecodeFit:
        """Every step takes so many times as long."""
        return replace(
            self,
            floor_seconds=self.floor_seconds * factor,
            seconds_per_sequence=self.seconds_per_sequence * factor,
            seconds_per_context_token=self.seconds_per_context_token * factor,
            seconds_per_extra_token=self.seconds_per_extra_token * factor,
        )

    def tokens_per_second(self, running: float, context_tokens: float = 0.0) -> float:
        seconds = self.seconds(running, context_tokens)
        return running / seconds if seconds > 0 else 0.0

    def smallest_running(self, tokens_per_second: float, context_tokens: float, most: float) -> float | None:
        """The least batch up to `most` that gives this rate; None: no batch does. (More sequences never give fewer tokens/s.)"""
        if self.tokens_per_second(most, context_tokens) < tokens_per_second:
            return None
        low, high = 0.0, most
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if self.tokens_per_second(middle, context_tokens) >= tokens_per_second else (middle, high)
        return high


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnFit:
    """Seconds of one update of N tokens (padding included) on R ranks with micro-batches of M tokens:

    overhead + per_micro_batch ceil(N / (R M)) + per_token N / R + per_exchange (R - 1) / R

    A constant rate a device does not hold: half the devices do not double the time (verl: 269.8 s on 32 devices, 313.8 s on 16).
    """

    overhead_seconds: NotNegative
    seconds_per_micro_batch: NotNegative
    seconds_per_token: NotNegative
    """Of one rank."""
    seconds_per_exchange: NotNegative
    """Gradients between ranks; an all-reduce moves (R - 1) / R of them (ring)."""
    relative_error: NotNegative = 0.0

    def seconds(self, ranks: int, micro_batch_tokens: int, tokens: float) -> float:
        share = tokens / ranks
        micro_batches = math.ceil(share / micro_batch_tokens) if tokens > 0 else 0
        exchange = self.seconds_per_exchange * (ranks - 1) / ranks
        return self.overhead_seconds + self.seconds_per_micro_batch * micro_batches + self.seconds_per_token * share + exchange

    def scaled(self, factor: float) -> LearnFit:
        """Every update takes so many times as long."""
        return replace(
            self,
            overhead_seconds=self.overhead_seconds * factor,
            seconds_per_micro_batch=self.seconds_per_micro_batch * factor,
            seconds_per_token=self.seconds_per_token * factor,
            seconds_per_exchange=self.seconds_per_exchange * factor,
        )


def fit_decode(points: Sequence[tuple[float, float, float, float, float]]) -> DecodeFit:
    """Of (running, context_tokens, extra tokens, seconds, steps); at least one point, all with seconds > 0.

    Levenberg-Marquardt on the logarithms of the four coefficients, for each sharpness. Prior: the floor is most of the shortest step,
    an extra token takes as long as a running one, reading contexts a tenth of a step.
    """
    data = np.asarray(points, dtype=float)
    running, context, extra, seconds, steps = data.T
    weights = np.sqrt(np.minimum(steps, 1000.0))
    weights /= weights.max()
    start = _first_guess(running, context, seconds)
    best: tuple[float, float, Array, Array] | None = None
    for sharpness in SHARPNESSES:
        parameters, residuals = _solve(start, sharpness, (running, context, extra, seconds), weights)
        cost = float((weights * _huber_cost(residuals)).sum())
        if best is None or cost < best[0] * 0.98:  # a sharper bend must pay
            best = cost, sharpness, parameters, residuals
    assert best is not None
    _, sharpness, parameters, residuals = best
    floor, slope, reading, more = (float(value) for value in np.exp(parameters))
    clipped = np.minimum(np.abs(residuals), 3 * _scale(residuals))
    spread = math.sqrt(float((weights * clipped**2).sum() / weights.sum()))
    return DecodeFit(
        floor_seconds=floor,
        seconds_per_sequence=slope,
        seconds_per_context_token=reading if context.any() else 0.0,
        seconds_per_extra_token=more,
        sharpness=sharpness,
        relative_error=spread,
    )


def fit_learn(points: Sequence[tuple[int, int, float, float]]) -> LearnFit:
    """Of (ranks, micro-batch tokens, tokens, seconds); at least one point. Where every point is alike, all time is per token."""
    data = np.asarray(points, dtype=float)
    ranks, micro, tokens, seconds = data.T
    share = tokens / ranks
    columns = np.stack([np.ones_like(share), np.ceil(share / micro), share, (ranks - 1) / ranks], axis=1)
    if share.max() < 1.05 * share.min():
        columns[:, :2] = 0.0  # nothing tells overhead from work
    relative = columns / seconds[:, None]
    weights = np.ones(len(seconds))
    theta = np.zeros(4)
    for _ in range(12):
        theta = _non_negative(relative * weights[:, None], weights)
        residuals = relative @ theta - 1.0
        weights = np.sqrt(_huber_weight(residuals))
    residuals = np.log(np.maximum(relative @ theta, 1e-9))
    spread = math.sqrt(float(np.mean(np.minimum(np.abs(residuals), 1.0) ** 2)))
    overhead, per_micro, per_token, exchange = map(float, theta)
    return LearnFit(
        overhead_seconds=overhead, seconds_per_micro_batch=per_micro, seconds_per_token=per_token, seconds_per_exchange=exchange, relative_error=spread
    )


def _first_guess(running: Array, context: Array, seconds: Array) -> Array:
    largest = int(np.argmax(running))
    floor = max(float(seconds.min()) * 0.8, 1e-9)
    slope = max(float(seconds[largest] / running[largest]) * 0.5, 1e-12)
    work = float(np.mean(running * context)) or 1.0
    return np.log([floor, slope, 0.1 * float(np.mean(seconds)) / work, slope])


def _predicted(parameters: Array, sharpness: float, running: Array, context: Array, extra: Array) -> Array:
    floor, slope, reading, more = np.exp(parameters)
    largest = np.maximum(floor, slope * running)
    blended = largest * ((floor / largest) ** sharpness + (slope * running / largest) ** sharpness) ** (1 / sharpness)
    result: Array = blended + reading * running * context + more * extra
    return result


def _solve(start: Array, sharpness: float, data: tuple[Array, Array, Array, Array], weights: Array) -> tuple[Array, Array]:
    """(log coefficients, log residuals of the points)."""
    running, context, extra, seconds = data
    logs = np.log(seconds)

    def residuals_at(parameters: Array) -> Array:
        fitted: Array = np.log(_predicted(parameters, sharpness, running, context, extra)) - logs
        return fitted

    def all_residuals(parameters: Array, robust: Array) -> Array:
        away = parameters - start
        prior = _PRIOR_WEIGHT * np.asarray([away[0], away[1], away[2], parameters[3] - parameters[1]])
        return np.concatenate([residuals_at(parameters) * np.sqrt(weights * robust), prior])

    parameters, damping = start.copy(), 1e-2
    for _ in range(60):
        robust = _huber_weight(residuals_at(parameters))
        current = all_residuals(parameters, robust)
        jacobian = np.stack([(all_residuals(parameters + step, robust) - current) / 1e-5 for step in 1e-5 * np.eye(4)], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ current
        step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), gradient)
        step = np.clip(step, -1.5, 1.5)
        if (all_residuals(parameters + step, robust) ** 2).sum() < (current**2).sum():
            parameters, damping = np.clip(parameters + step, -40.0, 10.0), max(damping / 3, 1e-7)
            if np.abs(step).max() < 1e-6:
                break
        else:
            damping *= 4
            if damping > 1e7:
                break
    return parameters, residuals_at(parameters)


def _scale(residuals: Array) -> float:
    """Robust standard deviation, at least 1 %."""
    return max(0.01, 1.4826 * float(np.median(np.abs(residuals))))


def _huber_weight(residuals: Array) -> Array:
    limit = _HUBER * _scale(residuals)
    result: Array = np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-12))
    return result


def _huber_cost(residuals: Array) -> Array:
    size = np.abs(residuals)
    limit = 0.05
    result: Array = np.where(size < limit, size**2, 2 * limit * size - limit**2)
    return result


def _non_negative(matrix: Array, target: Array) -> Array:
    """Least squares with every coefficient >= 0: the best of all subsets of columns whose own solution is. Few columns only."""
    count = matrix.shape[1]
    best, best_cost = np.zeros(count), float((target**2).sum())
    for chosen in range(1, 2**count):
        columns = [index for index in range(count) if chosen >> index & 1]
        solution, *_ = np.linalg.lstsq(matrix[:, columns], target, rcond=None)
        if (solution < 0).any():
            continue
        cost = float(((matrix[:, columns] @ solution - target) ** 2).sum())
        if cost < best_cost * (1 - 1e-3) - 1e-15:  # fewer columns win a tie: they come first in no particular order, so a gain must be real
            best, best_cost = np.zeros(count), cost
            best[columns] = solution
    return best
