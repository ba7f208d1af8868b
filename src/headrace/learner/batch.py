"""The one place where tokens become tensors: Batch (flat arrays, see unpack.py) -> rows of a minibatch -> MicroBatch (tensors).

Shapes: _A all action tokens of the selection, in order of members; _R input rows of one micro-batch; _T padded input positions; _N
trained tokens of one micro-batch.

Which tokens are trained is decided here, from the version the learner is about to update from (a prefetched batch ages too):
`weigh` decides, `check_weights` guarantees. Everything is decided over the whole minibatch, in one deterministic order, before
rows are dealt to ranks and cut into micro-batches, so no gradient depends on the cut (I8).

What is not trained is not computed where that is possible: an input row ends before its last trained token, a trajectory without a
trained token is no input row, and where the policy saw only the newest observation (rollout.context), every step is an input
row of its own and untrained ones are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.config import LossScale
from headrace.errors import InvariantError, StaleTokenError
from headrace.learner.advantages import token_coefficients

PADDING_PER_MICRO_BATCH = 128
"""Padding tokens a micro-batch may hold before a new one is cheaper: about what the fixed cost of one forward and backward buys."""
PADDING_FRACTION = 0.1
"""Of its real tokens; a micro-batch may hold the larger of the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One action of a trajectory."""

    start: int
    """Into the flat arrays _A."""
    end: int
    key: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Actions that share an input row: the policy saw the trajectory from one and the same token on when it drew them."""

    first: int
    """Into Row.tokens."""
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
    steps: tuple[Step, ...]
    contexts: tuple[Context, ...]
    """One; of each step its own where the policy saw only the newest observation (rollout.context)."""
    advantage: float
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A selection as flat arrays over its action tokens. Filtered members are not in it."""

    rows: tuple[Row, ...]
    positions_A: NDArray[np.int64]
    """Index of the action token inside its trajectory; >= 1."""
    sampler_logprobs_A: NDArray[np.float64]
    """Under the version of versions_A."""
    versions_A: NDArray[np.int64]
    """Number of the version that drew it or, later, verified it."""
    key_A: NDArray[np.bool_]
    weight_A: NDArray[np.float64]
    """1; of a token of an unmarked step, when those are sampled with probability p: 1 / p or 0."""
    row_A: NDArray[np.int64]
    max_staleness: int
    max_key_staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """What one update, from one version, makes of each action token."""

    staleness_A: NDArray[np.int64]
    """Updates."""
    eligible_A: NDArray[np.bool_]
    """Inside its bound, or a key token. Means are over these, also over those that are sampled out: else they would be biased."""
    trained_A: NDArray[np.bool_]
    """Eligible and not sampled out."""
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
    """[N] int64 trajectory inside this micro-batch; it may have several input rows."""
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    coefficient_N: Tensor
    """[N] what the token's loss is multiplied by: token_coefficients x Batch.weight_A."""
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


def weigh(batch: Batch, number: int) -> Weighing:
    """Weights for an update from version `number`: unmarked tokens over max_staleness get 0, key tokens are always trained."""
    staleness_A = number - batch.versions_A
    eligible_A = batch.key_A | (staleness_A <= batch.max_staleness)
    return Weighing(
        staleness_A=staleness_A,
        eligible_A=eligible_A,
        trained_A=eligible_A & (batch.weight_A > 0),
        over_bound_A=batch.key_A & (staleness_A > batch.max_key_staleness),
    )


def check_weights(batch: Batch, weighing: Weighing, number: int) -> None:
    """Guarantees I6, whatever `weigh` or the pool did, and that no key token is left out. Raises StaleTokenError, InvariantError."""
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
    if (batch.key_A & ~(weighing.trained_A & (batch.weight_A == 1))).any():
        raise InvariantError("a key token would be left out of the loss or weigh something else than 1. This is a bug in headrace.")


def split_minibatches(batch: Batch, num_minibatches: int) -> list[NDArray[np.int64]]:
    """Row indices of each minibatch: whole groups in order, as equal in groups as can be. Fewer groups than minibatches: fewer parts."""
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(batch.rows):
        groups.setdefault(row.group_id, []).append(index)
    parts = np.array_split(np.arange(len(groups)), min(num_minibatches, max(len(groups), 1)))
    members = list(groups.values())
    return [np.asarray([index for group in part for index in members[group]], dtype=np.int64) for part in parts if len(part)]


