"""The model's work in one step, and how long it took: what a device is busy with (DESIGN section 2).

Forward, logits, drawing, log-probabilities; not the Python that prepares a step and spreads its tokens. Engine and capacity.py both time
their steps here, so that capacity and occupancy are of one meter. A step that draws ends with its tokens on the host, which waits for a
GPU; one that draws nothing waits for it here, or its work would run beside what counts as bookkeeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from headrace.sampler.attention import BatchPlan
from headrace.sampler.kv_cache import SlotCache
from headrace.sampler.model import ServedModel
from headrace.sampler.sampling import Draws, draw, entropies, uniforms
from headrace.types import SamplingParameters


class StepWork(NamedTuple):
    draws: Draws | None
    """None where no row draws."""
    entropies: list[float] | None
    """[R] nats; None where none is measured."""
    seconds: float


def work(
    model: ServedModel,
    cache: SlotCache,
    plan: BatchPlan,
    logits_at: torch.Tensor,
    parameters: Sequence[SamplingParameters],
    streams: Sequence[int],
    positions: Sequence[int],
    *,
    measures_entropy: bool = False,
) -> StepWork:
    """One forward, and one token for each of the rows that `parameters`, `streams` and `positions` ([R] each) describe.

    `logits_at`: the packed position of each of these rows; where no row draws, of any.
    """
    started = perf_counter()
    logits_RV = model.forward(cache, plan, logits_at)
    draws = spread = None
    if parameters:
        draws = draw(logits_RV, parameters, uniforms(streams, positions))
        if measures_entropy:
            spread = entropies(draws.logprobs_RV)
    else:
        wait_for(model.device)
    return StepWork(draws, spread, perf_counter() - started)


def wait_for(device: torch.device) -> None:
    """Until what was begun on a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
