"""The event log of whole runs: complete, small enough (CONTRACTS), followed while it grows, never continued on a torn line."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from fakes.made_events import evaluated
from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace import events as ev
from headrace.clock import periodic_seconds, run_virtual
from headrace.errors import RunDirectoryError
from headrace.event_log import EventFollower, EventLog, read_events
from headrace.pool.statistics import PoolStatistics
from headrace.types import WorkerActivity


def scripted_run(num_samplers: int = 2, num_updates: int = 12, **options: Any) -> ScriptedRun:
    tasks = [scripted_task(f"task-{index}", answers=1 + index % 4, wait_seconds=2.0, key_steps=[0], reward=index % 2) for index in range(5)]
    run = ScriptedRun(settings=run_settings(num_updates=num_updates, num_samplers=num_samplers, **options), tasks=tasks, publish_seconds=0.2, apply_seconds=0.1)
    run_virtual(run.run())
    return run


def size(line: dict[str, Any]) -> int:
    return len(json.dumps(line, separators=(",", ":"))) + 1


@pytest.mark.parametrize("num_samplers", [1, 3])
@pytest.mark.parametrize("group_size", [2, 12])
def test_log_of_a_run_costs_at_most_300_bytes_a_trajectory_and_2_kb_a_role_and_second(num_samplers: int, group_size: int) -> None:
    lines = scripted_run(num_samplers, group_size=group_size).log.lines
    trajectories = sum(line["event"] == "rollout_finished" for line in lines)
    seconds, roles = lines[-1]["time"], num_samplers + 2
    assert trajectories > 40
    assert sum(size(line) for line in lines) <= 300 * trajectories + 2000 * roles * seconds
    assert all(size(line) <= 300 for line in lines if line["event"] in ("rollout_finished", "group_reserved"))


def test_line_of_pool_levels_stays_small_however_many_waits_there_are() -> None:
    statistics = PoolStatistics(**{field.name: 12345 for field in dataclasses.fields(PoolStatistics)})
    event = ev.PoolLevels.of(statistics, waits=[("learner waits for " + "x" * 5000, 12345.678)] * 50)
    assert len(event.waits) == 4
    assert size(dataclasses.asdict(event)) <= 2000


def test_pool_levels_have_every_field_of_the_statistics() -> None:
    levels = {field.name for field in dataclasses.fields(ev.PoolLevels)} - {"role", "waits"}
    assert levels == {field.name for field in dataclasses.fields(PoolStatistics)}


def test_pool_levels_come_about_once_a_second_and_agree_with_the_admission() -> None:
    run = scripted_run()
    levels = run.log.named("pool")
    times = [line["time"] for line in levels]
    assert all(later - earlier >= 0.999 for earlier, later in itertools.pairwise(times))
    assert len(levels) >= 0.7 * run.log.lines[-1]["time"]
    for line in levels:
        assert line["outstanding_groups"] == line["waiting_groups"] + line["ready_groups"] + line["taken_groups"] <= line["max_groups"]
    assert any(line["taken_groups"] for line in levels)


def test_periodic_lines_thin_out_as_a_run_grows_old_and_still_account_for_every_second() -> None:
    hours = 3.0
    tasks = [scripted_task(f"task-{index}", answers=2, wait_seconds=60.0, reward=index % 2) for index in range(3)]
    run = ScriptedRun(settings=run_settings(num_updates=int(hours * 3600 / 60), max_staleness=1), tasks=tasks, learn_seconds=1.0)
    run_virtual(run.run())
    end = run.log.lines[-1]["time"]
    assert end > (hours - 1) * 3600
    for name in ("worker_active", "pool"):
        lines = [line for line in run.log.named(name) if line["event"] == name]
        by_hour = [sum(3600 * hour <= line["time"] < 3600 * (hour + 1) for line in lines) for hour in range(int(end // 3600))]
        assert 1800 < by_hour[0] <= 3700 and by_hour[-1] < 0.7 * by_hour[0], (name, by_hour)
    seconds = sum(line["activity"]["seconds"] for line in run.log.named("worker_active"))
    assert seconds == pytest.approx(end, rel=0.01)
    assert [periodic_seconds(3600.0 * age) for age in (0, 1, 2.5, 10, 60)] == [1.0, 1.0, 2.5, 10.0, 10.0]


def test_waits_that_outlast_a_heartbeat_are_named_within_a_second() -> None:
    run = ScriptedRun(settings=run_settings(num_updates=2), tasks=[scripted_task("slow", answers=1, wait_seconds=30.0, reward=1.0)])
    run_virtual(run.run())
    waits = [tuple(wait) for line in run.log.named("pool") for wait in line["waits"]]
    assert any(name.startswith("learner waits for a batch: 0 of 2 groups ready") and 10 < seconds < 31 for name, seconds in waits)
    assert any("slow" in name for name, _ in waits), "the rollout that everybody waits for is named"
    assert all(seconds >= 1.5 for _, seconds in waits)


def test_longest_wait_of_each_worker_is_in_the_log() -> None:
    run = ScriptedRun(settings=run_settings(num_updates=2, num_samplers=2), tasks=[scripted_task("slow", answers=1, wait_seconds=30.0, reward=1.0)])
    run_virtual(run.run())
    texts = {line["role"]: line["longest_wait"] for line in run.log.named("worker_active") if line["longest_wait"]}
    assert set(texts) == {"sampler-0", "sampler-1"}
    assert all("of task slow" in text for text in texts.values())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_second_of_the_learner_has_an_event(mode: str) -> None:
    """Waiting, learning, publishing and waiting for samplers fill the time between two updates."""
    lines = scripted_run(mode=mode, num_updates=10).log.lines
    spans: list[tuple[float, float]] = []
    for line in lines:
        time = line["time"]
        match line["event"]:
            case "selection_taken" | "weights_acknowledged":
                spans.append((time - line["wait_seconds"], time))
            case "updated":
                learned = time - line["finished_seconds_ago"]
                spans.append((learned - line["seconds"] - line["transfer_seconds"], learned))
            case "weights_published":
                spans.append((time - line["seconds"], time))
    start, end = (line["time"] for line in lines if line["event"] == "timed_window")
    position, uncovered = start, 0.0
    for begin, finish in sorted(span for span in spans if span[1] > start):
        uncovered += max(0.0, begin - position)
        assert begin >= position - 0.001 or position == start, "no second is told twice"
        position = max(position, finish)
    assert uncovered + max(0.0, end - position) <= 0.01 * (end - start)
    assert ("weights_acknowledged" in {line["event"] for line in lines}) is (mode == "sync")


def test_seconds_of_worker_activity_add_up_to_the_run() -> None:
    run = scripted_run()
    for name in ("sampler-0", "sampler-1"):
        lines = [line for line in run.log.named("worker_active") if line["role"] == name]
        assert set(lines[0]["activity"]) == {field.name for field in dataclasses.fields(WorkerActivity)}
        reported = sum(line["activity"]["seconds"] for line in lines)
        assert reported == pytest.approx(lines[-1]["time"] + 0.2, abs=0.01)  # the log begins when the first weights are published


def test_follower_gives_each_event_once_however_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = EventFollower(path)
    assert list(follower.new_events()) == [], "the file is not there yet"
    log = EventLog(tmp_path / "whole", lambda: 0.0)
    for version in range(30):
        log.emit(evaluated(version, 0.5))
    log.close()
    whole, seen = (tmp_path / "whole").read_bytes(), []
    for end in range(0, len(whole) + 1, 37):
        path.write_bytes(whole[:end])
        seen += list(follower.new_events())
    path.write_bytes(whole)
    seen += list(follower.new_events())
    assert [line["version"] for line in seen] == list(range(30))
    assert list(follower.new_events()) == []


def test_follower_that_is_left_half_way_goes_on_from_there(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, lambda: 0.0)
    for version in range(3):
        log.emit(evaluated(version, 0.5))
    follower = EventFollower(path)
    assert next(follower.new_events())["version"] == 0
    assert [line["version"] for line in follower.new_events()] == [1, 2]
    log.close()


@pytest.mark.parametrize("torn", [b"", b'{"event":"evalu', b"x" * 10_000])
def test_what_is_appended_after_a_kill_does_not_continue_a_torn_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, lambda: 0.0)
    log.emit(evaluated(1, 0.5))
    log.close()
    path.write_bytes(path.read_bytes() + torn)
    log = EventLog(path, lambda: 0.0)
    log.emit(evaluated(2, 0.5))
    log.close()
    assert [line["version"] for line in read_events(path)] == [1, 2]


def test_file_that_holds_nothing_but_half_a_line_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"half a line")
    log = EventLog(path, lambda: 0.0)
    log.emit(evaluated(2, 0.5))
    log.close()
    assert [line["version"] for line in read_events(path)] == [2]


def test_a_log_whose_last_line_is_no_event_is_refused_by_name_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"run_started","time":0.0}\n' + b"\0" * 20 + b"\n")
    before = path.read_bytes()
    with pytest.raises(RunDirectoryError, match=r"events\.jsonl: the event log is damaged: its last line is no event"):
        EventLog.reopened(path, lambda: 0.0)
    assert path.read_bytes() == before


def test_events_that_nobody_asks_for_are_skipped_unread(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(
        '{"event":"pool","time":1}\n{"event":"rollout_finished", no JSON at all}\n{"event":"rollout_finished","time":2}\n'.replace('finished", ', 'finished",')
    )
    assert [line["event"] for line in read_events(path, without=("rollout_finished",))] == ["pool"]