def deal_rows(batch: Batch, weighing: Weighing, row_indices: NDArray[np.int64], world_size: int) -> list[NDArray[np.int64]]:
    """Rows of each rank: longest first, each to the rank with the fewest tokens to compute so far. Same answer on every rank."""
    lengths = {index: sum(piece.length for piece in _pieces(batch, weighing, index)) for index in row_indices.tolist()}
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for index in sorted(lengths, key=lambda index: (-lengths[index], index)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return [np.asarray(share, dtype=np.int64) for share in shares]


def coefficients(batch: Batch, weighing: Weighing, row_indices: NDArray[np.int64], loss_scale: LossScale, max_tokens: int) -> NDArray[np.float64]:
    """[rows of the batch] coefficient of each row's trained tokens, over all ranks and micro-batches, before Batch.weight_A.

    0 for rows outside this minibatch and for rows without an eligible token.
    """
    eligible_S = np.asarray([int(weighing.eligible_A[batch.rows[index].start : batch.rows[index].end].sum()) for index in row_indices], dtype=np.int64)
    result = np.zeros(len(batch.rows))
    result[row_indices] = np.where(eligible_S > 0, token_coefficients(eligible_S, loss_scale, max_tokens), 0.0)
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
    whole: bool = True,
) -> Iterator[MicroBatch]:
    """Input rows cut after their last trained token, longest first, in micro-batches of at most `budget_tokens` padded tokens.

    What is longer than the budget is a micro-batch of its own. Without a trained token nothing is packed. `whole`: all input rows of a
    trajectory lie in one micro-batch, which ratios of whole trajectories need.
    """
    units = []
    for index in row_indices.tolist():
        pieces = _pieces(batch, weighing, index)
        if pieces and whole:
            units.append(_Unit(pieces=pieces))
        else:
            units += [_Unit(pieces=(piece,)) for piece in pieces]
    for part in _cut(units, budget_tokens):
        yield _collate(batch, weighing, part, coefficient_of_row, dtype, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One input row: tokens [first, first + length) of a trajectory."""

    row: int
    first: int
    length: int
    trained: NDArray[np.int64]
    """Flat indices _A of its trained tokens, ascending; the last one is the token after its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Pieces that must lie in one micro-batch."""

    pieces: tuple[_Piece, ...]

    @property
    def width(self) -> int:
        return max(piece.length for piece in self.pieces)

    @property
    def order(self) -> tuple[int, int, int]:
        return -self.width, self.pieces[0].row, self.pieces[0].first


def _pieces(batch: Batch, weighing: Weighing, index: int) -> tuple[_Piece, ...]:
    pieces = []
    for context in batch.rows[index].contexts:
        trained = np.flatnonzero(weighing.trained_A[context.start : context.end]) + context.start
        if len(trained):
            pieces.append(_Piece(row=index, first=context.first, length=int(batch.positions_A[trained[-1]]) - context.first, trained=trained))
    return tuple(pieces)


def _cut(units: Sequence[_Unit], budget_tokens: int) -> Iterator[list[_Piece]]:
    part: list[_Piece] = []
    width = filled = 0  # tokens a row; tokens without the padding that joining units of different widths costs
    for unit in sorted(units, key=lambda unit: unit.order):
        size = unit.width * len(unit.pieces)
        if part:
            padded = width * (len(part) + len(unit.pieces))
            if padded > budget_tokens or padded - filled - size > max(PADDING_PER_MICRO_BATCH, PADDING_FRACTION * filled):
                yield part
                part = []
        if not part:
            width, filled = unit.width, 0
        part += unit.pieces
        filled += size
    if part:
        yield part


def _collate(
    batch: Batch,
    weighing: Weighing,
    part: Sequence[_Piece],
    coefficient_of_row: NDArray[np.float64],
    dtype: torch.dtype,
    device: torch.device,
) -> MicroBatch:
    width = max(piece.length for piece in part)
    tokens_RT = np.zeros((len(part), width), dtype=np.int64)
    for place, piece in enumerate(part):
        tokens_RT[place, : piece.length] = batch.rows[piece.row].tokens[piece.first : piece.first + piece.length]
    index_A = np.concatenate([piece.trained for piece in part])
    counts = [len(piece.trained) for piece in part]
    places = {row: place for place, row in enumerate(dict.fromkeys(piece.row for piece in part))}
    rows = [batch.rows[piece.row] for piece in part]
    temperatures = [row.temperature for row in rows]

    def floats(values: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    def plain(values: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        tokens_RT=plain(tokens_RT),
        hidden_N=plain(np.repeat(np.arange(len(part)) * width - [piece.first for piece in part], counts) + batch.positions_A[index_A] - 1),
        target_N=plain(np.concatenate([row.tokens[batch.positions_A[piece.trained]] for row, piece in zip(rows, part, strict=True)])),
        row_N=plain(np.repeat([places[piece.row] for piece in part], counts)),
        sampler_logprobs_N=floats(batch.sampler_logprobs_A[index_A]),
        advantages_N=floats(np.repeat([row.advantage for row in rows], counts)),
        coefficient_N=floats(np.repeat(coefficient_of_row[[piece.row for piece in part]], counts) * batch.weight_A[index_A]),
        temperature_N=None if all(value == 1.0 for value in temperatures) else floats(np.repeat(temperatures, counts)),
        key_N=plain(batch.key_A[index_A]),
        over_bound_N=plain(weighing.over_bound_A[index_A]),
        index_N=plain(index_A),
        has_keys=bool(batch.key_A[index_A].any()),
    )
