"""The one place where tokens become tensors: Selection -> Batch (flat arrays) -> rows of a minibatch -> MicroBatch (tensors).

Shapes: _A all action tokens of the selection, in order of members; _R rows (trajectories) of one micro-batch; _T padded input
positions; _N trained tokens of one micro-batch.

Which tokens are trained is decided here, from the version the learner is about to update from (a prefetched batch ages too):
`weigh` decides, `check_weights` guarantees. Everything is decided over the whole minibatch, in one deterministic order, before
rows are dealt to ranks and cut into micro-batches, so no gradient depends on the cut (I8).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.config import Advantage, LossScale
from headrace.errors import InvariantError, StaleTokenError
from headrace.learner.advantages import group_advantages, token_coefficients
from headrace.types import PolicyVersion, Trajectory
from headrace.updates import Selection

PADDING_PER_MICRO_BATCH = 128
"""Padding tokens a micro-batch may hold before a new one is cheaper: about what the fixed cost of one forward and backward buys."""
PADDING_FRACTION = 0.1
"""Of its real tokens; a micro-batch may hold the larger of the two."""

Ancestry = Mapping[int, int]
"""lineage -> number of the version it started from; the learner's own lineage included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStep:
    start: int
    """Into the flat arrays _A."""
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trajectory. `start`, `end`: its action tokens in the flat arrays _A."""

    member: int
    """Index into selection.members."""
    group_id: int
    tokens: NDArray[np.int64]
    """[all tokens]"""
    start: int
    end: int
    key_steps: tuple[KeyStep, ...]
    advantage: float
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A selection as flat arrays over its action tokens. Filtered members are not in it."""

    rows: tuple[Row, ...]
    positions_A: NDArray[np.int64]
    """Index of the action token inside its trajectory; >= 1."""
    sampler_logprobs_A: NDArray[np.float64]
    versions_A: NDArray[np.int64]
    """Number of the version that drew it."""
    key_A: NDArray[np.bool_]
    row_A: NDArray[np.int64]
    max_staleness: int
    max_key_staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """What one update, from one version, makes of each action token."""

    staleness_A: NDArray[np.int64]
    """Updates."""
    trained_A: NDArray[np.bool_]
    """Weight 1 (True) or 0."""
    over_bound_A: NDArray[np.bool_]
    """Key tokens over max_key_staleness: trained through PPO-clip, counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward and backward."""

    tokens_RT: Tensor
    """[R, T] int64 input tokens, right-padded with 0; each row ends before its last trained token, which nothing has to follow."""
    hidden_N: Tensor
    """[N] int64 into the flattened [R * T]: the position whose output predicts the token."""
    target_N: Tensor
    """[N] int64 the trained tokens."""
    row_N: Tensor
    """[N] int64 row inside this micro-batch."""
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    coefficient_N: Tensor
    """[N] what the token's loss is multiplied by (token_coefficients)."""
    temperature_N: Tensor | None
    """None: all 1."""
    key_N: Tensor
    """[N] bool"""
    over_bound_N: Tensor
    """[N] bool"""
    index_N: Tensor
    """[N] int64 into the flat arrays _A of the batch."""
    has_keys: bool

    @property
    def padded_tokens(self) -> int:
        return self.tokens_RT.numel()


def unpack(selection: Selection, version: PolicyVersion, ancestry: Ancestry, advantage: Advantage) -> Batch:
    """Decodes a selection. Raises InvariantError for what a pool must never return: failed members, unknown or newer versions."""
    filtered = set(selection.filtered)
    members = [index for index, member in enumerate(selection.members) if member.summary.key not in filtered]
    trajectories = [_decode(selection, index) for index in members]
    advantages = _advantages(trajectories, advantage)
    positions: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    keys: list[bool] = []
    rows: list[Row] = []
    known = _KnownVersions(version, ancestry)
    for member, trajectory, value in zip(members, trajectories, advantages, strict=True):
        start = len(positions)
        key_steps = []
        for step in trajectory.steps:
            first = len(positions)
            positions.extend(range(step.action_start, step.action_end))
            for span in step.version_spans:
                versions.extend([known.number(span.version, trajectory)] * (span.end - span.start))
            if step.key_weight > 0:
                key_steps.append(KeyStep(start=first, end=len(positions)))
            keys.extend([step.key_weight > 0] * (step.action_end - step.action_start))
        logprobs.extend(trajectory.sampler_logprobs)
        rows.append(
            Row(
                member=member,
                group_id=trajectory.key.group_id,
                tokens=np.asarray(trajectory.tokens, dtype=np.int64),
                start=start,
                end=len(positions),
                key_steps=tuple(key_steps),
                advantage=value,
                temperature=trajectory.temperature,
            )
        )
    return Batch(
        rows=tuple(rows),
        positions_A=np.asarray(positions, dtype=np.int64),
        sampler_logprobs_A=np.asarray(logprobs, dtype=np.float64),
        versions_A=np.asarray(versions, dtype=np.int64),
        key_A=np.asarray(keys, dtype=np.bool_),
        row_A=np.repeat(np.arange(len(rows)), [row.end - row.start for row in rows]),
        max_staleness=selection.max_staleness,
        max_key_staleness=selection.max_key_staleness,
    )


