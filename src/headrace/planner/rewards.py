"""Which groups carry a signal: rewards of two values, as log odds that differ between groups, go with length and rise with updates.

A group whose members all succeed, or all fail, teaches nothing and is filtered: the learner has fewer tokens, a batch may hold none at all
and cost its rollouts without an update, and what is trained are the groups of middling odds, which may be the longer and older ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

Array = np.ndarray[Any, np.dtype[np.float64]]
Line = Mapping[str, Any]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_NODES = 15
_LEAST_GROUPS = 24
_CLEAR_DRIFT = 3.0
"""Standard errors from 0; what is nearer counts as no drift."""
_PRIOR = (4.0, 4.0, 2.0, 1.5)
"""Standard deviations, around 0, of the middle, the drift over the run, the effect of length and the logarithm of the spread: what a run
of equal rewards leaves open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Of one rollout, of two values: the log odds of the larger one are log_odds + per_length z + spread g + drift, z the normal score of its
    group's length, g a normal number of its group (a logistic regression with a random intercept)."""

    log_odds: Finite
    """In the middle of the run that was measured."""
    per_length: Finite
    """For each standard score of length."""
    spread: NotNegative
    log_odds_per_update: Finite = 0.0
    """0 where it cannot be told from noise."""
    signal_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of the measured run's groups, those of unequal rewards: what its rise came from."""
    padding: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Learner tokens, padding included / tokens of the trajectories that it was given."""
    no_signal: Literal["filter", "refill", "train"] = "filter"
    """What the measured run did with groups of equal rewards."""

    def chance(self, length_score: float, group_score: float, rise: float) -> float:
        """Of success; `rise`: of the log odds since those of the middle."""
        odds = self.log_odds + self.per_length * length_score + self.spread * group_score + rise
        return 1.0 / (1.0 + math.exp(-max(-40.0, min(40.0, odds))))

    def at(self, updates: float) -> Rewards:
        """As it is so many updates after the middle."""
        return replace(self, log_odds=self.log_odds + self.log_odds_per_update * updates)


class Progress:
    """Log odds by version, of a run of its own batch: they rise by what carries a signal, and no further where nothing does.

    A rise is taken to come from trajectories with signal, wherever they are: as long as noise is most of a gradient, twice the batch is worth
    twice the step (McCandlish et al., arXiv 1812.06162, below the critical batch size).
    """

    def __init__(self, rewards: Rewards, *, group_size: int, batch_ratio: float = 1.0) -> None:
        """`batch_ratio`: trajectories of a batch / those of the measured run's."""
        self._rewards, self._size = rewards, group_size
        self._step = rewards.log_odds_per_update * batch_ratio / max(rewards.signal_share, 0.05)
        self._rise = [0.0]

    def rise(self, version: int) -> float:
        """Since version 0."""
        while self._step and len(self._rise) <= version:
            odds = self._rewards.log_odds + self._rise[-1]
            self._rise.append(self._rise[-1] + self._step * share_with_signal(replace(self._rewards, log_odds=odds), self._size))
        return self._rise[version] if self._step else 0.0


