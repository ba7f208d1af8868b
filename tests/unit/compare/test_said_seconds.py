"""How long a run was said to take, before it or after a tenth of it, stands beside how long it took."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fakes.made_events import active, evaluated, lines_of, run_started, updated, window
from fakes.plan_profiles import plain_profile
from headrace import events as ev
from headrace.cli.compare import print_comparison
from headrace.cli.output import Output
from headrace.planner.distributions import Distribution
from headrace.planner.promise import promise_of_profile
from headrace.report.comparison import MeasuredRun, as_json, measure_run

DEVICES = [{"name": "sampler-0", "role": "sampler", "capacity": 8}, {"name": "learner-0", "role": "learner", "capacity": 1}]
PROMISED = {"by": "profile.json", "finish_seconds": {"p10": 90.0, "p50": 100.0, "p90": 120.0}}


def lines(promised: dict[str, Any] | None, *, updates: int = 40) -> list[dict[str, Any]]:
    """Updates of 2 s each, those after the first tenth 2.5 s."""
    begins = dataclasses.replace(run_started(DEVICES, num_updates=updates), promised=promised)
    timed: list[tuple[float, ev.Event]] = [(0.0, begins), (1.0, evaluated(0, 0.2)), (2.0, window("start"))]
    time = 2.0
    for number in range(1, updates + 1):
        time += 2.0 if number <= updates // 10 else 2.5
        timed += [(time, updated(number)), (time, ev.WeightsPublished(version=number, lineage=0, bytes=1, seconds=0.0))]
    timed += [(time, active("sampler-0", 10.0, running={4: 9.0})), (time, window("end")), *((time, evaluated(number, 0.5)) for number in (20, 30, updates))]
    return lines_of(timed)


def measured(promised: dict[str, Any] | None) -> MeasuredRun:
    return measure_run(lines(promised), arm="async", seed=0, run_dir="d", capacity=None)


def test_without_a_promise_a_run_is_held_against_what_it_said_after_a_tenth() -> None:
    run = measured(None)
    assert run.predicted_seconds == pytest.approx(40 * 2.0) and not run.was_promised
    assert run.wall_seconds == pytest.approx(4 * 2.0 + 36 * 2.5)


def test_a_promise_comes_first() -> None:
    run = measured(PROMISED)
    assert run.predicted_seconds == 100.0 and run.was_promised


@pytest.mark.parametrize(("promised", "cell", "words"), [(None, "98.0, -18%", "after a tenth"), (PROMISED, "98.0, +2%", "promised before them")])
def test_the_table_has_both(promised: dict[str, Any] | None, cell: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {"async": [measured(promised)]}
    result = {**as_json(runs, {"async": {}}, [], 0.4), "seeds": [0], "capacity": 8, "report": "r", "run_dir": "d"}
    print_comparison(runs, result, Output(command="compare", json=False))
    shown = capsys.readouterr().out
    assert cell in shown and words in shown
    assert result["arms"][0]["runs"][0]["predicted_seconds"] == runs["async"][0].predicted_seconds


def test_a_profile_promises_what_the_simulation_of_the_same_settings_takes() -> None:
    profile = plain_profile(answers=Distribution.constant(300.0), learn_seconds_per_token=1e-6)
    setup = {"run": {"mode": "async", "num_updates": 24}, "pool": {"groups_per_batch": 8, "max_staleness": 8}, "sampler": {"max_running": 16}}
    promise = promise_of_profile(profile, setup, by=Path("profile.json").name)
    assert promise["by"] == "profile.json"
    assert promise["finish_seconds"]["p10"] <= promise["finish_seconds"]["p50"] <= promise["finish_seconds"]["p90"]
    assert promise["step_seconds"] == pytest.approx(promise["finish_seconds"]["p50"] / 24)
