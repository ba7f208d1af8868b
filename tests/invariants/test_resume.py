"""I12 over scripted roles and the virtual clock: a run that dies after any of its records goes on from its newest checkpoint, and in the
surviving lineage each journalled trajectory is trained once, retired with a reason, or pooled. Case 9."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fakes.journal import MemoryJournal
from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace.clock import run_virtual
from headrace.config import Settings
from headrace.pool.journal import Delivered, Reported, Reserved, Retired
from headrace.types import PolicyVersion, RetireReason, RolloutKey, Task
from headrace.updates import Selection

NOWHERE = Path("/nowhere")


def tasks(count: int = 7, *, failing: bool = False) -> list[Task]:
    made = [
        scripted_task(
            f"task-{index}",
            answers=1 + index % 4,
            wait_seconds=[0.0, 0.3, 2.0, 6.0][index % 4],
            reward=float(index % 2),
            key_steps=[0] if index % 3 == 0 else [],
            action_tokens=[1 + index % 5],
            fail_at=0 if failing and index in (1, 4) else None,
        )
        for index in range(count)
    ]
    return [*made, scripted_task("sure", reward=1.0, action_tokens=[2])]


@dataclass
class Life:
    """One process's part of a run: what was left of it when it died."""

    journal: MemoryJournal
    start: PolicyVersion
    selections: list[Selection] = field(default_factory=list)
    reported: Counter[str] = field(default_factory=Counter)


def reported_by(records: list[Any]) -> Counter[str]:
    counters: Counter[str] = Counter()
    for record in records:
        if isinstance(record, Reported):
            counters[record.worker] = max(counters[record.worker], record.generated_tokens)
    return counters


def live(settings: Settings, given_tasks: list[Task], journal: MemoryJournal | None = None, **options: Any) -> ScriptedRun:
    """A run from its beginning, or from what a crash has left."""
    if journal is None:
        run = ScriptedRun(settings=settings, tasks=given_tasks, journal=MemoryJournal(settings), checkpoint_directory=NOWHERE, **options)
    else:
        restore, start = journal.restore()
        run = ScriptedRun(settings=settings, tasks=given_tasks, journal=journal, restore=restore, start=start, checkpoint_directory=NOWHERE, **options)
    run_virtual(run.run())
    return run


def small_settings(**changes: Any) -> Settings:
    sections: dict[str, Any] = {"checkpoint": {"every_updates": 2, "keep": 1000}, **changes}
    return run_settings(**{"num_updates": 7, "max_staleness": 3, "num_samplers": 2, **sections})