def share_with_signal(rewards: Rewards, group_size: int) -> float:
    """Of groups of so many members, those of unequal rewards: 1 - p^G - (1 - p)^G, mean over groups."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    spread = math.hypot(rewards.spread, rewards.per_length)
    chances = 1.0 / (1.0 + np.exp(-np.clip(rewards.log_odds + spread * nodes, -40.0, 40.0)))
    return float((weights / weights.sum()) @ (1.0 - chances**group_size - (1.0 - chances) ** group_size))


def fit_rewards(groups: Sequence[Sequence[Line]], *, padding: float = 1.0, no_signal: str = "filter") -> Rewards | None:
    """Of whole groups of rollout_finished lines. None where rewards have more than two values (then hardly any group is without signal),
    or groups are few or of one member.

    The marginal likelihood over g by Gauss-Hermite quadrature, its largest value by Newton's method.
    """
    values = {float(line["reward"]) for group in groups for line in group}
    if len(groups) < _LEAST_GROUPS or len(values) > 2 or max(map(len, groups)) < 2:
        return None
    top = max(values)
    wins = np.asarray([sum(float(line["reward"]) == top for line in group) for group in groups], dtype=float)
    if len(values) == 1:
        wins *= top > 0  # all alike: solved, or never
    sizes = np.asarray([len(group) for group in groups], dtype=float)
    began = np.asarray([np.mean([line["versions"][0] if line["versions"] else 0.0 for line in group]) for group in groups])
    lengths = np.asarray([np.mean([line["tokens"] for line in group]) for group in groups])
    span = max(float(began.max() - began.min()), 1.0)
    columns = np.stack([np.ones_like(began), (began - began.mean()) / span, _scores(lengths)], axis=1)
    theta, errors = _largest(columns, wins, sizes)
    if abs(theta[1]) < _CLEAR_DRIFT * errors[1]:
        columns[:, 1] = 0.0
        theta, _ = _largest(columns, wins, sizes)
        theta[1] = 0.0
    with_signal = sum(len({float(line["reward"]) for line in group}) > 1 for group in groups)
    kind: Any = no_signal
    return Rewards(
        log_odds=float(theta[0]),
        log_odds_per_update=float(theta[1] / span),
        per_length=float(theta[2]),
        spread=float(math.exp(theta[3])),
        signal_share=with_signal / len(groups),
        padding=padding,
        no_signal=kind,
    )


def _scores(lengths: Array) -> Array:
    """Normal scores; equal lengths have the same."""
    _, index, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    middles = (np.cumsum(counts) - counts / 2) / len(lengths)
    found: Array = np.asarray([NormalDist().inv_cdf(float(middle)) for middle in middles])[index]
    return found


def _largest(columns: Array, wins: Array, sizes: Array) -> tuple[Array, Array]:
    """(parameters, their standard errors), the last one the logarithm of the spread."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    logs = np.log(weights / weights.sum())
    widths = np.asarray(_PRIOR)

    def cost(theta: Array) -> float:
        odds = np.clip((columns @ theta[:3])[:, None] + math.exp(theta[3]) * nodes[None, :], -40.0, 40.0)
        each = logs[None, :] + wins[:, None] * odds - sizes[:, None] * np.logaddexp(0.0, odds)
        most = each.max(axis=1)
        likelihood = (most + np.log(np.exp(each - most[:, None]).sum(axis=1))).sum()
        return float(-likelihood + 0.5 * ((theta / widths) ** 2).sum())

    theta, step = np.zeros(4), 1e-3
    unit = step * np.eye(4)
    hessian = np.eye(4)
    for _ in range(60):
        now = cost(theta)
        up, down = [cost(theta + each) for each in unit], [cost(theta - each) for each in unit]
        gradient = np.asarray([(a - b) / (2 * step) for a, b in zip(up, down, strict=True)])
        for i in range(4):
            for j in range(i + 1):
                both = (up[i] - 2 * now + down[i]) if i == j else (cost(theta + unit[i] + unit[j]) - up[i] - up[j] + now)
                hessian[i, j] = hessian[j, i] = both / step**2
        values, vectors = np.linalg.eigh(hessian)
        move = -vectors @ ((vectors.T @ gradient) / np.maximum(np.abs(values), 1e-3))
        move = move * min(1.0, 2.0 / float(np.abs(move).max()))
        while cost(theta + move) > now and np.abs(move).max() > 1e-6:
            move /= 2
        theta = theta + move
        if np.abs(move).max() < 1e-4:
            break
    spread = np.linalg.inv(hessian + 1e-9 * np.eye(4))
    return theta, np.sqrt(np.maximum(np.diag(spread), 1e-12))
