"""Whole simulated runs: deterministic, equal to scripted roles event for event (I11), and true to Little's law."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.rollouts import scripted_task
from fakes.runs import CycledTasks, RecordingLog, run_settings
from fakes.simulated_runs import SECONDS, comparable, random_times, scripted_lines, scripted_times, simulated_lines
from headrace import clock
from headrace.cli.main import main
from headrace.config import Settings
from headrace.errors import ConfigError
from headrace.event_log import read_events
from headrace.report.summary import summarize
from headrace.runtime.simulated import simulate, simulated_conductor, simulated_roles
from headrace.types import FinishedRollout, RetireReason, RolloutKey
from headrace.updates import Selection, UpdateResult

TASKS = [
    scripted_task("a", answers=3, wait_seconds=[0.313, 0.0871, 1.77], action_tokens=[4, 2, 9], reward=1.0),
    scripted_task("b", answers=1, wait_seconds=[0.0191], action_tokens=[5]),
    scripted_task("c", answers=7, wait_seconds=[0.0431, 0.61], action_tokens=[1], reward=1.0),
    scripted_task("d", answers=2, wait_seconds=[4.31], action_tokens=[13], reward=0.5),
]
BATCH_OF_12 = {"group_size": 4, "groups": 3, "max_staleness": 5}
RUNS: Mapping[str, dict[str, Any]] = {
    "async": {},
    "sync": {"mode": "sync"},
    "colocated": {"mode": "sync", "run": {"placement": "colocated"}},
    "three samplers": {"num_samplers": 3, "max_staleness": 4},
    "oldest first": {**BATCH_OF_12, "pool": {"selection": "oldest_first"}},
    "quorum": {**BATCH_OF_12, "pool": {"quorum": 2}},
    "dropped when too old": {**BATCH_OF_12, "pool": {"on_expiry": "drop_group"}},
    "taken before too old": {**BATCH_OF_12, "pool": {"on_expiry": "wait"}},
    "two minibatches": {**BATCH_OF_12, "learner": {"num_minibatches": 2}},
}


@pytest.mark.parametrize(("max_running", "queue_share"), [(64, 0.25), (3, 0.0), (3, 1.0)])
@pytest.mark.parametrize("name", RUNS)
def test_simulated_roles_and_scripted_roles_give_the_same_events(name: str, max_running: int, queue_share: float) -> None:
    settings = run_settings(num_updates=12, sampler={"max_running": max_running, "queue_share": queue_share}, **RUNS[name])
    minibatches = settings.learner.num_minibatches
    model = scripted_times(learn_seconds=lambda tokens, ranks: SECONDS["learn_seconds"] / minibatches)
    simulated = clock.run_virtual(simulated_lines(settings, TASKS, model))
    scripted = clock.run_virtual(scripted_lines(settings, TASKS))
    assert len({line["event"] for line in simulated}) >= 8
    assert comparable(simulated) == comparable(scripted)


def test_staleness_bound_0_is_sync_event_for_event() -> None:
    model = random_times()
    asynchronous = clock.run_virtual(simulated_lines(busy_settings(mode="async", max_staleness=0), TASKS, model))
    synchronous = clock.run_virtual(simulated_lines(busy_settings(mode="sync"), TASKS, model))
    assert asynchronous == synchronous
    assert clock.run_virtual(simulated_lines(busy_settings(mode="async", max_staleness=1), TASKS, model)) != synchronous


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        simulate(busy_settings(seed=seed), random_times(), run_directory=tmp_path / name, name="run")
    one, two, three = ((tmp_path / name / "events.jsonl").read_text().replace(f'"run_id":"{name}"', "") for name in ("one", "two", "three"))
    assert one == two
    assert one != three


@pytest.mark.parametrize("changes", [{}, {"max_staleness": 0}, {"pool": {"selection": "oldest_first"}}, {"mode": "sync"}])
def test_littles_law_holds_exactly(changes: dict[str, Any]) -> None:
    """In flight + queued, integrated over the run, is the sum of the times in the system of all that were in it."""
    settings = busy_settings(**changes)
    levels, times = clock.run_virtual(_levels_and_times(settings))
    area = sum(level * (end - start) for (start, level), (end, _) in itertools.pairwise(levels))
    assert len(times) > 100
    assert area == pytest.approx(sum(times), rel=1e-9)


async def _levels_and_times(settings: Settings) -> tuple[list[tuple[float, int]], list[float]]:
    """(time, in flight + queued as the pool counts them) after every event; seconds in the system of each rollout."""
    log, times = RecordingLog(), _Times()
    conductor = simulated_conductor(settings, simulated_roles(settings, random_times(), source=CycledTasks(TASKS)), log, recorder=times)
    levels = [(0.0, 0)]

    def note(line: dict[str, Any]) -> None:
        statistics = conductor.pool.statistics()
        levels.append((clock.now(), statistics.rollouts_in_flight + statistics.pooled_trajectories))
        if line["event"] == "group_reserved":
            times.begin.update({(line["group_id"], member): clock.now() for member in range(line["size"])})

    log.subscribe(note)
    await conductor.run()
    return levels, [*times.inside, *(clock.now() - begin for begin in times.begin.values())]


class _Times:
    """roles.TrajectoryRecorder: how long each rollout was in the system."""

    def __init__(self) -> None:
        self.begin: dict[tuple[int, int], float] = {}
        self.inside: list[float] = []

    def finished(self, rollout: FinishedRollout) -> None:
        """It stays in the system."""

    def learned(self, selection: Selection, result: UpdateResult) -> None:
        """Its members retire next."""

    def retired(self, key: RolloutKey, reason: RetireReason) -> None:
        self.inside.append(clock.now() - self.begin.pop((key.group_id, key.member)))


def test_no_trained_token_is_over_the_bound_and_the_ledger_closes() -> None:
    lines: list[dict[str, Any]] = []
    simulate(busy_settings(max_staleness=2), random_times(), subscribers=[lines.append])
    ages = {int(age) for line in lines if line["event"] == "updated" for age in line["statistics"]["staleness_histogram"]}
    assert ages == {0, 1, 2}
    ledgers = [line["ledger"] for line in lines if line["event"] == "ledger"]
    assert len(ledgers) == 20 and all(ledger["closes"] for ledger in ledgers)
    assert ledgers[-1]["tokens"]["skipped"].get("stale", 0) > 0


def test_failed_rollouts_are_tried_again_and_counted() -> None:
    lines: list[dict[str, Any]] = []
    simulate(busy_settings(), random_times(failures=0.2), subscribers=[lines.append])
    failed = [line for line in lines if line["event"] == "rollout_failed"]
    finished = sum(line["event"] == "rollout_finished" for line in lines)
    assert 0.1 < len(failed) / finished < 0.3
    assert {line["retried"] for line in failed} == {True, False}
    assert [line for line in lines if line["event"] == "ledger"][-1]["ledger"]["tokens"]["failed"]["environment_error"] > 0


def test_what_the_conductor_takes_for_a_rollout_lies_before_its_start_and_not_in_its_seconds() -> None:
    model = scripted_times()
    settings = run_settings(num_updates=4, mode="sync")
    at_once = clock.run_virtual(simulated_lines(settings, TASKS, model))
    later = clock.run_virtual(simulated_lines(settings, TASKS, replace(model, dispatch_seconds=0.25)))
    for lines, least in ((at_once, 0.0), (later, 0.25)):
        reserved = {line["group_id"]: line["time"] for line in lines if line["event"] == "group_reserved"}
        before = [line["time"] - line["seconds"] - reserved[line["group"]] for line in lines if line["event"] == "rollout_finished"]
        assert min(before) == pytest.approx(least, abs=1e-4)
    ends = [max(line["time"] for line in lines if line["event"] == "updated") for lines in (at_once, later)]
    assert ends[1] >= ends[0] + 4 * 0.25


def test_colocated_devices_sample_and_learn_in_turn() -> None:
    lines: list[dict[str, Any]] = []
    simulate(busy_settings(mode="sync", run={"placement": "colocated", "num_learner_ranks": 2}), random_times(), subscribers=[lines.append])
    devices = summarize(lines)["utilization"]["devices"]
    assert [device["role"] for device in devices] == ["colocated"] * 2
    assert all(0.2 < device["busy_fraction"] <= 1.0 for device in devices)


def test_watch_report_and_trace_read_a_simulated_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    outcome = simulate(busy_settings(), random_times(), run_directory=run)
    started, *_, finished = read_events(run / "events.jsonl")
    assert (started["runtime"], started["clock"], started["wall_time"]) == ("simulated", "virtual", None)
    assert (finished["event"], finished["status"], finished["version"]) == ("run_finished", "done", outcome.version.number)
    assert main(["watch", str(run), "--once"]) == 0
    assert "20/20 updates" in capsys.readouterr().out
    assert main(["report", str(run), "--trace", str(tmp_path / "trace.json")]) == 0
    assert (run / "report.html").stat().st_size > 100_000
    assert (tmp_path / "trace.json").stat().st_size > 1_000


def test_settings_that_the_simulation_does_not_know_are_refused() -> None:
    settings = busy_settings(pool={"verify": "all"}, sampler={"apply": "rollout_start"})
    with pytest.raises(ConfigError) as refused:
        simulate(settings, random_times())
    assert [problem.key for problem in refused.value.problems] == ["sampler.apply", "pool.verify"]


def busy_settings(*, mode: str = "async", max_staleness: int = 2, seed: int = 0, **sections: Any) -> Settings:
    """Two samplers, 20 updates of 4 groups of 4."""
    run = {"seed": seed, **sections.pop("run", {})}
    sampler = {"max_running": 8, **sections.pop("sampler", {})}
    return run_settings(mode=mode, num_updates=20, groups=4, group_size=4, max_staleness=max_staleness, num_samplers=2, run=run, sampler=sampler, **sections)
