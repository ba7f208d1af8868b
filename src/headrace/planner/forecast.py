"""When a plan is done and what it costs, as an interval: the uncertainty of the profile carried through to the end of the run.

Each side of a plan, samplers and learner, answers to its inputs by its elasticity; in every draw of the inputs the slower side
counts (sync: their sum). What rollouts grow by during the run (drift) is integrated over it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np

from headrace.planner.estimate import Setup, Steady, steady_state, update_seconds
from headrace.planner.inputs import INPUTS
from headrace.planner.plan import Spread
from headrace.planner.profile import Profile
from headrace.planner.time_model import DRIFT_FADES, shared_part

_DRAWS = 400
_PARTS = 8
"""Of the run, for what drifts."""
_STEP = 1.1
"""Factor of the finite differences."""
_MACHINE_ERROR = 0.03
"""Relative, of a measured profile used again another day on the same kind of machine."""
_LENGTH_ERROR = 0.15
"""Relative, of lengths that were assumed."""
_DRIFT_ERROR = 0.5
"""Relative, of a measured drift that is carried on beyond what was measured."""
_SHRUNK = 0.25
"""Of their mean, to which answers may shrink."""
_EXTRAPOLATION = 0.05
"""Relative error added by each doubling beyond the measured batch or number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncertainty:
    """Relative standard deviations, independent of each other."""

    decode: float
    learn: float
    answers: float
    learning: float
    """Of how fast the odds of success rise."""


def uncertainty(profile: Profile, setup: Setup, running: float) -> Uncertainty:
    """Of what a plan rests on; estimates carry the errors their efficiencies showed (roofline.py)."""
    decode, learn = profile.decode, profile.learn
    beyond_batch = _doublings(running, max(point.running for point in decode.points))
    beyond_ranks = _doublings(setup.num_learner_ranks, max(point.ranks for point in learn.points))
    answers = profile.distributions.answer_tokens
    spread = answers.deviation / max(answers.mean, 1e-9)
    if profile.estimated:
        decode_error, learn_error, answers_error = decode.fit.relative_error, learn.fit.relative_error, _LENGTH_ERROR
    else:
        # the scatter of single points averages out; what a day changes does not
        decode_error = math.hypot(_MACHINE_ERROR, decode.fit.relative_error / math.sqrt(len(decode.points)))
        learn_error = math.hypot(_MACHINE_ERROR, learn.fit.relative_error / math.sqrt(len(learn.points)))
        rollouts = 64 if profile.observed is None else profile.observed.num_updates * profile.observed.batch_trajectories
        answers_error = spread / math.sqrt(max(rollouts / _alike(profile), 1))
    return Uncertainty(
        decode=decode_error + _EXTRAPOLATION * beyond_batch,
        learn=learn_error + (0.0 if profile.estimated else _EXTRAPOLATION * beyond_ranks),
        answers=answers_error,
        learning=_DRIFT_ERROR,
    )


def _alike(profile: Profile) -> float:
    """Rollouts that count as one for a mean, as members of a group are alike: 1 + (G - 1) x the share of the variance that groups have."""
    group = profile.group
    return 1.0 + (group.size - 1) * shared_part(profile.distributions.answer_tokens, group.size, group.tailness)


def finish_seconds(profile: Profile, setup: Setup, steady: Steady, num_updates: int, *, correction: float = 1.0) -> Spread:
    """From the first rollout to the last update. `correction`: simulated / closed-form step, where a simulation was made."""
    errors = uncertainty(profile, setup, steady.running)
    decode, answers = _factors(errors.decode, 1), _factors(errors.answers, 2)
    learn, carried_on = _factors(errors.learn, 3), np.clip(1.0 + _DRIFT_ERROR * _normals(4), 0.0, 2.0)
    generate_by, learn_by = _elasticities(profile, setup, steady)
    lengths = profile.distributions.answer_tokens
    seconds = np.zeros(_DRAWS)
    for part in range(_PARTS):
        update = (part + 0.5) / _PARTS * num_updates
        grown = 1.0 + carried_on * lengths.drift_per_update * _drifting(profile, update) / max(lengths.mean, 1e-9)
        grown = answers * np.clip(grown, _SHRUNK, max(1.0, lengths.most / max(lengths.mean, 1e-9)))
        generating = steady.generate_seconds * decode ** generate_by["decode"] * grown ** generate_by["answers"]
        learning = steady.learn_seconds * learn * grown**learn_by
        seconds += generating + learning if steady.bottleneck == "both in turn" else np.maximum(generating, learning)
    seconds *= correction * num_updates / _PARTS
    low, middle, high = (float(value) for value in np.quantile(seconds, (0.1, 0.5, 0.9)))
    return Spread(p10=low, p50=middle, p90=high)


