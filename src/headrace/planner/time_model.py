"""A profile as the simulated runtime takes it: times of one engine and of the learner, and rollouts drawn by seed.

Rollouts: steps, answers and (where there are several steps) observations of one rollout rise together, as they do where an action is a
step; prompts of one-step tasks are independent of their answers. Members of a group are alike as far as the profile's tailness says:
their normal scores share a part, as large as gives E[longest of a group] / E[one] (a one-factor Gaussian copula). Waits are independent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from headrace.config import Settings
from headrace.planner.distributions import Distribution
from headrace.planner.overheads import REPORT_SECONDS
from headrace.planner.profile import Profile
from headrace.planner.rewards import Progress
from headrace.runtime.time_model import PlannedRollout, PlannedStep, TimeModel
from headrace.types import RolloutRequest

_MOST_HEARTBEAT_SECONDS = 30.0
_HEARTBEATS_PER_UPDATE = 8
_TABLE = 4096
"""Values that stand for a distribution."""
DRIFT_FADES = 2.0
"""Times the updates measured after which most of a drift is over."""
_SEVERAL_STEPS = 1.5
_LEAST_SHARE = 0.05
"""Of its mean, to which a length that shrinks over the run is held."""
_STRIDES = (1_000_003, 10_007, 101)
"""Of seed, group and member: each rollout has a stream of its own."""


def time_model(profile: Profile, settings: Settings, *, failures: float = 0.0, learn_scale: float = 1.0, cores: int | None = None) -> TimeModel:
    """`failures`: share of rollouts that fail at their end. `learn_scale`: how many times the tokens of a batch the learner learns (a run
    that is simulated at a part of its size). `cores`: of the machine, where devices share them."""
    decode, update = profile.decode, profile.weight_update
    update_seconds = profile.learn.fit.seconds(
        settings.run.num_learner_ranks, settings.learner.micro_batch_tokens, settings.batch_trajectories * learn_scale * _learner_tokens(profile)
    )
    return TimeModel(
        plan_rollout=rollout_planner(profile, failures=failures, batch_ratio=_batch_ratio(profile, settings)),
        step_seconds=lru_cache(maxsize=None)(lambda running: decode.fit.seconds(running)),
        work_share=decode.work_share,
        seconds_per_context_token=decode.fit.seconds_per_context_token,
        observation_seconds=_observation_seconds(profile),
        gap_seconds=lambda running: decode.gap_seconds + decode.gap_seconds_per_sequence * running,
        answer_delay_steps=decode.answer_delay_steps,
        kv_capacity_tokens=decode.kv_capacity_tokens,
        capacity=decode.saturation.running,
        saturated_tokens_per_second=decode.saturation.tokens_per_second,
        learn_seconds=_learn_seconds(profile, settings, learn_scale),
        learn_busy_fraction=profile.learn.busy_fraction,
        handover_seconds=profile.learn.handover_seconds,
        publish_seconds=update.publish_seconds,
        update_bytes=update.bytes,
        # a sampler has an update when its pause is over
        transfer_seconds=max(0.0, update.transfer_seconds - update.pause_seconds),
        pause_seconds=update.pause_seconds,
        verify_seconds=_verify_seconds(profile),
        rejects=profile.checks.rejects if profile.checks is not None and profile.checks.verify == settings.pool.verify else None,
        key_step_share=profile.key_step_share,
        num_cores=cores,
        dispatch_seconds=profile.dispatch_seconds,
        report_seconds=REPORT_SECONDS,
        heartbeat_seconds=min(_MOST_HEARTBEAT_SECONDS, max(1.0, update_seconds / _HEARTBEATS_PER_UPDATE)),
    )


def _observation_seconds(profile: Profile) -> Callable[[int], float]:
    prefill = profile.prefill
    return lambda tokens: prefill.overhead_seconds + tokens / prefill.tokens_per_second if tokens else 0.0


def _verify_seconds(profile: Profile) -> Callable[[int], float]:
    each = 0.0 if profile.checks is None else profile.checks.seconds_per_token
    return lambda tokens: each * tokens


def _batch_ratio(profile: Profile, settings: Settings) -> float:
    """Trajectories of a batch / those of the measured run's."""
    seen = profile.observed
    return 1.0 if seen is None or not seen.batch_trajectories else settings.batch_trajectories / seen.batch_trajectories


def _learn_seconds(profile: Profile, settings: Settings, scale: float) -> Callable[[float, int], float]:
    """Of trajectories with so many tokens: padding is added. Where rewards are not known no group is filtered, and what was in the run measured is
    left out in the mean."""
    lengths, fit, micro_batch_tokens = profile.distributions, profile.learn.fit, settings.learner.micro_batch_tokens
    total = lengths.prompt_tokens.mean + lengths.answer_tokens.mean
    each = _learner_tokens(profile) / total if total > 0 else 1.0
    factor = scale * (each if profile.rewards is None else profile.rewards.padding)
    return lambda tokens, ranks: fit.seconds(ranks, micro_batch_tokens, tokens * factor)


def _learner_tokens(profile: Profile) -> float:
    """Of one trajectory that a batch takes, mean."""
    lengths = profile.distributions
    return profile.learn.tokens_per_trajectory or lengths.prompt_tokens.mean + lengths.answer_tokens.mean


# rollouts ---------------------------------------------------------------------------------------------------------------


