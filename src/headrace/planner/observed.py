"""How a run went, in the terms of its prediction: what forecasts are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.planner.profile import Observed

if TYPE_CHECKING:
    from headrace.planner.measure import Recording

Line = Mapping[str, Any]
_WARM_UP = 0.1
"""Share of the updates left out: pool and slots fill."""


def observe(recording: Recording) -> Observed | None:
    """None when the run made too few updates for a steady state to show."""
    updated = recording.updated
    skipped = max(1, round(_WARM_UP * len(updated)))
    if len(updated) < skipped + 2:
        return None
    start, end = _finished(updated[skipped - 1]), _finished(updated[-1])
    seconds = max(end - start, 1e-9)
    kept = updated[skipped:]
    active = [line for line in recording.active if start < line["time"] <= end + 1.5]
    samplers, learners = recording.devices("sampler", "colocated"), recording.devices("learner", "colocated")
    inside = [line for line in recording.rollouts if start < line["time"] <= end]
    offered = [line["trajectories"] + line["filtered"] for line in recording.taken]
    covered = sum(line["activity"]["seconds"] for line in active)
    return Observed(
        mode=str(recording.started["mode"]),
        placement=str(recording.started["placement"]),
        num_sampler_devices=len(samplers),
        num_learner_devices=len(learners),
        slots_per_sampler=int(recording.setting("sampler", "max_running", 64)),
        batch_trajectories=round(sum(offered) / len(offered)) if offered else 0,
        max_staleness=int(recording.setting("pool", "max_staleness", 0)),
        num_updates=len(updated),
        step_seconds=seconds / len(kept),
        trajectories_per_second=len(inside) / seconds,
        mean_in_flight=_mean([line["rollouts_in_flight"] for line in recording.levels if start < line["time"] <= end]),
        rollout_seconds=_mean([line["seconds"] or 0.0 for line in inside]),
        staleness_mean=_staleness(kept),
        learner_busy_fraction=min(1.0, sum(line["busy_seconds"] for line in kept) / seconds),
        sampler_busy_fraction=min(1.0, sum(line["activity"]["busy_seconds"] for line in active) / covered) if covered > 0 else 0.0,
        mean_running=_mean_running(active),
        max_in_flight=recording.setting("sampler", "max_in_flight", None),
        gather_seconds=recording.setting("sampler", "gather_seconds", None),
        queue_share=recording.setting("sampler", "queue_share", 0.0),
        selection=str(recording.setting("pool", "selection", "ready_first")),
    )


def _finished(line: Line) -> float:
    return float(line["time"] - line.get("finished_seconds_ago", 0.0))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _staleness(updated: Sequence[Line]) -> float | None:
    """Of the mean trained token."""
    tokens = sum(line["statistics"]["trained_tokens"] for line in updated)
    if not tokens:
        return None
    return float(sum(line["statistics"]["staleness_mean"] * line["statistics"]["trained_tokens"] for line in updated) / tokens)


def _mean_running(active: Sequence[Line]) -> float:
    busy = weighted = 0.0
    for line in active:
        for running, seconds in line["activity"]["running_seconds"].items():
            busy, weighted = busy + seconds, weighted + int(running) * seconds
    return weighted / busy if busy > 0 else 0.0
