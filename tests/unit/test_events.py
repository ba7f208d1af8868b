"""The event log: one line an event, readable while written, and no view can break a run (I14)."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fakes.made_events import active, evaluated, run_started, statistics, updated
from headrace import events as ev
from headrace.event_log import EventLog, read_events
from headrace.types import EndReason

EVENT_CLASSES = [value for value in vars(ev).values() if isinstance(value, type) and issubclass(value, ev.Event) and value is not ev.Event]


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def finished(reward: float = 1.0) -> ev.RolloutFinished:
    return ev.RolloutFinished(
        role="sampler-12", group=123456, member=15, attempt=1, kind="default", reward=reward, end=EndReason.MAX_SECONDS, steps=60, keys=20, tokens=12345,
        versions=[100000, 100008], seconds=123.456789, wait_seconds=100.123456,
    )  # fmt: skip


def test_every_line_has_event_time_and_role_and_time_counts_from_the_first(tmp_path: Path) -> None:
    clock = Clock()
    log = EventLog(tmp_path / "events.jsonl", clock)
    log.emit(run_started([]))
    clock.time = 102.5
    log.emit(evaluated(3, 0.5))
    log.close()
    first, second = read_events(tmp_path / "events.jsonl")
    assert (first["event"], first["time"], first["role"], first["schema"]) == ("run_started", 0.0, "conductor", 1)
    assert (second["event"], second["time"], second["role"], second["mean"]) == ("evaluated", 2.5, "evaluator", 0.5)


def test_run_started_has_the_agreed_keys() -> None:
    agreed = {"event", "schema", "time", "role", "run_id", "headrace", "runtime", "clock", "wall_time", "mode", "placement", "seed", "lineage"}
    assert agreed | {"resumed_from_update", "devices"} <= set(line_of(run_started([])))


def test_event_names_are_distinct_and_given() -> None:
    names = [each.name for each in EVENT_CLASSES]
    assert all(names) and len(set(names)) == len(names)


def test_a_trajectory_costs_at_most_300_bytes() -> None:
    assert len(json.dumps(line_of(finished()), separators=(",", ":"))) + 1 <= 300


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, Clock())
    log.emit(evaluated(1, 0.1))
    log.emit(evaluated(2, 0.2))
    log.close()
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:-cut])
        lines = list(read_events(path))
        assert [line["version"] for line in lines] == [1, 2][: whole[:-cut].count(b"\n")]


def test_log_appends_and_never_truncates(tmp_path: Path) -> None:
    for version in (1, 2):
        log = EventLog(tmp_path / "events.jsonl", Clock())
        log.emit(evaluated(version, 0.5))
        log.close()
    assert [line["version"] for line in read_events(tmp_path / "events.jsonl")] == [1, 2]


def test_lines_can_be_read_while_the_log_is_open(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", Clock())
    log.emit(evaluated(1, 0.5))
    assert len(list(read_events(tmp_path / "events.jsonl"))) == 1
    log.close()


def test_view_that_raises_is_dropped_and_changes_no_line(tmp_path: Path) -> None:
    seen: list[Any] = []

    def broken(line: dict[str, Any]) -> None:
        raise RuntimeError("a bug of the view")

    for name, views in (("with", [broken, seen.append]), ("without", [])):
        log = EventLog(tmp_path / name, Clock())
        for view in views:
            log.subscribe(view)
        for version in range(3):
            log.emit(evaluated(version, 0.5))
        log.close()
    assert (tmp_path / "with").read_bytes() == (tmp_path / "without").read_bytes()
    assert len(seen) == 3, "the other view goes on"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_becomes_null_because_json_has_none(value: float) -> None:
    assert line_of(finished(reward=value))["reward"] is None


def test_nested_records_and_mappings_become_plain_values() -> None:
    line = line_of(updated(1, numbers=statistics({0: 3, 2: 1})))
    assert line["statistics"]["staleness_histogram"] == {"0": 3, "2": 1}
    line = line_of(active("sampler-0", 1.0, running={8: 0.123456789}))
    assert line["activity"]["running_seconds"] == {"8": 0.123457}
    assert line_of(finished())["end"] == "max_seconds"


def test_event_with_something_that_is_no_data_is_refused() -> None:
    with pytest.raises(TypeError, match="holds a object"):
        line_of(dataclasses.replace(run_started([]), devices=[{"name": object()}]))


def test_without_a_file_the_views_still_see_every_event() -> None:
    assert line_of(evaluated(1, 0.5))["version"] == 1


def test_reopened_log_goes_on_in_time_and_cuts_a_torn_line_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"a","time":0.0}\n{"event":"b","time":41.5}\n{"event":"torn","ti')
    seconds = [1000.0]
    log = EventLog.reopened(path, lambda: seconds[0])
    seconds[0] += 2
    log.emit(evaluated(3, 0.5))
    log.close()
    lines = list(read_events(path))
    assert [line["event"] for line in lines] == ["a", "b", "evaluated"]
    assert lines[-1]["time"] == 43.5
    assert b"torn" not in path.read_bytes()


def line_of(event: ev.Event) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    log = EventLog(None, Clock())
    log.subscribe(lines.append)
    log.emit(event)
    return json.loads(json.dumps(lines[0], allow_nan=False))