def rollout_planner(profile: Profile, *, failures: float = 0.0, batch_ratio: float = 1.0) -> Callable[[RolloutRequest, int], PlannedRollout]:
    """Draws a rollout by the seed and key of its request; lengths and rewards drift with the version it starts under."""
    lengths = profile.distributions
    several = lengths.steps.mean > _SEVERAL_STEPS
    fades = math.inf if profile.observed is None else DRIFT_FADES * profile.observed.num_updates
    measured = (lengths.answer_tokens, lengths.prompt_tokens, lengths.steps, lengths.tool_wait_seconds)
    answers, prompts, counts, waits = (_Draws(each, fades) for each in measured)
    shared = shared_part(lengths.answer_tokens, profile.group.size, profile.group.tailness)
    own, both = math.sqrt(1.0 - shared), math.sqrt(shared)
    rewards, marked = profile.rewards, profile.key_step_share
    progress = None if rewards is None else Progress(rewards, group_size=profile.group.size, batch_ratio=batch_ratio)

    @lru_cache(maxsize=1024)
    def group_score(seed: int, group_id: int) -> float:
        return random.Random((seed * _STRIDES[0] + group_id) * _STRIDES[1] - 1).gauss(0.0, 1.0)

    @lru_cache(maxsize=1024)
    def ease(seed: int, group_id: int) -> float:
        return random.Random((seed * _STRIDES[0] + group_id) * _STRIDES[1] - 2).gauss(0.0, 1.0)

    def success(request: RolloutRequest, version: int) -> float:
        """Its chance."""
        if rewards is None or progress is None:
            return 0.5
        group_id, seed = request.key.group_id, request.seed
        return rewards.chance(group_score(seed, group_id) if shared else 0.0, ease(seed, group_id), progress.rise(version))

    def plan(request: RolloutRequest, version: int) -> PlannedRollout:
        group_id, member, attempt = request.key
        stream = random.Random(((request.seed * _STRIDES[0] + group_id) * _STRIDES[1] + member) * _STRIDES[2] + attempt)
        level = _normal_level(both * group_score(request.seed, group_id) + own * stream.gauss(0.0, 1.0)) if shared else stream.random()
        count = max(1, round(counts.at(level, version))) if several else 1
        action_tokens = max(count, round(answers.at(level, version)))
        observation_tokens = round(prompts.at(level if several else stream.random(), version))
        actions, observations = _spread(action_tokens, count), _spread(observation_tokens, count)
        # a step's wait has a time of its own whatever the run's version: drifts of waits are of the whole
        steps = tuple(
            PlannedStep(seen, done, waits.at(stream.random(), version), marked > 0 and stream.random() < marked)
            for seen, done in zip(observations, actions, strict=True)
        )
        return PlannedRollout(steps=steps, reward=float(stream.random() < success(request, version)), fails=stream.random() < failures)

    return plan


class _Draws:
    """A distribution as a table of equally likely values with its mean."""

    def __init__(self, distribution: Distribution, fades: float = math.inf) -> None:
        """`fades`: updates over which a drift dies away; it is not carried on for ever."""
        values = [distribution.quantile((index + 0.5) / _TABLE) for index in range(_TABLE)]
        mean = sum(values) / _TABLE
        factor = distribution.mean / mean if mean > 0 else 1.0
        self._values = [value * factor for value in values]
        self._fades = fades
        self._drift = distribution.drift_per_update / distribution.mean if distribution.mean > 0 else 0.0

    def at(self, level: float, version: int) -> float:
        """The value at a level, 0 to 1, of a rollout that starts under this version."""
        value = self._values[min(_TABLE - 1, int(level * _TABLE))]
        if not self._drift:
            return value
        updates = version if math.isinf(self._fades) else self._fades * -math.expm1(-version / self._fades)
        return value * max(_LEAST_SHARE, 1.0 + self._drift * updates)


def _spread(total: int, count: int) -> list[int]:
    """As evenly as can be, the first ones larger."""
    each, more = divmod(total, count)
    return [each + 1] * more + [each] * (count - more)


def _normal_level(score: float) -> float:
    return 0.5 * (1.0 + math.erf(score / math.sqrt(2.0)))


def shared_part(answers: Distribution, group_size: int, tailness: float) -> float:
    """Of the variance of a member's normal score, the part that its whole group has: 0 independent members, 1 all alike."""
    if group_size < 2 or answers.table_mean <= 0 or tailness >= answers.tailness(group_size):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if _tailness(answers, group_size, middle) > tailness else (low, middle)
    return (low + high) / 2


def _tailness(answers: Distribution, group_size: int, shared: float) -> float:
    """E[longest of a group] / E[one] where members share this part: the integral over the group's score and the largest of its members'."""
    scores = np.linspace(-5.0, 5.0, 401)
    levels = np.asarray([_normal_level(float(score)) for score in scores])
    largest = np.diff(levels**group_size, prepend=0.0)  # of the members' own scores
    groups = np.diff(levels, prepend=0.0)[::8]
    mixed = math.sqrt(shared) * scores[::8, None] + math.sqrt(1.0 - shared) * scores[None, :]
    table = np.asarray(answers.quantiles)
    values = np.interp(np.interp(mixed, scores, levels), table[:, 0], table[:, 1])
    one = float((np.interp(levels, table[:, 0], table[:, 1]) * np.diff(levels, prepend=0.0)).sum())
    return float(groups @ (values @ largest)) / float(groups.sum()) / one
