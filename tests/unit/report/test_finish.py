"""The time to finish, from made runs whose end is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.report.finish import Finish, FinishMeter


def run_of(durations: list[float], length: Callable[[int], float] = lambda update: 20.0, *, num_updates: int | None = None) -> Iterator[dict[str, Any]]:
    """Each update after so many seconds, with 8 rollouts of about this length finished before it."""
    chance = random.Random(1)
    yield {"event": "run_started", "time": 0.0, "num_updates": num_updates or len(durations)}
    yield {"event": "timed_window", "phase": "start", "time": 5.0}
    time = 5.0
    for update, seconds in enumerate(durations):
        time += seconds
        for _ in range(8):
            yield {"event": "rollout_finished", "time": time, "tokens": length(update) * chance.uniform(0.8, 1.2)}
        yield {"event": "updated", "time": time, "version": update + 1}


def said_after(updates: int, lines: Iterator[dict[str, Any]]) -> Finish | None:
    meter = FinishMeter()
    for line in lines:
        meter.add(line)
        if line["event"] == "updated" and line["version"] == updates:
            break
    return meter.forecast()


def test_an_even_run_ends_when_its_pace_says() -> None:
    said = said_after(10, run_of([3.0] * 100))
    assert said is not None
    assert said.seconds == pytest.approx(270.0)
    assert 225.0 < said.low < 270.0 < said.high < 315.0


def test_nothing_is_said_before_the_first_update_and_after_the_last_one() -> None:
    assert said_after(0, run_of([], num_updates=10)) is None
    assert said_after(10, run_of([3.0] * 10)) is None


def test_the_slow_beginning_of_a_run_is_forgotten() -> None:
    said = said_after(40, run_of([9.0] * 15 + [3.0] * 85))
    assert said is not None and said.seconds == pytest.approx(180.0)


def test_rollouts_that_grow_make_the_rest_longer_than_the_pace() -> None:
    """At the end lengths and updates are 2.6 times what they began with."""
    grown = [1.0 + update / 150 for update in range(240)]
    said = said_after(80, run_of(grown, lambda update: 20.0 * grown[update]))
    assert said is not None
    left, at_the_pace = sum(grown[80:]), 160 * grown[60]
    assert abs(said.seconds - left) < 0.5 * abs(at_the_pace - left)
    assert said.low < left < said.high


def test_lengths_that_only_scatter_are_not_carried_on() -> None:
    chance = random.Random(3)
    said = said_after(60, run_of([2.0] * 200, lambda update: 20.0 * chance.lognormvariate(0.0, 0.4)))
    assert said is not None and said.seconds == pytest.approx(280.0)


def test_four_of_five_intervals_hold_the_end_of_uneven_runs() -> None:
    inside = 0
    for seed in range(100):
        chance = random.Random(seed)
        durations = [chance.lognormvariate(0.0, 0.5) for _ in range(120)]
        said = said_after(24, run_of(durations))
        assert said is not None
        inside += said.low <= sum(durations[24:]) <= said.high
    assert 75 <= inside <= 97


def test_a_long_run_is_remembered_in_stretches() -> None:
    meter = FinishMeter()
    for line in run_of([1.0] * 3000, num_updates=6000):
        meter.add(line)
    said = meter.forecast()
    assert said is not None and said.seconds == pytest.approx(3000.0, rel=1e-6)
    assert len(meter._marks) <= 600 and len(meter._lengths) <= 600


def test_a_run_that_goes_on_is_judged_by_its_new_pace() -> None:
    meter = FinishMeter()
    for line in run_of([9.0] * 10, num_updates=30):
        meter.add(line)
    meter.add({"event": "run_resumed", "time": 200.0, "num_updates": 30, "resumed_from_update": 8})
    meter.add({"event": "timed_window", "phase": "start", "time": 210.0})
    for index in range(6):
        meter.add({"event": "updated", "time": 212.0 + 2.0 * index, "version": 9 + index})
    said = meter.forecast()
    assert said is not None and said.seconds == pytest.approx(16 * 2.0)
