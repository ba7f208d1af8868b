"""Capacity (DESIGN section 2): the smallest running batch that reaches 90 % of the device's best tokens/s."""

from __future__ import annotations

from headrace.sampler.attention import make_plan
from headrace.sampler.model import ServedModel
from headrace.sampler.sampling import stream_key
from headrace.sampler.work import work
from headrace.types import RolloutKey, SamplingParameters

_REPEATS = 5
_SUFFICIENT = 0.9


def measure_capacity(model: ServedModel, max_running: int, max_context_tokens: int) -> tuple[int, float]:
    """(capacity, best tokens/s) of decode steps with half-full contexts on a scratch cache: of the model's work, as busy seconds are.

    The least time of some repeats counts.
    """
    sizes = _sizes(max_running)
    context = max(2, max_context_tokens // 2)
    cache = model.new_cache(max_running, context)
    rates = {}
    for size in (sizes[0], *sizes):  # the first one warms up
        streams = [stream_key(0, RolloutKey(0, row, 0), 0) for row in range(size)]
        parameters = [SamplingParameters()] * size
        best = float("inf")
        for repeat in range(_REPEATS):
            plan = make_plan([[0]] * size, [context - 1] * size, list(range(size)), model.device)
            best = min(best, work(model, cache, plan, plan.last_R, parameters, streams, [repeat] * size).seconds)
        rates[size] = size / best
    most = max(rates.values())
    return next(size for size in sizes if rates[size] >= _SUFFICIENT * most), most


def _sizes(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and the largest."""
    sizes = {largest}
    power = 1
    while power < largest:
        sizes |= {power, min(largest, power * 3 // 2)}
        power *= 2
    return sorted(sizes)
