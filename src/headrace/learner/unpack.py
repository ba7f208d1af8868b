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
from headrace.learner.batch import Batch, Row, Step
from headrace.types import PolicyVersion, RolloutKey, Trajectory
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
    known = _KnownVersions(version, ancestry)
    rows: list[Row] = []
    parts: list[_Arrays] = []
    start = 0
    for member, trajectory, value in zip(members, trajectories, _advantages(selection, trajectories, advantage), strict=True):
        steps = _steps(trajectory, start, context, marked=selection.members[member].marked)
        sampled = [1.0 if step.key else inclusion_weight(seed, selection.id, trajectory.key, index, unmarked_fraction) for index, step in enumerate(steps)]
        parts.append(_Arrays(trajectory, steps, sampled, known))
        end = start + trajectory.num_action_tokens
        rows.append(
            Row(
                member=member,
                group_id=trajectory.key.group_id,
                tokens=np.asarray(trajectory.tokens, dtype=np.int64),
                start=start,
                end=end,
                steps=steps,
                advantage=value,
                temperature=trajectory.temperature,
            )
        )
        start = end
    return Batch(
        rows=tuple(rows),
        positions_A=np.asarray([value for part in parts for value in part.positions], dtype=np.int64),
        sampler_logprobs_A=np.concatenate([np.empty(0), *(part.logprobs for part in parts)]),
        versions_A=np.asarray([value for part in parts for value in part.versions], dtype=np.int64),
        key_A=np.asarray([value for part in parts for value in part.keys], dtype=np.bool_),
        weight_A=np.asarray([value for part in parts for value in part.weights], dtype=np.float64),
        row_A=np.repeat(np.arange(len(rows)), [row.end - row.start for row in rows]),
        max_staleness=selection.max_staleness,
        max_key_staleness=selection.max_key_staleness,
    )


def inclusion_weight(seed: int, selection_id: int, key: RolloutKey, step: int, fraction: float) -> float:
    """1 / fraction with probability `fraction`, else 0: its expectation is 1, so that a gradient weighed by it is unbiased (Horvitz and
    Thompson 1952). Depends on nothing but its arguments: every rank, epoch and cut draws the same."""
    if fraction == 1:
        return 1.0
    name = f"unmarked step/{seed}/{selection_id}/{key.group_id}/{key.member}/{key.attempt}/{step}"
    drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2**64
    return 1.0 / fraction if drawn < fraction else 0.0


class _Arrays:
    """What is known of each action token of one trajectory."""

    def __init__(self, trajectory: Trajectory, steps: Sequence[Step], weights: Sequence[float], known: _KnownVersions) -> None:
        self.positions: list[int] = []
        self.versions: list[int] = []
        self.keys: list[bool] = []
        self.weights: list[float] = []
        for record, step, weight in zip(trajectory.steps, steps, weights, strict=True):
            length = record.action_end - record.action_start
            self.positions.extend(range(record.action_start, record.action_end))
            for span in trajectory.effective_spans(record):
                self.versions.extend([known.number(span.version, trajectory)] * (span.end - span.start))
            self.keys.extend([step.key] * length)
            self.weights.extend([weight] * length)
        self.logprobs = self._logprobs(trajectory)

    def _logprobs(self, trajectory: Trajectory) -> NDArray[np.float64]:
        """[action tokens] the verified ones where there are any."""
        result = np.asarray(trajectory.sampler_logprobs, dtype=np.float64)
        if trajectory.verified_spans:
            positions = np.asarray(self.positions, dtype=np.int64)
            verified = np.concatenate([np.arange(span.start, span.end) for span in trajectory.verified_spans])
            places = np.searchsorted(positions, verified)
            if (np.diff(verified) <= 0).any() or (places >= len(positions)).any() or (positions[places] != verified).any():
                raise InvariantError(f"{tuple(trajectory.key)}: verified spans {trajectory.verified_spans} do not lie in its actions, in order.")
            result[places] = trajectory.verified_logprobs
        return result


def _steps(trajectory: Trajectory, start: int, context: ContextRule, *, marked: bool) -> tuple[Step, ...]:
    steps = []
    for context_start, record in zip(_context_starts(trajectory, context), trajectory.steps, strict=True):
        end = start + record.action_end - record.action_start
        steps.append(Step(start=start, end=end, context_start=context_start, key=marked or record.key_weight > 0))
        start = end
    return tuple(steps)


def _context_starts(trajectory: Trajectory, context: ContextRule) -> list[int]:
    """Of each step, where what the policy saw begins: `observation` shows it what follows the previous action."""
    if context is ContextRule.TRAJECTORY:
        return [0] * len(trajectory.steps)
    return [0, *(step.action_end for step in trajectory.steps)][: len(trajectory.steps)]


def _decode(selection: Selection, index: int, context: ContextRule) -> Trajectory:
    member = selection.members[index]
    trajectory = Trajectory.from_bytes(member.payload)
    if trajectory.key != member.summary.key:
        raise InvariantError(f"selection {selection.id}: the payload of {tuple(member.summary.key)} is the trajectory {tuple(trajectory.key)}.")
    if trajectory.failed:
        raise InvariantError(f"selection {selection.id} holds the failed rollout {tuple(trajectory.key)} ({trajectory.end_reason}).")
    for start, step in zip(_context_starts(trajectory, context), trajectory.steps, strict=True):
        if step.action_start == start and step.action_end > start:
            raise InvariantError(f"{tuple(trajectory.key)}: token {start} is an action before which the policy saw nothing: nothing predicts it.")
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
