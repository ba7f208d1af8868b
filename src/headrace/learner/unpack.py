"""Selection -> Batch: payloads become flat arrays. Shapes: _A all action tokens of the selection, in order of members.

Where newer weights have verified a token (DESIGN section 6), its version and its sampler log-probability are the verified ones, for
staleness, ratios and statistics alike; else they are those it was drawn with.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.config import Advantage, ContextRule
from headrace.errors import InvariantError
from headrace.learner.advantages import group_advantages
from headrace.learner.batch import Batch, Context, Row, Step
from headrace.types import PolicyVersion, RolloutKey, StepRecord, Trajectory
from headrace.updates import Selection

Ancestry = Mapping[int, int]
"""lineage -> number of the version it started from; the learner's own lineage included."""


def unpack(
    selection: Selection,
    version: PolicyVersion,
    ancestry: Ancestry,
    advantage: Advantage,
    *,
    context: ContextRule = ContextRule.TRAJECTORY,
    unmarked_fraction: float = 1.0,
    seed: int = 0,
) -> Batch:
    """Decodes a selection. Raises InvariantError for what a pool must never return: failed members, unknown or newer versions.

    `unmarked_fraction` p: an unmarked step gets weight 1 / p with probability p, else 0 (inclusion_weight); a key step has weight 1.
    """
    filtered = set(selection.filtered)
    members = [index for index, member in enumerate(selection.members) if member.summary.key not in filtered]
    trajectories = [_decode(selection, index, context) for index in members]
    tokens = _ActionTokens(_KnownVersions(version, ancestry))
    rows: list[Row] = []
    for member, trajectory, value in zip(members, trajectories, _advantages(selection, trajectories, advantage), strict=True):
        start = tokens.count
        marked = selection.members[member].marked
        steps = []
        for index, record in enumerate(trajectory.steps):
            key = marked or record.key_weight > 0
            weight = 1.0 if key else inclusion_weight(seed, selection.id, trajectory.key, index, unmarked_fraction)
            first = tokens.count
            tokens.add(trajectory, record, key=key, weight=weight)
            steps.append(Step(start=first, end=tokens.count, key=key))
        tokens.end(trajectory)
        rows.append(
            Row(
                member=member,
                group_id=trajectory.key.group_id,
                tokens=np.asarray(trajectory.tokens, dtype=np.int64),
                start=start,
                end=tokens.count,
                steps=tuple(steps),
                contexts=_contexts(trajectory, steps, context),
                advantage=value,
                temperature=trajectory.temperature,
            )
        )
    return tokens.batch(rows, selection)


def inclusion_weight(seed: int, selection_id: int, key: RolloutKey, step: int, fraction: float) -> float:
    """1 / fraction with probability `fraction`, else 0: its expectation is 1, so that a gradient weighed by it is unbiased (Horvitz and
    Thompson 1952). Depends on nothing but its arguments: every rank, epoch and cut draws the same."""
    if fraction == 1:
        return 1.0
    name = f"unmarked step/{seed}/{selection_id}/{key.group_id}/{key.member}/{key.attempt}/{step}"
    drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2**64
    return 1.0 / fraction if drawn < fraction else 0.0


class _ActionTokens:
    """The flat arrays as they grow: action by action, trajectory by trajectory."""

    def __init__(self, known: _KnownVersions) -> None:
        self.count = 0
        self._known = known
        self._actions: list[tuple[int, int]] = []  # (place in the trajectory, tokens)
        self._spans: list[tuple[int, int]] = []  # (version number, tokens)
        self._keys: list[bool] = []
        self._weights: list[float] = []
        self._logprobs: list[NDArray[np.float64]] = [np.empty(0)]  # [tokens of a trajectory]

    def add(self, trajectory: Trajectory, record: StepRecord, *, key: bool, weight: float) -> None:
        length = record.action_end - record.action_start
        self._actions.append((record.action_start, length))
        for span in trajectory.effective_spans(record) if trajectory.verified_spans else record.version_spans:
            self._spans.append((self._known.number(span.version, trajectory), span.end - span.start))
        self._keys.append(key)
        self._weights.append(weight)
        self.count += length

    def end(self, trajectory: Trajectory) -> None:
        """All its actions are in: now their log-probabilities, the verified ones where there are any."""
        logprobs = np.asarray(trajectory.sampler_logprobs, dtype=np.float64)
        if trajectory.verified_spans:
            positions = np.concatenate([np.arange(step.action_start, step.action_end) for step in trajectory.steps])
            verified = np.concatenate([np.arange(span.start, span.end) for span in trajectory.verified_spans])
            places = np.searchsorted(positions, verified)
            if (np.diff(verified) <= 0).any() or (places >= len(positions)).any() or (positions[places] != verified).any():
                raise InvariantError(f"{tuple(trajectory.key)}: verified spans {trajectory.verified_spans} do not lie in its actions, in order.")
            logprobs[places] = trajectory.verified_logprobs
        self._logprobs.append(logprobs)

    def batch(self, rows: Sequence[Row], selection: Selection) -> Batch:
        places, lengths = np.asarray(self._actions, dtype=np.int64).reshape(-1, 2).T
        numbers, span_lengths = np.asarray(self._spans, dtype=np.int64).reshape(-1, 2).T
        return Batch(
            rows=tuple(rows),
            positions_A=np.arange(self.count) + np.repeat(places - np.cumsum(lengths) + lengths, lengths),
            sampler_logprobs_A=np.concatenate(self._logprobs),
            versions_A=np.repeat(numbers, span_lengths),
            key_A=np.repeat(np.asarray(self._keys, dtype=np.bool_), lengths),
            weight_A=np.repeat(np.asarray(self._weights, dtype=np.float64), lengths),
            row_A=np.repeat(np.arange(len(rows)), [row.end - row.start for row in rows]),
            max_staleness=selection.max_staleness,
            max_key_staleness=selection.max_key_staleness,
        )


