"""How long one engine takes for a given set of rollouts: event by event over completions, not over tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planner.fits import DecodeFit


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    seconds: float
    """Until the last rollout is done."""
    occupied_seconds: float
    """Integral of min(capacity, running) / capacity."""
    busy_seconds: float
    """In model forward."""
    tokens: float
    rollout_seconds: float
    """Summed over the rollouts, from start to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """What a step costs besides the fit, and what bounds it."""

    fit: DecodeFit
    slots: int
    kv_capacity_tokens: int | None
    gap_seconds: float
    """Between two steps."""
    gap_per_sequence: float
    """The part that grows with the running batch."""
    extra_per_token: float
    """Prompt and observation tokens computed for each sampled one."""
    start_context: float
    """Context tokens of a rollout when it begins to answer."""
    context_growth: float = 1.0
    """Context tokens added by each sampled one: more than 1 where observations come between."""
    delay_steps: float = 0.0
    """Decode steps for each token in which an environment's answer waits to be noticed."""


def step_seconds(work: EngineWork, running: float, context_tokens: float) -> float:
    """One decode step with what goes with it; it serves one sequence at least."""
    running = max(1.0, running)
    gap = work.gap_seconds + work.gap_per_sequence * running
    return work.fit.seconds(running, context_tokens, work.extra_per_token * running) + gap


def usable_slots(work: EngineWork, context_tokens: float) -> float:
    """Sequences that may run at once: decode slots, or what the KV cache holds."""
    if work.kv_capacity_tokens is None:
        return float(work.slots)
    return max(1.0, min(float(work.slots), work.kv_capacity_tokens / max(context_tokens, 1.0)))


def most_in_flight(work: EngineWork, context_tokens: float, wait_per_token: float, gather_seconds: float, queue_share: float = 0.0) -> float:
    """Rollouts that one worker holds when nothing else bounds it: it starts more as long as its slots, and a queue of `queue_share` of them, are not
    spoken for.

    A rollout in its environment gives its place away after `gather_seconds`, so places = running + queued + tokens/s x min(wait, gather).
    """
    slots = usable_slots(work, context_tokens)
    places = slots * (1.0 + queue_share)
    if wait_per_token <= 0:
        return places
    low, high = 0.0, slots
    for _ in range(26):
        middle = (low + high) / 2
        step = step_seconds(work, middle, context_tokens)
        spoken_for = middle * (1.0 + min(wait_per_token + work.delay_steps * step, gather_seconds) / step)
        low, high = (middle, high) if spoken_for < places else (low, middle)
    step = step_seconds(work, high, context_tokens)
    queued = max(0.0, places - high * (1.0 + min(wait_per_token + work.delay_steps * step, gather_seconds) / step))
    return high * (1.0 + work.delay_steps + wait_per_token / step) + queued


def pace(work: EngineWork, in_flight: float, context_tokens: float, wait_per_token: float) -> tuple[float, float]:
    """(mean running, seconds a token of one rollout) with `in_flight` rollouts that wait `wait_per_token` seconds between tokens.

    Little's law inside the engine: running = in_flight x step / (step + wait), at most the slots; the rest queues for a slot.
    """
    slots = usable_slots(work, context_tokens)
    low, high = 0.0, min(in_flight, slots)
    if wait_per_token > 0:
        for _ in range(26):
            middle = (low + high) / 2
            step = step_seconds(work, middle, context_tokens)
            low, high = (middle, high) if middle * (step * (1.0 + work.delay_steps) + wait_per_token) < in_flight * step else (low, middle)
    running = max(high, 1e-9)
    step = step_seconds(work, running, context_tokens)
    alone = step * (1.0 + work.delay_steps) + wait_per_token if wait_per_token > 0 else step
    return running, max(alone, step * in_flight / running)


def play_round(work: EngineWork, lengths: Sequence[float], waits: Sequence[float], capacity: float) -> Round:
    """A fixed set of rollouts on one engine: `lengths` in tokens, in the order they start, `waits` seconds of each in its environment.

    As many as there are slots run at once (all, where they wait); when one is done the next starts. Sync decode of a fixed batch is
    the sum over l of lat(n_l), n_l the sequences longer than l (PipelineRL, arXiv 2509.19128; Applied Compute, talk of Dec 2025).
    """
    total_tokens, total_wait = sum(lengths), sum(waits)
    wait_per_token = total_wait / total_tokens if total_tokens else 0.0
    at_once = len(lengths) if wait_per_token > 0 else work.slots
    running: list[tuple[float, float]] = []
    """(position at which it ends, position at which it began): positions count tokens of the rollouts in flight."""
    position = seconds = occupied = busy = rollouts = 0.0
    began, following = 0.0, 0
    while running or following < len(lengths):
        while following < len(lengths) and len(running) < at_once:
            heapq.heappush(running, (position + lengths[following], position))
            began, following = began + position, following + 1
        count = len(running)
        end, start = heapq.heappop(running)
        ahead = max(0.0, end - position)
        context = work.start_context + work.context_growth * (position - began / count + ahead / 2)
        decoding, per_token = pace(work, count, context, wait_per_token)
        elapsed = ahead * per_token
        together = max(1.0, decoding)  # a step serves one sequence at least
        busy_part = elapsed * min(1.0, count / together * work.fit.seconds(together, context, work.extra_per_token * together) / per_token)
        seconds, busy = seconds + elapsed, busy + busy_part
        occupied += busy_part * min(1.0, together / capacity)
        rollouts += count * elapsed
        position, began = max(position, end), began - start
    return Round(seconds=seconds, occupied_seconds=occupied, busy_seconds=busy, tokens=total_tokens, rollout_seconds=rollouts)
