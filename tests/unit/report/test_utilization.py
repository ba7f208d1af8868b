"""Case 15 on whole scripted runs: utilization as it is reported against what the roles really did, noted beside them, second by second."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fakes.made_events import active, lines_of, run_started, window
from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace import clock
from headrace.clock import run_virtual
from headrace.report.summary import summarize
from headrace.report.utilization import Windows, utilization

CAPACITY = 8
POINTS = 0.02
Span = tuple[float, float, float]
"""(start, end, weight)"""


@dataclass
class Noted:
    """What roles did, noted by wrapping them: nothing here comes from an event."""

    decoded: dict[str, list[Span]] = field(default_factory=dict)
    """Weight: sequences of the step."""
    applied: dict[str, list[Span]] = field(default_factory=dict)
    learned: list[Span] = field(default_factory=list)
    window: list[float] = field(default_factory=list)


def noted_run(run: ScriptedRun) -> tuple[Noted, dict[str, Any]]:
    """Runs it; returns what was noted and the summary made of its events."""
    noted = Noted()
    building = run.build

    def build() -> None:
        building()
        for worker, sampler in zip(run.workers, run.samplers, strict=True):
            _wrap(sampler, "_decode", noted.decoded.setdefault(worker.name, []), lambda sampler=sampler: len(sampler._running))
            _wrap(sampler, "_apply", noted.applied.setdefault(worker.name, []), lambda: 1)
        _wrap(run.learner, "learn", noted.learned, lambda: 1)
        run.log.subscribe(lambda line: noted.window.append(clock.now()) if line["event"] == "timed_window" else None)

    run.build = build  # type: ignore[method-assign]
    run_virtual(run.run())
    devices = [{"name": worker.name, "role": "sampler", "capacity": CAPACITY} for worker in run.workers]
    started = lines_of([(0.0, run_started([*devices, {"name": "learner-0", "role": "learner", "capacity": 1}]))])
    return noted, summarize([*started, *run.log.lines])


def _wrap(owner: Any, name: str, spans: list[Span], weight: Any) -> None:
    inner = getattr(owner, name)

    async def wrapped(*arguments: Any) -> Any:
        start, heavy = clock.now(), weight()
        result = await inner(*arguments)
        spans.append((start, clock.now(), heavy))
        return result

    setattr(owner, name, wrapped)


def integral(spans: Sequence[Span], start: float, end: float, *, capacity: float | None = None) -> float:
    """Seconds, or seconds x min(capacity, weight) / capacity, inside [start, end]."""
    return math.fsum(max(0.0, min(b, end) - max(a, start)) * (1.0 if capacity is None else min(capacity, weight) / capacity) for a, b, weight in spans)


def slow_tools(seed: int, *, heavy: float) -> list[Any]:
    draw = random.Random(seed)
    return [
        scripted_task(
            f"t{index}",
            answers=draw.randint(1, 4),
            wait_seconds=[draw.lognormvariate(0, 1) * heavy for _ in range(4)],
            action_tokens=[draw.randint(2, 15)],
            reward=draw.choice([0.0, 1.0]),
        )
        for index in range(23)
    ]


RUNS = {
    "sync": {"mode": "sync"},
    "sync, slow tools": {"mode": "sync", "heavy": 2.0},
    "async at bound 0": {"max_staleness": 0},
    "async": {"max_staleness": 3, "heavy": 0.5},
    "async, slow tools": {"max_staleness": 2, "heavy": 3.0},
    "async, slow learner": {"max_staleness": 1, "learn_seconds": 6.0},
    "async, large groups": {"max_staleness": 4, "group_size": 6, "heavy": 0.2},
}


@pytest.mark.parametrize("num_samplers", [1, 3])
@pytest.mark.parametrize("kind", RUNS)
def test_reported_utilization_of_a_run_is_what_its_roles_did_within_two_points(kind: str, num_samplers: int) -> None:
    """Case 15."""
    options = dict(RUNS[kind])
    heavy, learn_seconds = options.pop("heavy", 0.0), options.pop("learn_seconds", 1.0)
    run = ScriptedRun(
        settings=run_settings(num_updates=30, num_samplers=num_samplers, **options),
        tasks=slow_tools(num_samplers, heavy=heavy),
        learn_seconds=learn_seconds,
        publish_seconds=0.1,
        apply_seconds=0.05,
    )
    noted, summary = noted_run(run)
    start, end = noted.window
    allocated = end - start
    rows = summary["utilization"]["devices"]
    assert summary["wall_seconds"] == pytest.approx(allocated, abs=0.01)
    for row in rows[:-1]:
        spans = noted.decoded[row["name"]]
        assert row["busy_fraction"] == pytest.approx(integral(spans, start, end) / allocated, abs=POINTS)
        assert row["occupancy"] == pytest.approx(integral(spans, start, end, capacity=CAPACITY) / allocated, abs=POINTS)
        applying = integral(noted.applied[row["name"]], start, end)
        assert row["idle_seconds"].get("weights", 0.0) / allocated == pytest.approx(applying / allocated, abs=POINTS)
    learning = integral(noted.learned, start, end)
    assert rows[-1]["busy_fraction"] == rows[-1]["occupancy"] == pytest.approx(learning / allocated, abs=POINTS)
    truth = [integral(noted.decoded[row["name"]], start, end, capacity=CAPACITY) / allocated for row in rows[:-1]] + [learning / allocated]
    assert summary["utilization"]["occupancy"] == pytest.approx(sum(truth) / len(truth), abs=POINTS)


@pytest.mark.parametrize("num_samplers", [1, 3])
@pytest.mark.parametrize("kind", RUNS)
def test_idle_reasons_that_were_reported_explain_the_idle_time_within_one_percent(kind: str, num_samplers: int) -> None:
    """They sum to it by construction; what no event explains is called `other` or `unreported`, and that must be next to nothing."""
    options = dict(RUNS[kind])
    heavy, learn_seconds = options.pop("heavy", 0.0), options.pop("learn_seconds", 1.0)
    run = ScriptedRun(
        settings=run_settings(num_updates=30, num_samplers=num_samplers, **options),
        tasks=slow_tools(num_samplers, heavy=heavy),
        learn_seconds=learn_seconds,
        publish_seconds=0.1,
        apply_seconds=0.05,
    )
    _, summary = noted_run(run)
    for row in summary["utilization"]["devices"]:
        idle = row["allocated_seconds"] * (1 - row["busy_fraction"])
        assert math.fsum(row["idle_seconds"].values()) == pytest.approx(idle, rel=1e-6)
        unexplained = row["idle_seconds"].get("other", 0.0) + row["idle_seconds"].get("unreported", 0.0)
        assert unexplained <= 0.01 * row["allocated_seconds"], row


def test_synchronous_run_of_known_times_has_the_utilization_computed_by_hand() -> None:
    """Each update: 4 rollouts decode 10 tokens of .05 s, the learner takes 1 s, publishes in .2 s, the sampler takes that up in .1 s."""
    tasks = [scripted_task("t", answers=1, action_tokens=[10], reward=1.0)]
    run = ScriptedRun(settings=run_settings(mode="sync", num_updates=50), tasks=tasks, learn_seconds=1.0, publish_seconds=0.2, apply_seconds=0.1)
    noted, summary = noted_run(run)
    period = 0.5 + 1.0 + 0.2 + 0.1
    sampler, learner = summary["utilization"]["devices"]
    assert noted.window[1] - noted.window[0] == pytest.approx(50 * period, rel=0.01)
    assert sampler["busy_fraction"] == pytest.approx(0.5 / period, abs=POINTS)
    assert sampler["occupancy"] == pytest.approx(0.5 / period * 4 / CAPACITY, abs=POINTS)
    assert sampler["idle_seconds"]["admission"] / sampler["allocated_seconds"] == pytest.approx(1.2 / period, abs=POINTS)
    assert learner["busy_fraction"] == pytest.approx(1.0 / period, abs=POINTS)
    shares = {reason: seconds / learner["allocated_seconds"] for reason, seconds in learner["idle_seconds"].items()}
    assert shares["batch"] == pytest.approx(0.5 / period, abs=POINTS)
    assert shares["publish"] == pytest.approx(0.2 / period, abs=0.01)
    assert shares["acknowledgement"] == pytest.approx(0.1 / period, abs=0.01)
    assert summary["utilization"]["attainable_occupancy"] == pytest.approx((1 + 0.5 / period * 0.5 / (1.0 / period)) / 2, abs=POINTS)


def test_what_a_worker_did_before_the_window_opened_was_nothing() -> None:
    """Its first report covers 9 s of start-up evaluation and the first second, all of it decode."""
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": 8}]
    first = active("sampler-0", 10.0, running={8: 0.9}, idle={"admission": 9.0, "environment": 0.1})
    second = active("sampler-0", 1.0, running={8: 0.9}, idle={"environment": 0.1})
    lines = lines_of([(0.0, run_started(devices)), (9.0, window("start")), (10.0, first), (11.0, second), (11.0, window("end"))])
    row = summarize(lines)["utilization"]["devices"][0]
    assert row["busy_fraction"] == pytest.approx(0.9)
    assert row["idle_seconds"] == pytest.approx({"environment": 0.2})


def test_silence_of_a_worker_that_had_nothing_in_flight_is_idle_for_want_of_admission() -> None:
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": 8}]
    work = active("sampler-0", 5.0, running={8: 5.0}, in_flight=0)
    lines = lines_of([(0.0, run_started(devices)), (0.0, window("start")), (5.0, work), (6.0, window("end"))])
    row = summarize(lines)["utilization"]["devices"][0]
    assert row["busy_fraction"] == pytest.approx(5 / 6)
    assert row["idle_seconds"] == pytest.approx({"admission": 1.0})


def test_a_worker_of_a_run_that_was_over_before_its_first_report_is_not_said_to_have_idled() -> None:
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": 8}]
    lines = lines_of([(0.0, run_started(devices)), (0.0, window("start")), (0.9, window("end"))])
    (device,) = summarize(lines)["utilization"]["devices"]
    assert device["idle_seconds"] == {"unreported": pytest.approx(0.9)}


def test_stretch_cut_out_of_a_run_counts_work_in_proportion() -> None:
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": 8}]
    work = active("sampler-0", 2.0, running={8: 1.0}, idle={"admission": 1.0})
    lines = lines_of([(0.0, run_started(devices)), (0.0, window("start")), (10.0, work)])
    row = utilization(lines, Windows(((9.0, 10.0),), cut_out=True))["devices"][0]
    assert row["busy_fraction"] == pytest.approx(0.5)


def test_lines_fed_one_by_one_and_a_whole_run_give_the_same() -> None:
    run = ScriptedRun(settings=run_settings(num_updates=10), tasks=slow_tools(1, heavy=1.0))
    _, summary = noted_run(run)
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": CAPACITY}, {"name": "learner-0", "role": "learner", "capacity": 1}]
    lines = [*lines_of([(0.0, run_started(devices))]), *run.log.lines]
    start, end = (line["time"] for line in lines if line["event"] == "timed_window")
    assert utilization(lines, Windows(((start, end),)))["occupancy"] == pytest.approx(summary["utilization"]["occupancy"], abs=1e-6)


def test_a_run_that_is_going_is_measured_up_to_its_newest_event() -> None:
    """Half-way, the learner's share is that of half the run."""
    run = ScriptedRun(settings=run_settings(num_updates=40), tasks=[scripted_task("t", action_tokens=[10], reward=1.0)])
    noted, _ = noted_run(run)
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": CAPACITY}, {"name": "learner-0", "role": "learner", "capacity": 1}]
    half = [line for line in run.log.lines if line["time"] <= run.log.lines[-1]["time"] / 2]
    row = summarize([*lines_of([(0.0, run_started(devices))]), *half])["utilization"]["devices"][-1]
    offset = noted.window[0] - next(line["time"] for line in run.log.lines if line["event"] == "timed_window")
    start, end = noted.window[0], half[-1]["time"] + offset
    assert row["busy_fraction"] == pytest.approx(integral(noted.learned, start, end) / (end - start), abs=0.06)  # the update in progress is not reported yet


def test_the_noting_itself_bites() -> None:
    """Were the wrapped roles not those that run, the tests above would compare nothing."""

    async def nothing() -> None:
        await asyncio.sleep(1.0)

    spans: list[Span] = []

    class Owner:
        work = staticmethod(nothing)

    owner = Owner()
    _wrap(owner, "work", spans, lambda: 3)
    run_virtual(owner.work())
    assert spans == [(0.0, 1.0, 3)]
