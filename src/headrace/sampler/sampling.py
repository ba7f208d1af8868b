"""Drawing one token a row from logits: random streams, distribution, inverse CDF, log-probability. Pure functions.

Shapes: _R rows, _V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.types import RolloutKey, SamplingParameters

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_ONE, _12, _27, _30, _31 = (np.uint64(number) for number in (1, 12, 27, 30, 31))
_GOLDEN_64, _MULTIPLIER_1_64, _MULTIPLIER_2_64 = (np.uint64(number) for number in (_GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2))


class Draws(NamedTuple):
    """What one step drew."""

    tokens: list[int]
    """[R]"""
    logprobs: list[float]
    """[R] natural log, <= 0; NaN where the row's logits held a NaN or +inf, whose token means nothing."""
    logprobs_RV: torch.Tensor
    """[R, V] of the distribution each was drawn from; of a greedy row at temperature 1."""


def stream_key(seed: int, key: RolloutKey, step: int, *more: int) -> int:
    """64 bits that name one action's random stream; a chain of SplitMix64 finalizers over the numbers.

    `more`: (round, purpose) of streams that verification uses, so that no number serves twice.
    """
    state = _mix((_rollout_state(seed, key) ^ step & _MASK) + _GOLDEN & _MASK)
    return _chain(state, more) if more else state


@lru_cache(4096)
def _rollout_state(seed: int, key: RolloutKey) -> int:
    """The part of the chain that all actions of a rollout share."""
    return _chain(0, (seed, *key))


def _chain(state: int, parts: tuple[int, ...]) -> int:
    for part in parts:
        state = _mix((state ^ (part & _MASK)) + _GOLDEN & _MASK)
    return state


def uniforms(stream_keys: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """[R] one uniform in [0, 1), a multiple of 2^-52, for token `positions[r]` of stream `stream_keys[r]`.

    Counter-based SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", section 4): a number
    depends on (stream, position) only, so it cannot depend on who shares the batch or on how often an action was begun again.
    """
    state = np.array(stream_keys, dtype=np.uint64)
    state += (np.array(positions, dtype=np.uint64) + _ONE) * _GOLDEN_64
    state ^= state >> _30
    state *= _MULTIPLIER_1_64
    state ^= state >> _27
    state *= _MULTIPLIER_2_64
    state ^= state >> _31
    return (state >> _12).astype(np.float64) * 2.0**-52


def draw(logits_RV: torch.Tensor, parameters: Sequence[SamplingParameters], uniforms_R: npt.NDArray[np.float64]) -> Draws:
    """One token a row by inverse CDF in float64, with its log-probability under the distribution drawn from.

    Temperature 0 takes the most likely token and states its log-probability at temperature 1.
    """
    first = parameters[0]
    plain = first.temperature > 0 and first.top_k == 0 and first.top_p >= 1
    if plain and all(p is first or (p.temperature == first.temperature and p.top_k == 0 and p.top_p >= 1) for p in parameters):
        if first.temperature != 1:
            logits_RV = logits_RV.double() / first.temperature
        return _draw_from(torch.log_softmax(logits_RV, -1, dtype=torch.float64), uniforms_R, None)
    greedy = [p.temperature == 0 for p in parameters]
    temperatures = torch.tensor([p.temperature or 1.0 for p in parameters], dtype=torch.float64, device=logits_RV.device)
    logprobs_RV = torch.log_softmax(logits_RV.double() / temperatures[:, None], -1)
    if any(p.top_k > 0 or p.top_p < 1 for p, is_greedy in zip(parameters, greedy, strict=True) if not is_greedy):
        logprobs_RV = _truncate(logprobs_RV, parameters)
    return _draw_from(logprobs_RV, uniforms_R, greedy if any(greedy) else None)


def _draw_from(logprobs_RV: torch.Tensor, uniforms_R: npt.NDArray[np.float64], greedy: list[bool] | None) -> Draws:
    cumulative_RV = logprobs_RV.exp().cumsum_(-1)
    targets_R1 = torch.from_numpy(uniforms_R).to(logprobs_RV.device)[:, None] * cumulative_RV[:, -1:]
    tokens_R1 = torch.searchsorted(cumulative_RV, targets_R1, right=True)
    # A uniform is at most 1 - 2^-52, so a target lies below the total whatever the rounding, and the token found has a probability
    # above 0. Only a row of NaN points past the end.
    tokens_R1.clamp_(max=logprobs_RV.shape[1] - 1)
    if greedy is not None:
        chosen_R1 = torch.tensor(greedy, device=logprobs_RV.device)[:, None]
        tokens_R1 = torch.where(chosen_R1, logprobs_RV.argmax(-1, keepdim=True), tokens_R1)
    logprobs_R1 = logprobs_RV.gather(-1, tokens_R1).clamp_(max=0.0)
    return Draws(tokens_R1.flatten().tolist(), logprobs_R1.flatten().tolist(), logprobs_RV)


def entropies(logprobs_RV: torch.Tensor) -> list[float]:
    """[R] nats"""
    values: list[float] = torch.special.entr(logprobs_RV.exp()).sum(-1).tolist()
    return values


def _truncate(logprobs_RV: torch.Tensor, parameters: Sequence[SamplingParameters]) -> torch.Tensor:
    """Keeps each row's top_k tokens, then the fewest of them whose probability reaches top_p, and normalises again."""
    vocabulary = logprobs_RV.shape[1]
    device = logprobs_RV.device
    greedy = [p.temperature == 0 for p in parameters]
    top_k = torch.tensor([vocabulary if g or p.top_k == 0 else p.top_k for p, g in zip(parameters, greedy, strict=True)], device=device)
    top_p = torch.tensor([2.0 if g or p.top_p >= 1 else p.top_p for p, g in zip(parameters, greedy, strict=True)], dtype=torch.float64, device=device)
    sorted_RV, order_RV = logprobs_RV.sort(dim=-1, descending=True, stable=True)
    sorted_RV = sorted_RV.masked_fill(torch.arange(vocabulary, device=device) >= top_k[:, None], -math.inf)
    sorted_RV = torch.log_softmax(sorted_RV, -1)
    before_RV = sorted_RV.exp().cumsum(-1) - sorted_RV.exp()
    sorted_RV = sorted_RV.masked_fill(before_RV >= top_p[:, None], -math.inf)
    return torch.log_softmax(torch.empty_like(logprobs_RV).scatter_(-1, order_RV, sorted_RV), -1)


def _mix(state: int) -> int:
    state = (state ^ (state >> 30)) * _MULTIPLIER_1 & _MASK
    state = (state ^ (state >> 27)) * _MULTIPLIER_2 & _MASK
    return state ^ (state >> 31)
