"""The progress line and the end picture, on made events."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from fakes.made_events import active, evaluated, lines_of, run_started, statistics, updated, window
from headrace import events as ev
from headrace.report.picture import chart, end_picture
from headrace.report.progress import ProgressView, duration
from headrace.report.summary import summarize

SPLIT = [{"name": "sampler-0", "role": "sampler", "capacity": 8}, {"name": "learner-0", "role": "learner", "capacity": 1}]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def training(num_updates: int = 20) -> list[tuple[float, ev.Event]]:
    timed: list[tuple[float, ev.Event]] = [(0.0, run_started(SPLIT, num_updates=num_updates)), (1.0, evaluated(0, 0.2)), (2.0, window("start"))]
    for number in range(1, 11):
        timed.append((2.0 + number, active("sampler-0", 1.0, running={8: 1.0}, tokens=500)))
        timed.append((2.0 + number, updated(number, reward=number / 10, numbers=statistics({1: 10, 2: 10}))))
    return timed


def shown(stream: io.StringIO, timed: list[tuple[float, ev.Event]], *, width: int = 200) -> ProgressView:
    clock = iter(range(10_000))
    view = ProgressView(stream, width=lambda: width, clock=lambda: float(next(clock)))
    for line in lines_of(timed):
        view.on_event(line)
    return view


def test_line_tells_updates_reward_evaluation_staleness_rate_and_time_to_finish() -> None:
    view = shown(io.StringIO(), training())
    assert view.text() == "update 10/20  reward 1.000  evaluation 0.200  staleness 1.5  500 tokens/s  10 s to go"


def test_line_says_who_waits_until_the_next_update() -> None:
    waiting = ev.Waiting(waits=[("learner waits for a batch: 3 of 8 groups", 41.2)])
    timed = [*training(), (20.0, waiting)]
    assert shown(io.StringIO(), timed).text().endswith("learner waits for a batch: 3 of 8 groups (41 s)")
    assert "waits" not in shown(io.StringIO(), [*timed, (21.0, updated(11))]).text()


def test_terminal_gets_one_line_that_is_rewritten_and_never_wraps() -> None:
    stream = Terminal()
    view = shown(stream, training(), width=40)
    view.close()
    text = stream.getvalue()
    live = [part for part in text.split("\r\x1b[2K")[1:] if part.startswith("update")]
    assert len(live) >= 10
    assert all(len(part.rstrip("\n")) <= 39 for part in live)
    assert text.endswith("\n"), "the last line stands"


def test_pipe_gets_plain_lines_without_control_characters() -> None:
    stream = io.StringIO()
    shown(stream, training()).close()
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()
    assert stream.getvalue().splitlines()[-1].startswith("update 10/20"), "the last line stands"
    assert len(set(stream.getvalue().splitlines())) == len(stream.getvalue().splitlines())
    assert "evaluation of version 0: 0.200" in stream.getvalue()


def test_failed_task_is_named_once_its_attempts_are_used_up() -> None:
    failed = [
        ev.RolloutFailed(role="sampler-0", group=1, member=0, attempt=attempt, task_id="t7", reason="environment_error", error="boom", retried=attempt == 0)
        for attempt in (0, 1)
    ]
    stream = io.StringIO()
    shown(stream, [*training(), (20.0, failed[0]), (21.0, failed[1])])
    assert stream.getvalue().count("task t7 failed: environment_error: boom") == 1


def test_startup_steps_are_shown_before_any_event() -> None:
    stream = io.StringIO()
    view = ProgressView(stream)
    for fraction in (0.0, 0.5, 1.0):
        view.on_startup("warm start", fraction)
    assert stream.getvalue() == "starting: warm start\n"


@pytest.mark.parametrize(("seconds", "text"), [(44.6, "45 s"), (185, "3 min 05 s"), (7800, "2 h 10 min"), (59.9, "1 min 00 s")])
def test_duration_is_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_chart_puts_the_lowest_value_at_the_bottom_left_and_the_highest_at_the_top_right() -> None:
    lines = chart({"x": [(0, 0.0), (10, 1.0)]}, columns=11, legend="x", rows=5).splitlines()
    assert lines[0] == "  1.000 ┤" + " " * 10 + "x"
    assert lines[4] == "  0.000 ┤x"


def test_chart_of_a_constant_curve_is_drawn() -> None:
    assert "x" in chart({"x": [(0, 1.0)]}, columns=5, legend="", rows=3)


def test_end_picture_shows_curve_bars_and_places(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    saved = ev.CheckpointSaved(version=10, lineage=0, path=str(tmp_path / "checkpoints" / "update_000010"), seconds=0.1)
    ledger = ev.LedgerClosed(ledger={"trajectories": {"generated": 80, "trained": 72, "failed": {"worker_lost": 8}, "void": 0}})
    timed = [*training(), (12.0, ledger), (12.0, window("end")), (13.0, saved), (14.0, evaluated(10, 0.9))]
    text = end_picture(lines_of(timed), tmp_path, width=100)
    assert "0.200 (0.100 to 0.300)  ->  0.900 (0.800 to 1.000)" in text
    assert "sampler-0    ████████████████████████ 100%" in text
    assert "80 generated, 72 trained, 8 failed" in text
    assert "update_000010" in text and "events.jsonl" in text
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 110


def test_end_picture_of_a_run_shorter_than_a_report_claims_no_utilization_and_no_speed(tmp_path: Path) -> None:
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": 8}]
    lines = lines_of([(0.0, run_started(devices)), (0.0, window("start")), (0.4, updated(1)), (0.4, window("end"))])
    text = end_picture(lines, tmp_path)
    assert "not measured: the run ended before their first report" in text
    assert "other" not in text and "tokens/s" not in text
    assert summarize(lines)["tokens_per_second"] is None


def test_end_picture_of_a_run_that_never_began_says_where_it_lies(tmp_path: Path) -> None:
    assert str(tmp_path) in end_picture([], tmp_path)