def weigh(batch: Batch, number: int) -> Weighing:
    """Weights for an update from version `number`: unmarked tokens over max_staleness get 0, key tokens are always trained."""
    staleness_A = number - batch.versions_A
    return Weighing(
        staleness_A=staleness_A,
        trained_A=batch.key_A | (staleness_A <= batch.max_staleness),
        over_bound_A=batch.key_A & (staleness_A > batch.max_key_staleness),
    )


def check_weights(batch: Batch, weighing: Weighing, number: int) -> None:
    """Guarantees I6, whatever `weigh` or the pool did. Raises StaleTokenError."""
    wrong_A = weighing.trained_A & ~batch.key_A & (number - batch.versions_A > batch.max_staleness)
    if wrong_A.any():
        index = int(np.argmax(wrong_A))
        found = int(batch.versions_A[index])
        raise StaleTokenError(
            f"group {batch.rows[batch.row_A[index]].group_id} would train unmarked tokens of version {found}, the learner is at {number} "
            f"({number - found} > max_staleness {batch.max_staleness})."
        )
    if (batch.key_A & (number - batch.versions_A > batch.max_key_staleness) & ~weighing.over_bound_A).any():
        raise StaleTokenError(f"a key token more than max_key_staleness {batch.max_key_staleness} updates old would not go through PPO-clip.")


def split_minibatches(batch: Batch, num_minibatches: int) -> list[NDArray[np.int64]]:
    """Row indices of each minibatch: whole groups in order, as equal in groups as can be. Fewer groups than minibatches: fewer parts."""
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(batch.rows):
        groups.setdefault(row.group_id, []).append(index)
    parts = np.array_split(np.arange(len(groups)), min(num_minibatches, max(len(groups), 1)))
    members = list(groups.values())
    return [np.asarray([index for group in part for index in members[group]], dtype=np.int64) for part in parts if len(part)]


