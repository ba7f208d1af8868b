"""Hand-made runs whose numbers are known, written by the real event classes so that the fields are those of events.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace import events as ev
from headrace.event_log import EventLog
from headrace.events import Event
from headrace.types import WorkerActivity
from headrace.updates import UpdateStatistics


def lines_of(timed: Iterable[tuple[float, Event]]) -> list[dict[str, Any]]:
    """The event lines of (time, event) pairs, time counted from the first."""
    time = 0.0
    lines: list[dict[str, Any]] = []
    log = EventLog(None, lambda: time)
    log.subscribe(lambda line: lines.append(dict(line)))
    for at, event in timed:
        time = at
        log.emit(event)
    return lines


def run_started(devices: list[dict[str, Any]], *, placement: str = "split", mode: str = "async", num_updates: int = 10) -> ev.RunStarted:
    return ev.RunStarted(
        run_id="made", headrace="0", runtime="local", clock="monotonic", wall_time=None, mode=mode, placement=placement, seed=3, lineage=0,
        resumed_from_update=None, devices=devices, recipe="door", num_updates=num_updates, startup_seconds=2.5,
    )  # fmt: skip


def active(
    role: str,
    seconds: float,
    *,
    running: Mapping[int, float],
    prefill: float = 0.0,
    idle: Mapping[str, float] | None = None,
    tokens: int = 0,
    in_flight: int = 1,
    **more: Any,
) -> ev.WorkerActive:
    """`more`: counters of WorkerActivity."""
    return ev.WorkerActive(
        role=role,
        in_flight=in_flight,
        activity=WorkerActivity(
            seconds=seconds, busy_seconds=sum(running.values()) + prefill, running_seconds=running, idle_seconds=idle or {}, decode_steps=1,
            sampled_tokens=tokens, apply_seconds=0.0, **{"applied_updates": 0, "prefill_tokens": 0, **more},
        ),
    )  # fmt: skip


def statistics(
    histogram: Mapping[int, int], *, key_mean: float | None = None, key_max: int | None = None, keys: Mapping[int, int] | None = None
) -> UpdateStatistics:
    """`keys`: ages of the key tokens among them; a log without them has their mean and maximum only."""
    if keys:
        key_mean, key_max = sum(age * count for age, count in keys.items()) / sum(keys.values()), max(keys)
    tokens = sum(histogram.values())
    return UpdateStatistics(
        loss=0.1, gradient_norm=1.0, learning_rate=1e-3, entropy=1.0, kl_sampler_learner=0.0, ratio_mean=1.0, ratio_variance=0.0, ratio_max=1.0,
        effective_sample_size=1.0, clipped_fraction=0.0, masked_fraction=0.0, staleness_mean=sum(k * n for k, n in histogram.items()) / tokens,
        staleness_max=max(histogram), staleness_histogram=histogram, key_staleness_mean=key_mean, key_staleness_max=key_max, trained_tokens=tokens,
        trained_trajectories=1, padded_tokens=tokens, key_staleness_histogram=keys or {},
    )  # fmt: skip


def updated(version: int, *, seconds: float = 1.0, busy: float = 1.0, reward: float = 0.5, numbers: UpdateStatistics | None = None) -> ev.Updated:
    return ev.Updated(
        role="learner", selection=version, version=version, lineage=0, reward_mean=reward, seconds=seconds, busy_seconds=busy, refused=None, statistics=numbers
    )


def evaluated(version: int, mean: float) -> ev.Evaluated:
    return ev.Evaluated(role="evaluator", version=version, lineage=0, mean=mean, interval95=[mean - 0.1, mean + 0.1], num_rollouts=64, metrics={}, seconds=1.0)


def window(phase: str) -> ev.TimedWindow:
    return ev.TimedWindow(phase=phase)


def taken(selection: int, wait_seconds: float) -> ev.SelectionTaken:
    return ev.SelectionTaken(selection=selection, learner_version=0, lineage=0, trajectories=8, filtered=0, wait_seconds=wait_seconds)
