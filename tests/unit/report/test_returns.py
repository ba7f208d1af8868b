"""A run that went back to a checkpoint by itself, as progress, watch, report, comparison and utilization show it."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fakes.made_events import active, evaluated, lines_of, run_started, statistics, updated, window
from headrace import events as ev
from headrace.report import words
from headrace.report.comparison import evaluation_curve
from headrace.report.progress import ProgressView
from headrace.report.record import load_run
from headrace.report.summary import summarize
from headrace.report.timeline import lanes
from headrace.report.utilization import timed_windows, utilization
from headrace.report.watch import WatchState, frame

SPLIT = [{"name": "sampler-0", "role": "sampler", "capacity": 8}, {"name": "learner-0", "role": "learner", "capacity": 1}]
LOST = ev.RoleLost(role="learner", error="Process learner-0 was ended by signal SIGKILL.", rollouts=0, losses=1, restarted=True)


def resumed(cause: str, *, seconds: float = 3.0, factor: float = 1.0) -> ev.RunResumed:
    started = run_started(SPLIT)
    values = {field.name: getattr(started, field.name) for field in dataclasses.fields(started)}
    return ev.RunResumed(
        **{**values, "lineage": 1, "resumed_from_update": 2}, checkpoint="c/update_000002", pooled=5, void=1, lost=8, again=0, passed_over=[],
        cause=ev.ResumeCause(cause), reason="it went wrong.", undone_updates=2, seconds=seconds, learning_rate_factor=factor,
    )  # fmt: skip


def run(cause: str = "learner_lost", *, goes_on: bool = True, factor: float = 1.0) -> list[tuple[float, ev.Event]]:
    """Four updates in 4 s, 3 s back to update 2, three updates in 3 s."""
    timed: list[tuple[float, ev.Event]] = [(0.0, run_started(SPLIT)), (0.0, window("start"))]

    def work(time: float, version: int, lineage: int, reward: float) -> list[tuple[float, ev.Event]]:
        update = updated(version, reward=reward, numbers=statistics({0: 1}))
        published = ev.WeightsPublished(version=version, lineage=lineage, bytes=8, seconds=0.0)
        return [
            (time, active("sampler-0", 1.0, running={8: 1.0})),
            (time, dataclasses.replace(update, lineage=lineage)),
            (time, published),
            (time, dataclasses.replace(evaluated(version, reward), lineage=lineage)),
        ]

    for version in (1, 2, 3, 4):
        timed += work(float(version), version, 0, 0.1 * version)
    timed += [(4.0, LOST)] if cause == "learner_lost" else []
    if goes_on:
        timed += [(7.0, resumed(cause, factor=factor)), (7.0, window("start"))]
        for version in (3, 4, 5):
            timed += work(5.0 + version, version, 1, 0.9)
        timed.append((10.0, window("end")))
    return timed


def watched(timed: list[tuple[float, ev.Event]]) -> tuple[WatchState, str]:
    state = WatchState()
    for line in lines_of(timed):
        state.add(line)
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(frame(state, name="r", width=160))
    return state, console.export_text()


@pytest.mark.parametrize("cause", ["learner_lost", "roll_back"])
def test_the_time_until_the_run_goes_on_is_allocated_and_idle_with_its_reason(cause: str) -> None:
    lines = lines_of(run(cause))
    windows = timed_windows(lines)
    assert windows.spans == ((0.0, 10.0),)
    sampler, learner = utilization(lines, windows)["devices"]
    assert sampler["idle_seconds"] == pytest.approx({"restart": 3.0}) and sampler["busy_fraction"] == pytest.approx(0.7)
    assert learner["idle_seconds"]["restart"] == pytest.approx(3.0)
    for lane, slices in ((lanes(lines)[0], "sampling"), (lanes(lines)[1], "learning")):
        assert [(each.start, each.end) for each in getattr(lane, slices) if "restart" in each.seconds] == [(4.0, 7.0)]


def test_the_time_between_two_commands_is_not_allocated() -> None:
    assert timed_windows(lines_of(run("command"))).spans == ((0.0, 4.0), (7.0, 10.0))


def test_watch_cuts_its_curves_back_and_says_from_where_the_learner_was_restarted() -> None:
    state, text = watched(run())
    assert state.rewards.values == state.evaluations.values == pytest.approx([0.1, 0.2, 0.9, 0.9, 0.9])
    assert "! learner restarted from update 2 (lineage 1); 2 updates undone, 3 s: it went wrong." in text
    assert "5/10 updates" in text and "came back" not in text
    assert "! rolled back to update 2 (lineage 1), learning rate x 0.5; 2 updates undone, 3 s: it went wrong." in watched(run("roll_back", factor=0.5))[1]
    assert "! learner was lost and is started again: Process learner-0" in watched(run(goes_on=False))[1]
    assert "restarted from" not in watched(run("command"))[1]


def test_watch_tells_a_silence_while_the_learner_is_restarted_from_any_other() -> None:
    for goes_on, says in ((False, "no event for 50 s: its learner is being restarted, or it was killed"), (True, "no event for 50 s: killed, or its machine")):
        state, _ = watched(run(goes_on=goes_on))
        console = Console(width=160, file=io.StringIO(), record=True)
        console.print(frame(state, name="r", width=160, silent_seconds=50.0))
        assert says in console.export_text()


def test_progress_counts_from_the_checkpoint_on_and_says_why() -> None:
    def told(timed: list[tuple[float, ev.Event]]) -> tuple[ProgressView, str]:
        stream = io.StringIO()
        view = ProgressView(stream, width=lambda: 200, clock=lambda: 0.0)
        for line in lines_of(timed):
            view.on_event(line)
        return view, stream.getvalue()

    view, text = told([*run(goes_on=False), (7.0, resumed("learner_lost"))])
    assert view.text().startswith("update 2/10") and view.seconds_to_finish() is None
    assert "learner was lost: Process learner-0 was ended by signal SIGKILL. The run goes back to its newest checkpoint.\n" in text
    assert "the learner was restarted, 2 updates undone; goes on from update 2 as lineage 1" in text
    text = told(run("roll_back", factor=0.25))[1]
    assert "rolled back, 2 updates undone, learning rate x 0.25 from now on, because it went wrong; goes on from update 2 as lineage 1" in text


def test_report_tells_how_often_the_run_went_back_and_what_it_cost(tmp_path: Path) -> None:
    def record_of(timed: list[tuple[float, ev.Event]]) -> Any:
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_of(timed)))
        return load_run(tmp_path)

    record = record_of(run())
    said = "The run went back to a checkpoint 1 time because the learner was lost: 2 updates were made again, and it stood still for 3 s at most."
    assert words.returns(record) == f"{said} The last time it went on from update 2 as lineage 1: it went wrong."
    assert [(line["version"], line["lineage"]) for line in record.surviving("updated")] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert words.returns(record_of(run("command"))) is None
    assert "1 time as a rollback" in str(words.returns(record_of(run("roll_back", factor=0.5))))


def test_the_curve_of_a_comparison_has_what_survived_at_the_time_it_was_reached() -> None:
    curve = evaluation_curve(lines_of(run()))
    assert [(point.version, point.seconds, round(point.mean, 2)) for point in curve] == [
        (1, 1.0, 0.1),
        (2, 2.0, 0.2),
        (3, 8.0, 0.9),
        (4, 9.0, 0.9),
        (5, 10.0, 0.9),
    ]


def test_between_the_return_and_the_next_update_a_run_is_at_its_checkpoint() -> None:
    summary = summarize(lines_of([*run(goes_on=False), (7.0, resumed("learner_lost"))]))
    assert (summary["num_updates"], summary["lineage"]) == (2, 1)
