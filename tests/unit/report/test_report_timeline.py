from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.made_events import active, lines_of, run_started, taken, updated, window
from fakes.report_runs import COLOCATED, HOSTILE, SPLIT, made_events, write_run
from headrace import events as ev
from headrace.cli.main import main
from headrace.report.record import load_run
from headrace.report.summary import summarize
from headrace.report.timeline import BATCH, BUSY, FULL, LEARN, binned, lanes, learner_slices
from headrace.report.trace import trace_events


def test_learner_slices_tile_what_its_events_name_and_never_overlap() -> None:
    slices = learner_slices(lines_of(made_events()))
    for before, after in itertools.pairwise(slices):
        assert before.end <= after.start + 1e-9
    total: dict[str, float] = {}
    for each in slices:
        (activity,) = each.seconds
        assert each.end > each.start
        total[activity] = total.get(activity, 0.0) + each.seconds[activity]
    assert total[LEARN] == pytest.approx(3.6)
    assert total["overhead"] == pytest.approx(0.6)
    assert total[BATCH] == pytest.approx(1.2)


def test_waiting_for_a_batch_gives_way_to_work_in_the_same_seconds() -> None:
    # a batch that was fetched ahead: the wait lies around two updates
    lines = lines_of([(0.0, run_started(SPLIT)), (3.0, updated(1, seconds=1.0, busy=1.0)), (5.0, updated(2, seconds=1.0, busy=1.0)), (6.0, taken(3, 5.0))])
    found = [(next(iter(each.seconds)), each.start, each.end) for each in learner_slices(lines)]
    assert found == [(BATCH, 1.0, 2.0), (LEARN, 2.0, 3.0), (BATCH, 3.0, 4.0), (LEARN, 4.0, 5.0), (BATCH, 5.0, 6.0)]


def test_what_an_update_says_of_its_time_is_laid_out_before_its_line() -> None:
    one = replace(updated(1, seconds=2.0, busy=1.5), transfer_seconds=0.5, finished_seconds_ago=1.0)
    acknowledged = ev.WeightsAcknowledged(version=1, lineage=0, wait_seconds=0.75)
    slices = learner_slices(lines_of([(0.0, run_started(SPLIT)), (10.0, one), (10.0, acknowledged)]))
    found = [(next(iter(each.seconds)), each.start, each.end) for each in slices]
    assert found == [("transfer", 6.5, 7.0), ("overhead", 7.0, 7.5), (LEARN, 7.5, 9.0), ("acknowledgement", 9.25, 10.0)]


def test_timeline_and_utilization_tell_the_same_seconds() -> None:
    lines = lines_of(made_events())
    devices = {device["name"]: device for device in summarize(lines)["utilization"]["devices"]}
    for lane in lanes(lines):
        if lane.name not in devices:
            continue
        (shares,) = binned(lane, 1.0, 7.0, 1)
        device = devices[lane.name]
        busy = sum(shares.get(activity, 0.0) for activity in (LEARN, FULL, BUSY))
        assert busy == pytest.approx(device["busy_fraction"], abs=0.005)
        for reason, seconds in device["idle_seconds"].items():
            if reason != "other":
                assert shares.get(reason, 0.0) == pytest.approx(seconds / 6.0, abs=0.005), reason


def test_bins_of_a_sampler_hold_the_shares_of_its_reports() -> None:
    sampler = next(lane for lane in lanes(lines_of(made_events())) if lane.name == "sampler-0")
    for shares in binned(sampler, 1.0, 7.0, 12):
        assert shares == pytest.approx({FULL: 0.35, BUSY: 0.15, "environment": 0.4, "a new reason": 0.1})


def test_a_colocated_device_is_never_counted_twice() -> None:
    # its sampler reports to be idle for want of admission while its learner learns
    lines = lines_of(
        [
            (0.0, run_started(COLOCATED, placement="colocated", mode="sync")),
            (0.0, window("start")),
            (9.0, updated(1, seconds=4.0, busy=3.0)),
            (10.0, active("sampler-0", 10.0, running={8: 4.0}, idle={"admission": 5.0, "environment": 1.0})),
        ]
    )
    (lane,) = lanes(lines)
    (shares,) = binned(lane, 0.0, 10.0, 1)
    assert shares == pytest.approx({LEARN: 0.3, FULL: 0.4, "admission": 0.2, "environment": 0.1})
    for fine in binned(lane, 0.0, 10.0, 20):
        assert sum(fine.values()) == pytest.approx(1.0)


def test_evaluations_after_the_run_do_not_stretch_its_timeline() -> None:
    late = ev.Evaluated(role="evaluator", version=6, lineage=0, mean=0.5, interval95=[0.5, 0.5], num_rollouts=1, metrics={}, seconds=2.0)
    timed = made_events()
    found = lanes(lines_of([*timed, (500.0, late)]))
    assert (
        next(lane for lane in found if lane.name == "evaluator").learning == next(lane for lane in lanes(lines_of(timed)) if lane.name == "evaluator").learning
    )