class Story:
    """A run with crashes: after each, what is left of the journal and what of the training survives."""

    def __init__(self, settings: Settings, given_tasks: list[Task], **options: Any) -> None:
        self.settings, self.tasks, self.options = settings, given_tasks, options
        self.run = live(settings, given_tasks, **options)
        self.survivors: list[Selection] = []
        """Batches of earlier lives that the surviving lineage keeps."""
        self.generated = 0
        """Tokens of earlier lives."""
        self._life_began = 0

    def num_cuts(self) -> range:
        """Numbers of records of this life at which it can die and be resumed: at any."""
        return range(self._life_began, len(self.run.journal.records) + 1)

    def crash(self, num_records: int) -> MemoryJournal:
        """Dies after so many records; returns the journal that is left, and goes on from it."""
        left = self.run.journal.cut(num_records)
        restore, start = left.restore()
        self.survivors = [one for one in (*self.survivors, *self.run.learner.selections) if one.learner_version < restore.version]
        self.generated += reported_by(left.records[self._life_began :]).total()
        self._life_began = num_records
        before = left.cut(num_records)
        self.run = live(self.settings, self.tasks, left, **self.options)
        assert self.run.learner.published[0] == start
        return before

    def check(self, left: MemoryJournal) -> None:
        run, pool = self.run, self.run.conductor.pool
        base = self.run.restore
        assert base is not None
        trained = Counter(member.summary.key[:2] for selection in (*self.survivors, *run.learner.selections) for member in selection.members)
        assert not [key for key, count in trained.items() if count > 1], "trained twice in the surviving lineage"
        lineage = run.learner.version.lineage
        for selection in run.learner.selections:
            for member in selection.members:
                assert all(c.version.lineage == lineage or c.version <= base.version for c in member.summary.versions), "tokens of weights that are undone"
        pool.ledger.check()
        assert all(line["ledger"]["closes"] for line in run.log.named("ledger"))
        snapshot = pool.ledger.snapshot(at_update=0, lineage=lineage)
        assert snapshot["tokens"]["generated"] == self.generated + reported_by(run.journal.records[self._life_began :]).total()
        self._check_fates(left, trained, snapshot)

    def _check_fates(self, left: MemoryJournal, trained: Counter[Any], snapshot: dict[str, Any]) -> None:
        """Every reservation written down: its member was trained, retired with a reason, or is there. Of what was retired between the
        checkpoint and the crash, only failures and what an earlier restore undid stand."""
        pool, mark = self.run.conductor.pool, self.run.restore.state["mark"]  # type: ignore[union-attr]
        retired = {
            record.key[:2]: record.reason
            for at, record in enumerate(self.run.journal.records)
            if isinstance(record, Retired) and (not mark <= at < len(left.records) or record.reason in (RetireReason.FAILED, RetireReason.VOID))
        }
        # the crash may have come between the last failure of a member and the record that it is retired for it
        newest = {record.finished.summary.key[:2]: record.finished.summary for record in left.records if isinstance(record, Delivered)}
        retired = {key: RetireReason.FAILED for key, summary in newest.items() if summary.failed} | retired
        there = {(group.group_id, member) for group in pool.members.groups.values() for member in range(group.size)}
        for record in left.records:
            if isinstance(record, Reserved):
                for member in range(record.size):
                    key = (record.group_id, member)
                    assert key in retired or key in there, f"{key} is lost"
                    assert (retired.get(key) is RetireReason.TRAINED) <= (key in trained)
        attempts = Counter(r.finished.summary.key for r in left.records if isinstance(r, Delivered) and not r.finished.summary.round)
        assert not [key for key, count in attempts.items() if count > 1], "a rollout has one key in its whole life"
        groups = snapshot["groups"]
        assert groups["generated"] == len({r.group_id for r in self.run.journal.records if isinstance(r, Reserved)})


def test_a_run_resumes_after_any_of_its_records() -> None:
    settings, given_tasks = small_settings(num_updates=8), tasks()
    story = Story(settings, given_tasks)
    cuts = list(story.num_cuts())
    assert len(cuts) > 60
    for num_records in cuts[::5]:
        story = Story(settings, given_tasks)
        story.check(story.crash(num_records))


def test_resume_at_update_100_goes_on_from_100() -> None:
    """Case 9: counters, versions and the staleness bound."""
    settings = small_settings(num_updates=104, checkpoint={"every_updates": 10, "keep": 1000}, pool={"selection": "oldest_first"})
    story = Story(settings, tasks())
    state_100 = next(state for _, state in story.run.journal.states if state["version"] == [0, 100])
    left = story.crash(next(at for at, state in story.run.journal.states if state is state_100) + 20)
    story.check(left)
    run = story.run
    assert run.learner.published == [PolicyVersion(1, 100 + index) for index in range(5)]
    assert [line["version"] for line in run.log.named("updated")] == [101, 102, 103, 104]
    assert min(line["group_id"] for line in run.log.named("group_reserved")) >= state_100["pool"]["next_group"]
    assert run.log.named("ledger")[0]["ledger"]["trajectories"]["trained"] > state_100["pool"]["ledger"]["trajectories"]["trained"] > 300
    ages = [s.learner_version.number - c.version.number for s in run.learner.selections for m in s.members for c in m.summary.versions]
    assert 0 <= min(ages) < max(ages) <= settings.max_staleness, "tokens of both lineages count from the same numbers"
    kept = [m for s in run.learner.selections for m in s.members if any(c.version.lineage == 0 for c in m.summary.versions)]
    assert kept, "what lay in the pool is trained"


crashing = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["sync", "async"]),
        "selection": st.sampled_from(["oldest_first", "ready_first"]),
        "on_expiry": st.sampled_from(["skip_tokens", "drop_group", "wait"]),
        "max_staleness": st.integers(1, 4),
        "num_samplers": st.integers(1, 3),
        "quorum": st.sampled_from([None, 2]),
        "min_advantage": st.sampled_from([None, 0.5]),
        "verify": st.sampled_from(["off", "key_steps", "all"]),
        "failing": st.booleans(),
        "learn_seconds": st.sampled_from([0.01, 1.0, 7.0]),
        "every_updates": st.integers(1, 3),
    }
)


