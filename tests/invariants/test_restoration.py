"""The learner dies, hangs or is rolled back at any moment: the run goes back to a checkpoint and on, inside itself (DESIGN section 9).

Real conductor, pool and workers over scripted samplers and learner under the virtual clock, where a run that hangs raises VirtualDeadlockError.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fakes.restored import Blow, RestoredRun
from fakes.rollouts import scripted_task
from fakes.runs import run_settings, version_numbers
from headrace.clock import run_virtual
from headrace.errors import DivergedError, RollBackError, WaitTimeoutError, WorkerLostError
from headrace.pool.journal import Reserved, Restored, Retired
from headrace.types import RetireReason

NOWHERE = Path("/nowhere")
TASKS = [
    scripted_task(f"t{index}", answers=1 + index % 3, wait_seconds=[0.0, 0.3, 2.0, 5.0][index % 4], reward=index % 2, key_steps=[0] if index % 3 == 0 else [])
    for index in range(7)
]
PATIENT = {"max_restarts": 1000, "learn_seconds": 30.0, "report_seconds": 60.0}


def restored_run(*blows: Blow, num_updates: int = 8, limits: dict[str, Any] | None = None, **options: Any) -> RestoredRun:
    sections = {name: options.pop(name) for name in ("pool", "mode", "max_staleness", "num_samplers") if name in options}
    checkpoint = options.pop("checkpoint", {"every_updates": 2, "keep": 1000}) | {"interrupt_seconds": 0}  # the learner that is struck would still answer
    settings = run_settings(num_updates=num_updates, checkpoint=checkpoint, limits={**PATIENT, **(limits or {})}, **sections)
    return RestoredRun(settings=settings, tasks=TASKS, checkpoint_directory=NOWHERE, blows=blows, **options)


def surviving_updates(run: RestoredRun) -> list[Any]:
    """Batches that the surviving lineage was trained on, in order."""
    kept: list[Any] = []
    for life in run.lives:
        if life.base is not None:
            kept = [one for one in kept if one.learner_version < life.base.version]
        kept += life.selections
    return kept


def check(run: RestoredRun) -> None:
    settings, pool = run.settings, run.conductor.pool
    survivors = surviving_updates(run)
    if settings.run.mode == "sync" or settings.pool.no_signal == "train":
        assert [one.learner_version.number for one in survivors] == list(range(settings.run.num_updates)), "every update was made once"
    trained = Counter(member.summary.key[:2] for one in survivors for member in one.members)
    assert not trained or max(trained.values()) == 1, "I12: trained twice in the surviving lineage"
    for before, life in zip([None, *run.lives], run.lives, strict=False):
        assert version_numbers(life.published) == sorted(set(version_numbers(life.published))), "I1"
        assert {version.lineage for version in life.published} <= {life.start.lineage}
        if before is not None and life.base is not None:
            assert life.start.lineage == before.start.lineage + 1 and life.start.number == life.base.version.number
            for one in life.selections:
                for member in one.members:
                    assert all(c.version.lineage == life.start.lineage or c.version <= life.base.version for c in member.summary.versions), "undone weights"
        assert all(line["ledger"]["closes"] for line in life.lines if line["event"] == "ledger"), "I7"
    pool.ledger.check()
    check_fates(run, trained)


def check_fates(run: RestoredRun, trained: Counter[Any]) -> None:
    """I5: each member that was ever reserved was trained, is there, or left for a reason that stands."""
    records = run.journal.records
    reserved = {(record.group_id, member) for record in records if isinstance(record, Reserved) for member in range(record.size)}
    left = {record.key[:2] for record in records if isinstance(record, Retired) and record.reason is not RetireReason.TRAINED}
    there = {(group.group_id, m) for group in run.conductor.pool.members.groups.values() for m in (*group.in_flight, *group.finished, *group.verifying)}
    assert reserved == set(trained) | left | there
    assert not set(trained) & there


blows = st.lists(
    st.builds(
        Blow, st.floats(0.0, 40.0).map(lambda seconds: round(seconds, 2)), st.sampled_from(["killed", "killed", "hung", "rolled_back", "rolled_back_far"])
    ),
    min_size=1,
    max_size=4,
)
schedules = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["async", "sync"]),
        "max_staleness": st.integers(0, 4),
        "num_samplers": st.integers(1, 3),
        "selection": st.sampled_from(["oldest_first", "ready_first"]),
        "on_expiry": st.sampled_from(["skip_tokens", "drop_group", "wait"]),
        "every_updates": st.sampled_from([1, 2, 3]),
        "learn_seconds": st.sampled_from([0.01, 1.0, 5.0]),
        "fails_to_start": st.sampled_from([0, 0, 1]),
        "memory_copy": st.booleans(),
    }
)


def scheduled_run(schedule: dict[str, Any], when: list[Blow]) -> RestoredRun:
    return restored_run(
        *when,
        mode=schedule["mode"],
        max_staleness=schedule["max_staleness"],
        num_samplers=schedule["num_samplers"],
        pool={"selection": schedule["selection"], "on_expiry": schedule["on_expiry"], "no_signal": "train"},
        checkpoint={"every_updates": schedule["every_updates"], "keep": 1000, "memory_copy": schedule["memory_copy"]},
        learn_seconds=schedule["learn_seconds"],
        fails_to_start=schedule["fails_to_start"],
        roll_back_limit=1000,
    )


@given(schedule=schedules, when=blows)
@hypothesis_settings(max_examples=15, deadline=None)
def test_runs_survive_learners_that_die_hang_and_are_rolled_back_at_any_moment(schedule: dict[str, Any], when: list[Blow]) -> None:
    run = scheduled_run(schedule, when)
    run_virtual(run.run())
    check(run)


@pytest.mark.slow
@given(schedule=schedules, when=blows)
@hypothesis_settings(max_examples=400, deadline=None)
def test_runs_survive_learners_over_many_schedules(schedule: dict[str, Any], when: list[Blow]) -> None:
    run = scheduled_run(schedule, when)
    run_virtual(run.run())
    check(run)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_learner_costs_the_updates_since_the_checkpoint_and_nothing_else(mode: str) -> None:
    calm, hit = restored_run(mode=mode, num_updates=20), restored_run(Blow(12.7, "killed"), mode=mode, num_updates=20)
    for run in (calm, hit):
        run_virtual(run.run())
        check(run)
    first, second = hit.lives
    assert second.start.number >= 2 and second.start.number % 2 == 0
    undone = [one for one in first.selections if one.learner_version.number >= second.start.number]
    assert 1 <= len(undone) <= 2, "a checkpoint every 2 updates"
    (lost,) = hit.told.named("role_lost")
    assert lost["role"] == "learner" and lost["restarted"] and "SIGKILL" in lost["error"]
    assert len(calm.lives) == 1 and not calm.told.lines
    assert hit.conductor.restored is not None
    trained = {member.summary.key for one in undone for member in one.members if one is not first.selections[-1] or mode == "sync"}
    back = {finished.summary.key for finished in hit.conductor.restored.pooled}
    usable = {m.summary.key for one in undone for m in one.members if all(c.version.number <= second.start.number for c in m.summary.versions)}
    assert trained & usable <= back, "what only the checkpoint's weights and older ones had sampled is in the pool again"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_with_a_copy_in_memory_a_killed_learner_costs_one_update_at_most(mode: str) -> None:
    strikes = [Blow(8.3 + 21.7 * index, "killed") for index in range(6)]
    run = restored_run(*strikes, mode=mode, num_updates=160, checkpoint={"every_updates": 150, "every_seconds": 0, "keep": 1000, "memory_copy": True})
    run_virtual(run.run())
    check(run)
    for before, life in itertools.pairwise(run.lives):
        made = max((one.number for one in before.published), default=0)
        assert life.start.number >= made - 1, "what was published before the last update is not undone"
        assert life.base is not None and life.base.copied is not None
    assert len(run.lives) == 7


def test_a_rollback_does_not_go_to_the_copy() -> None:
    run = restored_run(Blow(9.2, "killed"), Blow(14.2, "rolled_back"), num_updates=20, checkpoint={"every_updates": 4, "keep": 1000, "memory_copy": True})
    run_virtual(run.run())
    check(run)
    _, after_loss, after_rollback = run.lives
    assert after_loss.base is not None and after_loss.base.copied is not None
    assert after_rollback.base is not None and after_rollback.base.copied is None and after_rollback.start.number % 4 == 0


def test_a_learner_that_answers_no_more_is_lost_after_its_limit() -> None:
    run = restored_run(Blow(5.5, "hung"), limits={"learn_seconds": 7.0})
    run_virtual(run.run())
    check(run)
    (lost,) = run.told.named("role_lost")
    assert "no answer in 7 s" in lost["error"] and len(run.lives) == 2


def test_a_life_that_does_not_come_up_is_begun_again() -> None:
    run = restored_run(Blow(8.0, "rolled_back"), fails_to_start=2)
    run_virtual(run.run())
    check(run)
    assert len(run.lives) == 2
    assert [back.learning_rate_factor for back in run.returns] == [0.5] * 3, "what was to be done is done by the one that comes up"
    assert [line["error"] for line in run.told.named("role_lost")] == ["sampler-0 did not come up"] * 2


def test_a_batch_that_kills_the_learner_each_time_ends_the_run_with_the_cause_at_any_pace() -> None:
    run = restored_run(dies_at=6, limits={"max_restarts": 3, "restart_window_seconds": 0.5})
    with pytest.raises(WorkerLostError, match=r"the learner was lost 4 times before it had made update 6 \(limits.max_restarts = 3\). The last time: Process"):
        run_virtual(run.run())
    losses = run.told.named("role_lost")
    assert [line["losses"] for line in losses] == [1, 2, 3, 4] and [line["restarted"] for line in losses] == [True, True, True, False]


def test_too_many_losses_in_the_window_end_the_run_although_it_gets_on() -> None:
    run = restored_run(*(Blow(6.0 * index, "killed") for index in range(1, 4)), num_updates=100, limits={"max_restarts": 2})
    with pytest.raises(WorkerLostError, match=r"the learner was lost 3 times within 600 s \(limits.max_restarts = 2\)"):
        run_virtual(run.run())


def test_losses_far_apart_do_not_end_the_run() -> None:
    run = restored_run(*(Blow(12.0 * index, "killed") for index in range(1, 5)), num_updates=40, limits={"max_restarts": 1, "restart_window_seconds": 5})
    run_virtual(run.run())
    check(run)
    assert len(run.lives) == 5


def test_without_restarts_the_first_loss_of_the_learner_ends_the_run_as_it_is() -> None:
    run = restored_run(Blow(5.0, "killed"), limits={"max_restarts": 0})
    with pytest.raises(WorkerLostError, match=r"^Process learner-0 was ended by signal SIGKILL in the middle of the run\.$"):
        run_virtual(run.run())
    silent = restored_run(Blow(5.0, "hung"), limits={"max_restarts": 0, "learn_seconds": 7.0})
    with pytest.raises(WaitTimeoutError, match=r"conductor waits for the learner to .*: no answer in 7 s"):
        run_virtual(silent.run())


def test_where_nothing_was_saved_the_error_says_which_setting_would_have_helped() -> None:
    for how in ("killed", "rolled_back"):
        run = restored_run(Blow(5.0, how), keeps_records=False)
        with pytest.raises((WorkerLostError, RollBackError), match=r"nothing of it was saved: set checkpoint\.every_updates or checkpoint\.every_seconds"):
            run_virtual(run.run())


def test_a_run_that_has_saved_nothing_yet_goes_on_from_its_start() -> None:
    run = restored_run(Blow(5.0, "killed"), checkpoint={"every_updates": 1000})
    run_virtual(run.run())
    check(run)
    assert [tuple(life.start) for life in run.lives] == [(0, 0), (1, 0)]
    assert run.learner.published[0] == (1, 0)


def test_a_rollback_is_written_down_and_goes_to_the_newest_checkpoint_or_an_older_one() -> None:
    near, far = restored_run(Blow(12.7, "rolled_back"), num_updates=20), restored_run(Blow(12.7, "rolled_back_far"), num_updates=20)
    for run in (near, far):
        run_virtual(run.run())
        check(run)
        assert not run.told.named("role_lost"), "nothing was lost"
        assert [(back.cause, back.reason, back.learning_rate_factor) for back in run.returns] == [("roll_back", "the reward fell", 0.5)]
        assert [record.lineage for record in run.journal.records if isinstance(record, Restored)] == [1]
    assert near.lives[1].start.number > far.lives[1].start.number == 2


def test_rollbacks_in_a_row_that_do_not_help_end_the_run() -> None:
    run = restored_run(*(Blow(9.0 + index, "rolled_back_far") for index in range(5)), num_updates=100)
    with pytest.raises(DivergedError, match=r"3 rollbacks in a row did not help\. Now: the reward fell") as raised:
        run_virtual(run.run())
    assert not isinstance(raised.value, RollBackError) and len(run.lives) == 4