def cost(finish: Spread, num_gpus: int, price_per_gpu_hour: float | None) -> Spread | None:
    """All devices of the request, for as long as the run takes. None without a price."""
    if price_per_gpu_hour is None:
        return None
    hourly = num_gpus * price_per_gpu_hour / 3600
    return Spread(p10=finish.p10 * hourly, p50=finish.p50 * hourly, p90=finish.p90 * hourly)


def _elasticities(profile: Profile, setup: Setup, steady: Steady) -> tuple[dict[str, float], float]:
    """(of the samplers' seconds a batch to decode and to answers, of the learner's to answers)."""
    generate_by, learn_by = {}, 0.0
    for name in ("decode", "answers"):
        changed = INPUTS[name].apply(profile, _STEP)
        ratio = steady_state(changed, setup).generate_seconds / steady.generate_seconds
        generate_by[name] = math.log(ratio) / math.log(_STEP)
        if name == "answers":
            learn_by = math.log(update_seconds(changed, setup) / update_seconds(profile, setup)) / math.log(_STEP)
    return generate_by, learn_by


def _drifting(profile: Profile, update: float) -> float:
    """Updates that count for a drift at this one: it dies away beyond what was measured, which is all that is known of it."""
    if profile.observed is None:
        return update
    fades = DRIFT_FADES * profile.observed.num_updates
    return fades * -math.expm1(-update / fades)


def from_the_start(profile: Profile) -> Profile:
    """Of a run that begins where the measured one began: lengths that drifted were those of its mean in its middle."""
    if profile.observed is None:
        return profile
    lengths, names = profile.distributions, ("prompt_tokens", "answer_tokens", "steps")
    began = {}
    for name in names:
        each = getattr(lengths, name)
        before = each.mean - each.drift_per_update * profile.observed.num_updates / 2
        if each.drift_per_update and before > 0:
            began[name] = replace(each.scaled(before / each.mean), drift_per_update=each.drift_per_update)
    rewards = None if profile.rewards is None else profile.rewards.at(-profile.observed.num_updates / 2)
    return replace(profile.with_distributions(replace(lengths, **began)), rewards=rewards)


def without_drift(profile: Profile) -> Profile:
    """As it was measured, for good: what steady states are told of."""
    lengths = profile.distributions
    names = ("prompt_tokens", "answer_tokens", "steps", "tool_wait_seconds")
    rewards = None if profile.rewards is None else replace(profile.rewards, log_odds_per_update=0.0)
    steady = replace(lengths, **{name: replace(getattr(lengths, name), drift_per_update=0.0) for name in names})
    return replace(profile.with_distributions(steady), rewards=rewards)


def _doublings(value: float, measured: float) -> float:
    return max(0.0, math.log2(max(value, 1e-9) / max(measured, 1e-9)))


@cache
def _normals(stream: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One from each of as many equally likely parts, and the same for every plan: plans are compared under equal circumstances."""
    levels = [NormalDist().inv_cdf((index + 0.5) / _DRAWS) for index in range(_DRAWS)]
    return np.random.default_rng(stream).permutation(levels)


def _factors(deviation: float, stream: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Lognormal with median 1."""
    result: np.ndarray[tuple[int], np.dtype[np.float64]] = np.exp(deviation * _normals(stream))
    return result
