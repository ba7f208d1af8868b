"""Attention of a packed batch over a slot cache, and the plan that says which packed token belongs to which slot.

A step packs the new tokens of all its rows into one line [1, N], so that every layer but attention computes exactly N tokens,
whether a row brings one token (decode), three (a short observation) or a thousand (a prompt). Attention works on groups of
rows: queries are padded inside a group, keys and values are gathered from the rows' slots up to the group's longest context.
Measured (64 rows, 64 tokens of context): the gather costs 0.02 ms beside 0.1 ms of attention, so rows stay where they are.

Shapes: _N packed tokens, _R rows of a group, _Q queries (padded), _L keys, _H heads, _K key-value heads, _D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional

from headrace.errors import ModelError

ATTENTION_NAME = "headrace_slots"
RECORDING_NAME = "headrace_recording"
SHORT_TOKENS = 8
"""Rows with at most so many new tokens are attended together, padded to the longest of them."""
_FUSED_QUERIES = 16
"""From so many queries on torch's fused attention is faster than two matrix products, and needs no [Q, L] scores."""
_SMALLEST_WINDOW = 128
"""Rows whose context is within it are never kept apart: short contexts cost less than one more group."""
_FEW_KEYS = 2**14
"""Rows x longest context. Up to it short rows of whatever contexts are one group: padding costs less than a second group, and only
steps of one group are recorded (recorded.py)."""
_QUERIES = np.arange(SHORT_TOKENS)


class LayerShape(NamedTuple):
    """What one layer stores a token, and how many query heads read it."""

    num_heads: int
    key_size: int
    value_size: int
    query_heads: int

    @property
    def repeats(self) -> int:
        """Query heads to each key-value head."""
        return self.query_heads // self.num_heads