def _contexts(trajectory: Trajectory, steps: Sequence[Step], context: ContextRule) -> tuple[Context, ...]:
    if context is ContextRule.OBSERVATION:
        firsts = [0, *(record.action_end for record in trajectory.steps)]
        return tuple(Context(first=first, start=step.start, end=step.end) for first, step in zip(firsts, steps, strict=False))
    return (Context(first=0, start=steps[0].start, end=steps[-1].end),) if steps else ()


def _decode(selection: Selection, index: int, context: ContextRule) -> Trajectory:
    member = selection.members[index]
    trajectory = Trajectory.from_bytes(member.payload)
    if trajectory.key != member.summary.key:
        raise InvariantError(f"selection {selection.id}: the payload of {tuple(member.summary.key)} is the trajectory {tuple(trajectory.key)}.")
    if trajectory.failed:
        raise InvariantError(f"selection {selection.id} holds the failed rollout {tuple(trajectory.key)} ({trajectory.end_reason}).")
    first = 0  # token that the policy saw before the action
    for step in trajectory.steps:
        if step.action_start == first and step.action_end > first:
            raise InvariantError(f"{tuple(trajectory.key)}: token {first} is an action before which the policy saw nothing: nothing predicts it.")
        if context is ContextRule.OBSERVATION:
            first = step.action_end
    if not (math.isfinite(trajectory.reward) and trajectory.temperature > 0):
        raise InvariantError(f"{tuple(trajectory.key)}: reward {trajectory.reward}, temperature {trajectory.temperature}.")
    return trajectory


def _advantages(selection: Selection, trajectories: Sequence[Trajectory], advantage: Advantage) -> list[float]:
    groups: dict[int, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.key.group_id, []).append(index)
    result = [0.0] * len(trajectories)
    for group_id, indices in groups.items():
        rewards = [trajectories[index].reward for index in indices]
        known = selection.group_rewards.get(group_id)
        if known is not None and Counter(rewards) - Counter(known):
            raise InvariantError(f"selection {selection.id}: the rewards {rewards} of group {group_id} are not among those known of it, {list(known)}.")
        for index, value in zip(indices, group_advantages(rewards, advantage, known), strict=True):
            result[index] = float(value)
    return result


class _KnownVersions:
    """Numbers of versions that the learner's weights descend from."""

    def __init__(self, version: PolicyVersion, ancestry: Ancestry) -> None:
        self._version = version
        self._ancestry = ancestry
        self._checked: dict[PolicyVersion, int] = {}

    def number(self, version: PolicyVersion, trajectory: Trajectory) -> int:
        if version not in self._checked:
            self._check(version, trajectory)
            self._checked[version] = version.number
        return self._checked[version]

    def _check(self, version: PolicyVersion, trajectory: Trajectory) -> None:
        name = f"{tuple(trajectory.key)} holds tokens of version {version}, the learner is at {self._version}:"
        if version.lineage == self._version.lineage:
            if version.number > self._version.number:
                raise InvariantError(f"{name} they are newer than the learner.")
            return
        restored_at = [number for lineage, number in self._ancestry.items() if lineage > version.lineage]
        if version.lineage > self._version.lineage or version.lineage not in self._ancestry or version.number > min(restored_at):
            raise InvariantError(f"{name} they are of another lineage, which a restore has undone.")