@given(schedule=crashing, moments=st.lists(st.floats(0, 1), min_size=1, max_size=3))
@hypothesis_settings(max_examples=15, deadline=None)
def test_any_number_of_crashes_at_any_moment_loses_nothing(schedule: dict[str, Any], moments: list[float]) -> None:
    settings = small_settings(
        mode=schedule["mode"],
        max_staleness=schedule["max_staleness"],
        num_samplers=schedule["num_samplers"],
        group_size=3,
        checkpoint={"every_updates": schedule["every_updates"], "keep": 1000},
        pool={key: schedule[key] for key in ("selection", "on_expiry", "quorum")}
        | {"verify": schedule["verify"] if schedule["mode"] == "async" else "off", "verify_after": 0},
        marks={"min_advantage": schedule["min_advantage"]},
    )
    story = Story(settings, tasks(failing=schedule["failing"]), learn_seconds=schedule["learn_seconds"])
    for moment in moments:
        cuts = story.num_cuts()
        story.check(story.crash(cuts[min(len(cuts) - 1, int(moment * len(cuts)))]))


def test_tasks_of_groups_that_are_undone_are_offered_again_before_any_other() -> None:
    story = Story(small_settings(), tasks())
    mark = story.run.journal.states[0][0]
    reserved = [at for at, record in enumerate(story.run.journal.records) if isinstance(record, Reserved) and at > mark]
    left = story.crash(reserved[5] + 1)
    undone = [r for r in story.run.journal.records[len(left.records) :] if isinstance(r, Retired) and r.reason in (RetireReason.VOID, RetireReason.FAILED)]
    groups = list(dict.fromkeys(record.key.group_id for record in undone))
    by_group = {record.group_id: record.task.id for record in left.records if isinstance(record, Reserved)}
    again = story.run.conductor.restored
    assert again is not None and len(again.again) >= 1
    assert [by_group[group] for group in groups[: len(again.again)]] == [task.id for task in again.again]
    offered = [line["task_id"] for line in story.run.log.named("group_reserved")]
    assert offered[: len(again.again)] == [task.id for task in again.again]


def test_a_payload_that_the_journal_lacks_is_void_and_rolled_out_again() -> None:
    story = Story(small_settings(), tasks())
    left = story.run.journal.cut(story.run.journal.states[1][0])
    restore, start = left.restore()
    names = [key for group in restore.state["pool"]["groups"] for key in group["finished"]]
    assert names, "something was pooled"
    left.records = [record for record in left.records if not isinstance(record, Delivered)]
    lacking = ScriptedRun(
        settings=story.settings,
        tasks=story.tasks,
        journal=MemoryJournal(),
        restore=type(restore)(version=restore.version, state=restore.state, held={}, records=[]),
        start=start,
        checkpoint_directory=NOWHERE,
    )
    run_virtual(lacking.run())
    assert lacking.conductor.restored is not None and lacking.conductor.restored.num_void == len(names)
    lacking.conductor.pool.ledger.check()


def test_records_that_do_not_fit_are_said_to() -> None:
    from headrace.errors import CheckpointError

    story = Story(small_settings(), tasks())
    left = story.run.journal.cut(story.run.journal.states[0][0] + 30)
    restore, start = left.restore()
    stray = next(record for record in left.records if isinstance(record, Delivered))
    broken = type(restore)(version=restore.version, state=restore.state, held=restore.held, records=[*restore.records, stray])
    run = ScriptedRun(settings=story.settings, tasks=story.tasks, journal=MemoryJournal(), restore=broken, start=start, checkpoint_directory=NOWHERE)
    with pytest.raises(CheckpointError, match=r"does not fit.*Move pool\.sqlite away"):
        run_virtual(run.run())


def test_keys_of_rollouts_begun_again_are_new() -> None:
    story = Story(small_settings(), tasks(), learn_seconds=9.0)
    mark, state = story.run.journal.states[0]
    version = PolicyVersion(*state["version"])
    back = next(
        at
        for at, record in enumerate(story.run.journal.records)
        if at > mark and isinstance(record, Delivered) and record.finished.summary.versions[-1].version <= version
    )
    left = story.crash(back + 1)  # the other member of that group is still out
    before = {record.finished.summary.key for record in left.records if isinstance(record, Delivered)}
    started: set[RolloutKey] = {key for _, key in story.run.started}
    assert story.run.conductor.restored is not None and story.run.conductor.restored.in_flight
    assert not started & before
    story.check(left)