@dataclass(slots=True)
class RowGroup:
    """Rows attended together: packed tokens [first, last). Numbers that vary from step to step are read from tensors' shapes, so
    that a recorded step (recorded.py) holds for all of them."""

    first: int
    last: int
    slots_R: torch.Tensor
    positions_RQ: torch.Tensor
    keys_L: torch.Tensor
    """0 to the longest context - 1."""
    single: bool
    """One query a row."""
    fused: bool
    """So many queries that torch's fused attention pays."""
    pad_RQ: torch.Tensor | None
    """[R * Q] packed token (from `first`) of each padded query; None when all rows have Q queries."""
    unpad_N: torch.Tensor | None
    """[last - first] padded query of each packed token."""
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    """By sliding window: [R, 1, Q, L], 0 or -inf."""
    expanded: dict[tuple[int | None, int, int], torch.Tensor] = field(default_factory=dict)
    """By sliding window, key-value heads and query heads to each: [R * K, G * Q, L]."""
    slot_heads: dict[int, torch.Tensor] = field(default_factory=dict)
    """By number of key-value heads: [R * K] rows of the cache seen as [slots * K, context * D]."""

    @property
    def num_queries(self) -> int:
        return 1 if self.single else self.positions_RQ.shape[1]

    def mask(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        if (mask := self.masks.get(sliding_window)) is None:
            hidden = self.keys_L > self.positions_RQ[:, None, :, None]
            if sliding_window is not None:
                hidden |= self.keys_L <= self.positions_RQ[:, None, :, None] - sliding_window
            mask = self.masks[sliding_window] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return mask

    def expanded_mask(self, sliding_window: int | None, dtype: torch.dtype, key_heads: int, repeats: int) -> torch.Tensor:
        key = (sliding_window, key_heads, repeats)
        if (mask := self.expanded.get(key)) is None:
            wide = self.mask(sliding_window, dtype)[:, :, None].expand(-1, key_heads, repeats, -1, -1)
            mask = self.expanded[key] = wide.reshape(-1, repeats * self.num_queries, self.keys_L.shape[0])
        return mask

    def gather(self, cached: torch.Tensor, heads: int, size: int) -> torch.Tensor:
        """[R * K, L, D] of this group's slots; one straight copy a row and head."""
        if (index := self.slot_heads.get(heads)) is None:
            index = self.slot_heads[heads] = (self.slots_R[:, None] * heads + torch.arange(heads, device=self.slots_R.device)).flatten()
        num_keys = self.keys_L.shape[0]
        flat = cached.view(-1, cached.shape[2] * size)[:, : num_keys * size]
        return flat.index_select(0, index).view(-1, num_keys, size)


@dataclass(slots=True)
class BatchPlan:
    """One forward's batch. Rows are packed in the order of `order`, which says where each given row went."""

    token_ids: torch.Tensor
    """[1, N]"""
    positions: torch.Tensor
    """[1, N]"""
    slots_N: torch.Tensor
    last_R: torch.Tensor
    """Packed index of each row's last token, in the order in which the rows were given."""
    groups: list[RowGroup]
    num_tokens: int
    layer: LayerShape | None = None
    """Of the layer that wrote last: the one whose attention comes next."""
    writes: dict[int, torch.Tensor] = field(default_factory=dict)
    """By number of key-value heads: [N * K] row of the flat cache that each key goes to."""

    def write_index(self, num_heads: int, context: int) -> torch.Tensor:
        if (index := self.writes.get(num_heads)) is None:
            heads = torch.arange(num_heads, device=self.slots_N.device)
            index = ((self.slots_N[:, None] * num_heads + heads) * context + self.positions[0][:, None]).flatten()
            self.writes[num_heads] = index
        return index


current_plan: ContextVar[BatchPlan] = ContextVar("current_plan")
told_to_attention: ContextVar[list[tuple[int, int | None]]] = ContextVar("told_to_attention")
"""By layer, during one forward of RECORDING_NAME: (query heads, sliding window)."""


def make_plan(new_tokens: Sequence[Sequence[int]], starts: Sequence[int], slots: Sequence[int], device: torch.device) -> BatchPlan:
    """Packs rows: `new_tokens[r]` follow `starts[r]` tokens that slot `slots[r]` already holds."""
    lengths = [len(tokens) for tokens in new_tokens]
    longest, num_keys = max(lengths), max(map(add, starts, lengths))
    if longest <= SHORT_TOKENS and num_keys * len(starts) <= _FEW_KEYS:
        if longest == 1:
            return _decode_plan(new_tokens, starts, slots, num_keys, device)
        return _short_plan(new_tokens, starts, slots, lengths, num_keys, device)
    lengths_R = np.array(lengths, np.int64)
    starts_R, slots_R = np.array(starts, np.int64), np.array(slots, np.int64)
    members = _group_rows(lengths_R, starts_R)
    identity = len(members) == 1
    order: Any = slice(None) if identity else np.concatenate(members)  # a slice copies nothing
    lengths, begins = lengths_R[order], starts_R[order]
    ends = lengths.cumsum()
    num_tokens = int(ends[-1])
    packed = np.empty((3, num_tokens), np.int64)
    packed[0] = list(chain.from_iterable(new_tokens if identity else [new_tokens[row] for row in order.tolist()]))
    packed[1] = np.arange(num_tokens) + (begins - (ends - lengths)).repeat(lengths)
    packed[2] = slots_R[order].repeat(lengths)
    last_R = np.empty_like(ends)
    last_R[order] = ends - 1
    packed_on_device = torch.from_numpy(packed).to(device)
    groups, position = [], 0
    for rows in members:
        groups.append(_make_group(position, lengths_R[rows], starts_R[rows], slots_R[rows], device))
        position = groups[-1].last
    return BatchPlan(packed_on_device[0:1], packed_on_device[1:2], packed_on_device[2], torch.from_numpy(last_R).to(device), groups, num_tokens)


def _decode_plan(new_tokens: Sequence[Sequence[int]], starts: Sequence[int], slots: Sequence[int], num_keys: int, device: torch.device) -> BatchPlan:
    """One new token a row and short contexts: the same plan with less work."""
    num_rows = len(starts)
    packed = torch.from_numpy(np.array(([tokens[0] for tokens in new_tokens], starts, slots, range(num_rows)), np.int64)).to(device)
    _, positions, slots_R, last_R = packed.unbind()
    keys_L = torch.arange(num_keys, device=device)
    group = RowGroup(0, num_rows, slots_R, positions[:, None], keys_L, single=True, fused=False, pad_RQ=None, unpad_N=None)
    return BatchPlan(packed[0:1], packed[1:2], slots_R, last_R, [group], num_rows)


def _short_plan(
    new_tokens: Sequence[Sequence[int]], starts: Sequence[int], slots: Sequence[int], lengths: Sequence[int], num_keys: int, device: torch.device
) -> BatchPlan:
    """Few new tokens a row and short contexts, one group: the same plan with less work, all its numbers in one transfer."""
    lengths_R, starts_R, slots_R = np.array((lengths, starts, slots), np.int64)
    num_rows, num_queries = len(lengths), max(lengths)
    queries_Q, ends_R = _QUERIES[:num_queries], lengths_R.cumsum()
    tokens_N = np.array([*chain.from_iterable(new_tokens)], np.int64)
    if min(lengths) == num_queries:
        positions = positions_N = (starts_R[:, None] + queries_Q).ravel()
        pads = []
    else:
        lengths_R1 = lengths_R[:, None]
        inside_RQ = np.minimum(queries_Q, lengths_R1 - 1)
        positions = (starts_R[:, None] + inside_RQ).ravel()
        unpad_N = (queries_Q < lengths_R1).ravel().nonzero()[0]
        positions_N, pads = positions[unpad_N], [((ends_R - lengths_R)[:, None] + inside_RQ).ravel(), unpad_N]
    parts = [tokens_N, positions_N, slots_R.repeat(lengths_R), ends_R - 1, slots_R, positions, *pads]
    on_device = torch.from_numpy(np.concatenate(parts)).to(device).split_with_sizes([part.size for part in parts])
    tokens, positions, slots_of_tokens, last, slots_of_rows, padded = on_device[:6]
    pad, unpad = on_device[6:] if pads else (None, None)
    keys_L = torch.arange(num_keys, device=device)
    positions_of_rows = padded.view(num_rows, num_queries)
    group = RowGroup(0, tokens_N.size, slots_of_rows, positions_of_rows, keys_L, single=False, fused=False, pad_RQ=pad, unpad_N=unpad)
    return BatchPlan(tokens[None], positions[None], slots_of_tokens, last, [group], tokens_N.size)


def _group_rows(lengths_R: np.ndarray[Any, Any], starts_R: np.ndarray[Any, Any]) -> list[Any]:
    """Row numbers by group (a slice for all of them): like numbers of queries together, and contexts within a factor of 4."""
    ends_R = lengths_R + starts_R
    queries = np.where(lengths_R <= SHORT_TOKENS, 0, np.ceil(np.log2(lengths_R))).astype(np.int64)
    windows = np.ceil(np.log2(np.maximum(ends_R / _SMALLEST_WINDOW, 1)) / 2).astype(np.int64)
    kinds = queries * 64 + windows
    return [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]


def _make_group(first: int, lengths: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], slots: np.ndarray[Any, Any], device: torch.device) -> RowGroup:
    num_queries = int(lengths.max())
    queries_Q = np.arange(num_queries)
    pad = unpad = None
    inside = np.minimum(queries_Q, lengths[:, None] - 1)  # a padded query repeats the row's last one: it always sees a key
    if int(lengths.min()) != num_queries:
        begins = np.cumsum(lengths) - lengths
        pad = torch.from_numpy((begins[:, None] + inside).ravel()).to(device)
        unpad = torch.from_numpy(np.flatnonzero((queries_Q < lengths[:, None]).ravel())).to(device)
    return RowGroup(
        first=first,
        last=first + int(lengths.sum()),
        slots_R=torch.from_numpy(slots).to(device),
        positions_RQ=torch.from_numpy(starts[:, None] + inside).to(device),
        keys_L=torch.arange(int((lengths + starts).max()), device=device),
        single=num_queries == 1,
        fused=num_queries >= _FUSED_QUERIES,
        pad_RQ=pad,
        unpad_N=unpad,
    )


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, N, D]; key and value are the whole slot tensors [slots, K, context, D]."""
    for name in ("position_bias", "s_aux", "cum_seq_lens_q"):
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} passes '{name}' to attention, which the transformers sampler does not compute.")
    if attention_mask is not None or kwargs.get("is_causal") is False:
        raise ModelError(f"{type(module).__name__} wants a mask of its own; the transformers sampler serves plain causal attention only.")
    plan = current_plan.get()
    shape = plan.layer
    if shape is None:
        raise ModelError(f"{type(module).__name__} attends without a KV cache.")
    if scaling is None:
        scaling = shape.key_size**-0.5
    query_NHD = query[0].transpose(0, 1)
    if len(plan.groups) == 1:
        output = _attend(plan.groups[0], query_NHD, key, value, shape, scaling, sliding_window, softcap)
    else:
        groups = plan.groups
        output = torch.cat([_attend(group, query_NHD[group.first : group.last], key, value, shape, scaling, sliding_window, softcap) for group in groups])
    return output[None], None


def recording_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, sliding_window: int | None = None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Stands in for attention during one forward: notes what each layer tells it, computes nothing."""
    told_to_attention.get().append((query.shape[1], sliding_window))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _attend(
    group: RowGroup,
    query_NHD: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shape: LayerShape,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[tokens of the group, H, D]"""
    key_heads, repeats, queries = shape.num_heads, shape.repeats, group.num_queries
    keys, values = group.gather(key, key_heads, shape.key_size), group.gather(value, key_heads, shape.value_size)
    padded = query_NHD if group.pad_RQ is None else query_NHD.index_select(0, group.pad_RQ)
    if group.fused and softcap is None:
        query_RHQD = padded.reshape(-1, queries, shape.query_heads, shape.key_size).transpose(1, 2)
        keys, values = keys.view(-1, key_heads, *keys.shape[1:]), values.view(-1, key_heads, *values.shape[1:])
        mask = group.mask(sliding_window, query_NHD.dtype)
        attended = functional.scaled_dot_product_attention(query_RHQD, keys, values, mask, scale=scaling, enable_gqa=repeats > 1)
        output = attended.transpose(1, 2).reshape(-1, shape.query_heads, shape.value_size)
        return output if group.unpad_N is None else output.index_select(0, group.unpad_N)
    if not group.single:
        padded = padded.reshape(-1, queries, key_heads, repeats, shape.key_size).permute(0, 2, 3, 1, 4)
    grouped = padded.reshape(-1, repeats * queries, shape.key_size)
    mask = group.expanded_mask(sliding_window, query_NHD.dtype, key_heads, repeats)
    if softcap is None:
        scores = torch.baddbmm(mask, grouped, keys.transpose(1, 2), alpha=scaling)
    else:
        scores = torch.tanh(torch.bmm(grouped, keys.transpose(1, 2)) * (scaling / softcap)) * softcap + mask
    # in float32, as transformers' eager attention does
    weights = scores.softmax(-1) if scores.dtype == torch.float32 else scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
    attended = torch.bmm(weights, values)
    if not group.single:
        attended = attended.view(-1, key_heads, repeats, queries, shape.value_size).permute(0, 3, 1, 2, 4)
    output = attended.reshape(-1, shape.query_heads, shape.value_size)
    return output if group.unpad_N is None else output.index_select(0, group.unpad_N)