_KEYS = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "cat", "pid", "tid", "ts", "args"},
    "i": {"ph", "name", "cat", "s", "pid", "tid", "ts"},
    "M": {"ph", "name", "cat", "pid", "tid", "args"},
}
_METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def assert_chrome_trace(events: list[dict[str, Any]]) -> None:
    """The rules of the Trace Event Format for the phases that are used, and those by which Perfetto's importer drops events: nothing before
    zero, and no slice that begins within another one of its track and ends after it."""
    ends: dict[tuple[int, int], list[int]] = {}
    for event in sorted(events, key=lambda one: (one.get("ts", -1), -one.get("dur", 0))):
        assert set(event) == _KEYS[event["ph"]], event
        assert type(event["pid"]) is int and type(event["tid"]) is int and event["tid"] > 0 and isinstance(event["name"], str) and event["name"]
        match event["ph"]:
            case "M":
                key = _METADATA[event["name"]]
                assert list(event["args"]) == [key] and isinstance(event["args"][key], str if key == "name" else int)
                continue
            case "C":
                assert event["args"] and all(type(value) in (int, float) and math.isfinite(value) for value in event["args"].values()), event
            case "i":
                assert event["s"] == "t"
            case "X":
                assert type(event["dur"]) is int and event["dur"] > 0
                open_ends = ends.setdefault((event["pid"], event["tid"]), [])
                while open_ends and open_ends[-1] <= event["ts"]:
                    open_ends.pop()
                assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1], f"would be dropped: {event}"
                open_ends.append(event["ts"] + event["dur"])
        assert type(event["ts"]) is int and event["ts"] >= 0, event
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] in "XiC"} <= named
    assert {event["pid"] for event in events if event["name"] == "process_name"} == {event["pid"] for event in events}


def test_trace_has_a_track_for_each_device_whose_slices_nest(tmp_path: Path) -> None:
    for mode in ("async", "sync"):
        run = load_run(write_run(tmp_path / mode, made_events(mode=mode)))
        events = list(trace_events(run))
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        expected = {"sampler-0 (sampler)", "learner-0 (learner)"} if mode == "async" else {"device-0 (colocated)", "device-0 (learning)"}
        assert set(names.values()) == {"conductor", "evaluator (evaluator)", *expected}
        slices = [event for event in events if event["ph"] == "X"]
        assert {event["tid"] for event in slices} == {track for track, name in names.items() if name != "conductor"}
        assert_chrome_trace(events)


def test_trace_is_what_viewers_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run", made_events())
    out = tmp_path / "deep" / "trace.json"
    assert main(["report", str(directory), "--out", str(tmp_path / "r.html"), "--trace", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace"] == str(out)
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    assert_chrome_trace(events)
    learned = [event for event in events if event["ph"] == "X" and event["name"] == LEARN]
    assert [event["args"]["version"] for event in learned] == [1, 2, 3, 4, 5, 6]
    assert sum(event["dur"] for event in learned) == pytest.approx(3.6e6)
    shares = [event["args"] for event in events if event["name"] == "sampler-0 shares of time"]
    assert len(shares) == 6 and all(sum(each.values()) == pytest.approx(1.0) for each in shares)
    assert HOSTILE not in out.read_text(encoding="utf-8")


def test_reports_that_came_early_late_or_cover_time_before_the_log_lose_no_slice_in_a_trace(tmp_path: Path) -> None:
    """Each report covers a second; the log has them up to 40 ms off, the first of them from before line 1, two in one instant."""
    chooser = random.Random(0)
    times = [0.2, *(1.2 + index + chooser.uniform(-0.04, 0.04) for index in range(60)), 61.30000004, 62.3]
    reports = [(time, active("sampler-0", 1.0, running={8: 0.5}, idle={"environment": 0.5})) for time in times]
    run = load_run(write_run(tmp_path / "run", [(0.0, run_started(SPLIT)), (0.0, window("start")), *reports, (62.3, reports[-1][1])]))
    events = list(trace_events(run))
    assert_chrome_trace(events)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(times), "the second report of one instant has no time left"
    covered = sum(event["dur"] for event in slices) / 1e6
    assert covered == pytest.approx(62.3, rel=0.02)


def test_a_trace_of_several_runs_has_a_process_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories = [str(write_run(tmp_path / name, made_events())) for name in ("one", "two")]
    assert main(["report", *directories, "--out", str(tmp_path / "r.html"), "--trace", str(tmp_path / "t.json")]) == 0
    trace = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] == "ms"
    assert_chrome_trace(trace["traceEvents"])
    assert {event["pid"] for event in trace["traceEvents"]} == {1, 2}
