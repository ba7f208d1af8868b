"""Sums over the trained tokens of one trajectory, for flat token tensors. Shapes: _N trained tokens of a micro-batch, _B its rows."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Natural log. Log-ratios are held inside +-20 before exp, so that one absurd token gives a large number and not an infinity."""


def ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """exp(logprobs - base_logprobs), any shape; exactly 1 where both are equal."""
    return torch.exp((logprobs - base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_sum(values_N: Tensor, row_N: Tensor, included_N: Tensor) -> Tensor:
    """[N]: at each token the sum of `values_N` over the included tokens of its own row."""
    num_rows = int(row_N.max()) + 1 if row_N.numel() else 0
    sums_B = torch.zeros(num_rows, dtype=values_N.dtype, device=values_N.device)
    return sums_B.index_add(0, row_N, values_N * included_N.to(values_N.dtype))[row_N]


def sequence_mean(values_N: Tensor, row_N: Tensor, included_N: Tensor) -> Tensor:
    """[N]: at each token the mean of `values_N` over the included tokens of its own row; 0 for a row without any."""
    counts_N = sequence_sum(torch.ones_like(values_N), row_N, included_N)
    return sequence_sum(values_N, row_N, included_N) / counts_N.clamp(min=1)


def sequence_ratio(logprobs_N: Tensor, base_logprobs_N: Tensor, row_N: Tensor, included_N: Tensor) -> Tensor:
    """[N]: at each token the importance ratio of its whole trajectory, the product over its included tokens."""
    return torch.exp(sequence_sum(logprobs_N - base_logprobs_N, row_N, included_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
