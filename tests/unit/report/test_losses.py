"""Roles that were lost and came back, as progress, watch, report and utilization show them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from fakes.made_events import active, lines_of, run_started, statistics, updated, window
from headrace import events as ev
from headrace.report import words
from headrace.report.progress import ProgressView
from headrace.report.record import load_run
from headrace.report.sections import _failure_table
from headrace.report.timeline import lanes
from headrace.report.utilization import timed_windows, utilization
from headrace.report.watch import WatchState, frame

SPLIT = [{"name": "sampler-0", "role": "sampler", "capacity": 8}, {"name": "learner-0", "role": "learner", "capacity": 1}]
LOST = ev.RoleLost(role="sampler-0", error="Process sampler-0 was ended by signal SIGKILL.", rollouts=12, losses=1, restarted=True)
BACK = ev.RoleRestarted(role="sampler-0", seconds=1.5)


def run(*, comes_back: bool = True) -> list[tuple[float, ev.Event]]:
    """Two seconds of work, lost for 1.5 s, 1.5 s of work."""
    timed: list[tuple[float, ev.Event]] = [(0.0, run_started(SPLIT)), (0.0, window("start"))]
    timed += [(float(second), active("sampler-0", 1.0, running={8: 1.0})) for second in (1, 2)]
    timed.append((2.0, LOST))
    if comes_back:
        timed += [(3.5, BACK), (4.5, active("sampler-0", 1.0, running={8: 1.0})), (5.0, active("sampler-0", 0.5, running={8: 0.5}))]
    return [*timed, (5.0, updated(1, numbers=statistics({0: 1})))]


def test_time_without_a_worker_is_idle_with_its_reason() -> None:
    lines = lines_of([*run(), (5.0, window("end"))])
    sampler = utilization(lines, timed_windows(lines))["devices"][0]
    assert sampler["idle_seconds"] == pytest.approx({"restart": 1.5})
    assert sampler["occupancy"] == pytest.approx(3.5 / 5.0)
    away = [each for each in lanes(lines)[0].sampling if "restart" in each.seconds]
    assert [(each.start, each.end) for each in away] == [(2.0, 3.5)]


@pytest.mark.parametrize(
    ("comes_back", "says"), [(False, "! sampler-0 was lost and is started again: Process sampler-0"), (True, "! sampler-0 was lost 1 time and")]
)
def test_watch_says_who_was_lost_and_whether_it_is_back(comes_back: bool, says: str) -> None:
    state = WatchState()
    for line in lines_of(run(comes_back=comes_back)):
        state.add(line)
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(frame(state, name="r", width=120))
    assert says in console.export_text()


def test_progress_tells_a_loss_and_the_return_once_each() -> None:
    stream = io.StringIO()
    view = ProgressView(stream, width=lambda: 200, clock=lambda: 0.0)
    for line in lines_of(run()):
        view.on_event(line)
    text = stream.getvalue()
    assert text.count("sampler-0 was lost: Process sampler-0 was ended by signal SIGKILL. 12 rollouts begin anew; it is started again\n") == 1
    assert text.count("sampler-0 is back after 1.5 s\n") == 1


def test_report_sums_up_the_losses_and_names_the_last_cause(tmp_path: Path) -> None:
    failed = [
        ev.RolloutFailed(
            role="sampler-0", group=0, member=index, attempt=0, task_id=f"t{index}", reason="worker_lost", error="its worker was lost", retried=True
        )
        for index in range(12)
    ]
    timed = [*run(), *((5.0, event) for event in failed), (5.0, window("end"))]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_of(timed)))
    record = load_run(tmp_path)
    said = "Lost in the middle of the run: sampler-0 1 time; 12 rollouts began anew, and it took 2 s at most until a successor was up."
    assert words.losses(record) == f"{said} The last time: Process sampler-0 was ended by signal SIGKILL."
    table = str(_failure_table(record))
    assert table.count("worker lost") == 1 and "sampler-0" in table and "t3" not in table, "one row for all that it had: no fault of the tasks"