def deal_rows(batch: Batch, row_indices: NDArray[np.int64], world_size: int) -> list[NDArray[np.int64]]:
    """Rows of each rank: longest first, each to the rank with the fewest tokens so far. Same answer on every rank."""
    lengths = {int(index): len(batch.rows[index].tokens) for index in row_indices}
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for index in sorted(lengths, key=lambda index: (-lengths[index], index)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return [np.asarray(share, dtype=np.int64) for share in shares]


def coefficients(batch: Batch, weighing: Weighing, row_indices: NDArray[np.int64], loss_scale: LossScale, max_tokens: int) -> NDArray[np.float64]:
    """[rows of the batch] coefficient of each row's trained tokens, over all ranks and micro-batches.

    0 for rows outside this minibatch and for rows without a trained token.
    """
    trained_S = np.asarray([int(weighing.trained_A[batch.rows[index].start : batch.rows[index].end].sum()) for index in row_indices], dtype=np.int64)
    result = np.zeros(len(batch.rows))
    result[row_indices] = np.where(trained_S > 0, token_coefficients(trained_S, loss_scale, max_tokens), 0.0)
    return result


def micro_batches(
    batch: Batch,
    weighing: Weighing,
    row_indices: NDArray[np.int64],
    coefficient_of_row: NDArray[np.float64],
    *,
    budget_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[MicroBatch]:
    """Rows cut after their last trained token, longest first, in micro-batches of at most `budget_tokens` padded tokens.

    A row longer than the budget is a micro-batch of its own. Rows without a trained token are not packed.
    """
    trained_of_row: dict[int, NDArray[np.int64]] = {}
    lengths: dict[int, int] = {}
    for index in row_indices.tolist():
        row = batch.rows[index]
        trained = np.flatnonzero(weighing.trained_A[row.start : row.end]) + row.start
        if len(trained):
            trained_of_row[index] = trained
            lengths[index] = int(batch.positions_A[trained[-1]])
    for part in _cut(lengths, budget_tokens):
        yield _collate(batch, weighing, part, trained_of_row, lengths, coefficient_of_row, dtype, device)


def _cut(lengths: Mapping[int, int], budget_tokens: int) -> Iterator[list[int]]:
    part: list[int] = []
    real = 0
    for index in sorted(lengths, key=lambda index: (-lengths[index], index)):
        if part:
            padded = lengths[part[0]] * (len(part) + 1)
            padding = padded - real - lengths[index]
            if padded > budget_tokens or padding > max(PADDING_PER_MICRO_BATCH, PADDING_FRACTION * real):
                yield part
                part, real = [], 0
        part.append(index)
        real += lengths[index]
    if part:
        yield part


def _collate(
    batch: Batch,
    weighing: Weighing,
    part: Sequence[int],
    trained_of_row: Mapping[int, NDArray[np.int64]],
    lengths: Mapping[int, int],
    coefficient_of_row: NDArray[np.float64],
    dtype: torch.dtype,
    device: torch.device,
) -> MicroBatch:
    width = lengths[part[0]]
    tokens_RT = np.zeros((len(part), width), dtype=np.int64)
    for place, index in enumerate(part):
        tokens_RT[place, : lengths[index]] = batch.rows[index].tokens[: lengths[index]]
    index_A = np.concatenate([trained_of_row[index] for index in part])
    counts = [len(trained_of_row[index]) for index in part]
    row_N = np.repeat(np.arange(len(part)), counts)
    targets = np.concatenate([batch.rows[index].tokens[batch.positions_A[trained_of_row[index]]] for index in part])
    temperatures = [batch.rows[index].temperature for index in part]

    def floats(values: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    def plain(values: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        tokens_RT=plain(tokens_RT),
        hidden_N=plain(row_N * width + batch.positions_A[index_A] - 1),
        target_N=plain(targets),
        row_N=plain(row_N),
        sampler_logprobs_N=floats(batch.sampler_logprobs_A[index_A]),
        advantages_N=floats(np.repeat([batch.rows[index].advantage for index in part], counts)),
        coefficient_N=floats(np.repeat(coefficient_of_row[list(part)], counts)),
        temperature_N=None if all(value == 1.0 for value in temperatures) else floats(np.repeat(temperatures, counts)),
        key_N=plain(batch.key_A[index_A]),
        over_bound_N=plain(weighing.over_bound_A[index_A]),
        index_N=plain(index_A),
        has_keys=bool(batch.key_A[index_A].any()),
    )


def _decode(selection: Selection, index: int) -> Trajectory:
    member = selection.members[index]
    trajectory = Trajectory.from_bytes(member.payload)
    if trajectory.key != member.summary.key:
        raise InvariantError(f"selection {selection.id}: the payload of {tuple(member.summary.key)} is the trajectory {tuple(trajectory.key)}.")
    if trajectory.failed:
        raise InvariantError(f"selection {selection.id} holds the failed rollout {tuple(trajectory.key)} ({trajectory.end_reason}).")
    if any(step.action_start == 0 and step.action_end > 0 for step in trajectory.steps):
        raise InvariantError(f"{tuple(trajectory.key)}: the first token is an action, nothing predicts it.")
    if not (math.isfinite(trajectory.reward) and trajectory.temperature > 0):
        raise InvariantError(f"{tuple(trajectory.key)}: reward {trajectory.reward}, temperature {trajectory.temperature}.")
    return trajectory


def _advantages(trajectories: Sequence[Trajectory], advantage: Advantage) -> list[float]:
    groups: dict[int, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.key.group_id, []).append(index)
    result = [0.0] * len(trajectories)
    for indices in groups.values():
        for index, value in zip(indices, group_advantages([trajectories[i].reward for i in indices], advantage), strict=True):
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
