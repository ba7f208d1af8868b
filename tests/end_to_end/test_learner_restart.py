"""Real processes: the learner dies or hangs in the middle, and the run goes back to a checkpoint and on by itself (I12, I13)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from end_to_end.conftest import FinishedRun
from end_to_end.test_runs import left_behind
from headrace.conductor import Conductor
from headrace.errors import RollBackError, WorkerLostError
from headrace.event_log import read_events
from headrace.updates import UpdateResult

RunLetters = Callable[..., FinishedRun]
SETTINGS = ("pool.no_signal=train", "run.num_updates=24", "run.pin_devices=false", "evaluation.every_updates=10")
GONE_SECONDS = 5.0


class Hits:
    """Sends a signal to a process as soon as the learner has made each of these updates, once each."""

    def __init__(self, *hits: tuple[int, str, signal.Signals]) -> None:
        self.left = list(hits)

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "updated" and self.left and event["version"] == self.left[0][0]:
            _, name, number = self.left.pop(0)
            pid = next(process.pid for process in multiprocessing.active_children() if process.name == name)
            assert pid is not None
            os.kill(pid, number)


def check(run: FinishedRun, *, returns: int) -> None:
    """Every update was made once in the surviving lineage, and the ledger of the whole run closes."""
    back = run.named("run_resumed")
    assert [event["lineage"] for event in back] == list(range(1, returns + 1)) and run.events[-1]["status"] == "done"
    assert all(event["ledger"]["closes"] for event in run.named("ledger"))
    made: list[int] = []
    for event in run.events:
        if event["event"] == "run_resumed":
            made = [number for number in made if number <= event["resumed_from_update"]]
        if event["event"] == "updated":
            made.append(event["version"])
    assert made == list(range(1, 25))
    assert run.summary["evaluation"]["after"]["version"] == 24
    assert run.outcome.checkpoint is not None and run.outcome.checkpoint.name == "update_000024"


def check_nothing_is_left(before: dict[str, Any]) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while left_behind() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_behind() == before


@pytest.mark.slow
def test_a_learner_that_is_killed_twice_is_restarted_inside_the_run(run_letters: RunLetters) -> None:
    run_letters("run.num_updates=1", name="warm")
    before = left_behind()
    hits = Hits((3, "learner-0", signal.SIGKILL), (17, "learner-0", signal.SIGKILL))
    run = run_letters(*SETTINGS, "checkpoint.every_updates=5", subscribers=[hits])
    check(run, returns=2)
    first, second = run.named("run_resumed")
    assert (first["resumed_from_update"], first["checkpoint"], first["cause"]) == (0, "", "learner_lost")
    assert second["resumed_from_update"] == 15 and second["undone_updates"] >= 2 and Path(second["checkpoint"]).name == "update_000015"
    assert "Process learner-0 was ended by signal SIGKILL" in second["reason"]
    check_nothing_is_left(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learner-0", "learner-1"])
def test_any_rank_of_a_synchronous_colocated_run_may_be_killed(run_letters: RunLetters, name: str) -> None:
    run_letters("run.num_updates=1", name="warm")
    before = left_behind()
    ranks = ("run.mode=sync", "run.placement=colocated", "run.num_samplers=2", "run.num_learner_ranks=2")
    run = run_letters(*SETTINGS, *ranks, "checkpoint.every_updates=4", subscribers=[Hits((10, name, signal.SIGKILL))])
    check(run, returns=1)
    assert run.named("run_resumed")[0]["resumed_from_update"] >= 8, "a rank that is left may still save where the run stands"
    check_nothing_is_left(before)


@pytest.mark.slow
def test_a_learner_that_hangs_is_restarted_after_its_limit(run_letters: RunLetters) -> None:
    hits = Hits((6, "learner-0", signal.SIGSTOP))
    run = run_letters(*SETTINGS, "checkpoint.every_updates=5", "limits.learn_seconds=10", "limits.stop_seconds=1", subscribers=[hits])
    check(run, returns=1)
    (lost,) = run.named("role_lost")
    assert lost["role"] == "learner" and "no answer in 10 s" in lost["error"]


@pytest.mark.slow
def test_a_learner_that_is_killed_again_and_again_ends_the_run_with_the_cause(run_letters: RunLetters, tmp_path: Path) -> None:
    run_letters("run.num_updates=1", name="warm")
    before = left_behind()
    hits = Hits(*[(6, "learner-0", signal.SIGKILL)] * 10)
    with pytest.raises(WorkerLostError, match=r"the learner was lost 3 times .*limits.max_restarts = 2.*signal SIGKILL.*headrace resume") as raised:
        run_letters(*SETTINGS, "checkpoint.every_updates=5", "limits.max_restarts=2", subscribers=[hits])
    assert raised.value.exit_code == 1
    events = list(read_events(tmp_path / "run/events.jsonl"))
    assert [event["restarted"] for event in events if event["event"] == "role_lost"] == [True, True, False]
    assert events[-1]["status"] == "failed"
    check_nothing_is_left(before)


@pytest.mark.slow
def test_a_rollback_lowers_the_learning_rate_for_good(run_letters: RunLetters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the learner is lost before a checkpoint says so, and after one does."""
    go_on, asked = Conductor._after_update, [RollBackError("it fell", learning_rate_factor=0.25, newest_update=5)]

    async def after_update(self: Conductor, result: UpdateResult) -> None:
        if result.version_after.number == 11 and asked:
            raise asked.pop()
        await go_on(self, result)

    monkeypatch.setattr(Conductor, "_after_update", after_update)
    hits = Hits((12, "learner-0", signal.SIGKILL), (20, "learner-0", signal.SIGKILL))

    run = run_letters(*SETTINGS, "checkpoint.every_updates=5", "checkpoint.keep=3", subscribers=[hits])
    check(run, returns=3)
    assert [event["cause"] for event in run.named("run_resumed")] == ["roll_back", "learner_lost", "learner_lost"]
    assert run.named("run_resumed")[0]["resumed_from_update"] == 5, "not the newest: that one is set aside"
    assert (run.directory / "checkpoints/unused_update_000010").is_dir()
    rates = {event["lineage"]: event["statistics"]["learning_rate"] for event in run.named("updated") if event["statistics"]}
    assert rates[1] == rates[2] == rates[3] == pytest.approx(0.25 * rates[0])
