"""The pool's neighbours in small, for tests under the virtual clock: finished rollouts, a learner's bookkeeping, a whole run.

settings = pool_settings(pool={"max_staleness": 2}, rollout={"group_size": 2})
pool.add(finished(key, versions={0: 3, 1: 2}, reward=1.0))
pool.retire(selection, learned(selection, trained_from=4, settings=settings))
run = SmallRun(settings, learn_seconds=1.0)
await run.run(tasks)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.clock import now
from headrace.config import Settings
from headrace.pool.members import Retirement
from headrace.pool.pool import ExperiencePool, GroupReservation, PoolClosedError
from headrace.types import EndReason, FinishedRollout, PolicyVersion, RetireReason, RolloutKey, Task, TrajectorySummary, VersionCount
from headrace.updates import MemberOutcome, SelectedMember, Selection, UpdateResult

TASK = Task(id="a", data={})


def version(number: int) -> PolicyVersion:
    return PolicyVersion(0, number)


def pool_settings(**sections: Mapping[str, Any]) -> Settings:
    """Groups of 2, batches of 2 groups, unless told otherwise."""
    merged: dict[str, dict[str, Any]] = {"rollout": {"group_size": 2}, "pool": {"groups_per_batch": 2}}
    for name, section in sections.items():
        merged.setdefault(name, {}).update(section)
    return Settings.model_validate(merged)


def finished(
    key: RolloutKey,
    *,
    versions: Mapping[int, int] | None = None,
    key_versions: Mapping[int, int] | None = None,
    reward: float = 0.0,
    end: EndReason = EndReason.DONE,
    discarded: int = 0,
    key_steps: int | None = None,
    steps: int | None = None,
    kind: str = "default",
    round: int = 0,
    refreshed: int = 0,
    refreshed_key_steps: int = 0,
) -> FinishedRollout:
    """`versions`: version -> unmarked tokens; `key_versions`: version -> tokens of key steps; one step of each kind a version unless told."""
    versions, key_versions = {0: 3} if versions is None else versions, key_versions or {}
    numbers = sorted({*versions, *key_versions})
    tokens = sum(versions.values()) + sum(key_versions.values())
    summary = TrajectorySummary(
        key=key,
        task_id="a",
        task_kind=kind,
        reward=reward,
        end_reason=end,
        error=None if end is EndReason.DONE else "scripted",
        num_tokens=tokens + 2,
        num_action_tokens=tokens,
        num_steps=len(versions) + len(key_versions) if steps is None else steps,
        num_key_steps=len(key_versions) if key_steps is None else key_steps,
        discarded_tokens=discarded,
        versions=tuple(VersionCount(version=version(number), unmarked=versions.get(number, 0), key=key_versions.get(number, 0)) for number in numbers),
        seconds=1.0,
        wait_seconds=0.0,
        round=round,
        refreshed_tokens=refreshed,
        refreshed_key_steps=refreshed_key_steps,
    )
    return FinishedRollout(summary=summary, payload=repr(tuple(key)).encode())


def outcome(member: SelectedMember, *, last_version: int, max_staleness: int, max_key_staleness: int) -> MemberOutcome:
    """What a correct learner reports: key tokens are always trained, unmarked ones within the bound at the last minibatch."""
    summary = member.summary
    stale = 0 if member.marked else sum(count.unmarked for count in summary.versions if last_version - count.version.number > max_staleness)
    old_key = any((member.marked or count.key) and last_version - count.version.number > max_key_staleness for count in summary.versions)
    return MemberOutcome(
        key=summary.key,
        trained_tokens=summary.num_action_tokens - stale,
        skipped_tokens={"stale": stale} if stale else {},
        trained_key_steps=member.num_key_steps,
        over_bound_key_steps=member.num_key_steps if old_key else 0,
    )


def learned(selection: Selection, *, trained_from: int, settings: Settings, refused: str | None = None) -> UpdateResult:
    """The result of a whole batch; refused: no weight changed."""
    updates = 0 if refused else settings.updates_per_batch
    last = trained_from + settings.updates_per_batch - 1
    return UpdateResult(
        selection_id=selection.id,
        version_before=version(trained_from),
        version_after=version(trained_from + updates),
        outcomes=tuple(
            outcome(member, last_version=last, max_staleness=selection.max_staleness, max_key_staleness=selection.max_key_staleness)
            for member in selection.members
        ),
        statistics=None,
        refused=refused,
        seconds=0.0,
        busy_seconds=0.0,
    )


class Bench:
    """A pool, its reservations and its retirements."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.retired: dict[RolloutKey, RetireReason] = {}
        self.pool = ExperiencePool(settings, on_retire=self._note)
        self.groups: list[GroupReservation] = []
        self.generated = 0
        self.reports = False
        """Whether `finish` reports the tokens too; without that the ledger of tokens does not close."""

    def add(self, one: FinishedRollout) -> None:
        """Reported and delivered."""
        self.generated += one.summary.num_action_tokens + one.summary.discarded_tokens
        self.pool.ledger.report_generated("", self.generated)
        self.pool.add(one)

    def _note(self, retirement: Any) -> None:
        assert retirement.key not in self.retired
        self.retired[retirement.key] = retirement.reason

    def fill(self, *, learner: int = 0, sampler: int | None = None) -> None:
        sampler = learner if sampler is None else sampler
        while (reservation := self.pool.reserve_now(TASK, learner_version=version(learner), sampler_version=version(sampler))) is not None:
            self.groups.append(reservation)

    def finish(self, *indices: int, rewards: tuple[float, ...] = (0.0, 1.0), backwards: bool = False, **tokens: Any) -> None:
        for index in indices:
            for key in sorted(self.groups[index].keys, reverse=backwards):
                (self.add if self.reports else self.pool.add)(finished(key, reward=rewards[key.member], **tokens))

    async def try_take(self, learner: int) -> Selection | None:
        """None: it waits."""
        try:
            async with asyncio.timeout(1):
                return await self.pool.take(learner_version=version(learner))
        except TimeoutError:
            return None

    async def take(self, learner: int) -> Selection:
        selection = await self.try_take(learner)
        assert selection is not None
        return selection

    def learn(self, selection: Selection, trained_from: int) -> None:
        self.pool.retire(selection, learned(selection, trained_from=trained_from, settings=self.settings))

    async def advance(self, learner: int) -> None:
        """Fills, finishes and learns one batch of fresh groups while older ones stay out."""
        selection = await self.take(learner)
        self.learn(selection, learner)


def groups_of(selection: Selection) -> list[int]:
    return sorted({key.group_id for key in (*(member.summary.key for member in selection.members), *selection.filtered)})


class SmallRun:
    """A conductor in small. A rollout of a task draws one token after each `seconds / tokens`, under the sampler's version then.

    Task data: seconds, tokens; `fail_attempts` of its member 0 fail first. Rewards differ between members.
    """

    def __init__(self, settings: Settings, *, learn_seconds: float = 1.0, apply_seconds: float = 0.0, max_in_flight: int | None = None) -> None:
        self.settings = settings
        self.retired: list[Retirement] = []
        self.pool = ExperiencePool(settings, on_retire=self.retired.append)
        self.learn_seconds, self.apply_seconds = learn_seconds, apply_seconds
        self.slots = asyncio.Semaphore(max_in_flight or 10**9)
        self.learner_version = self.sampler_version = 0
        self.generated = 0
        self.selections: list[Selection] = []
        self.started: Counter[str] = Counter()
        self.trace: list[tuple[Any, ...]] = []

    async def run(self, tasks: Sequence[Task], *, num_batches: int | None = None) -> None:
        """Offers every task once and drains, or ends after `num_batches`."""
        async with asyncio.TaskGroup() as group:
            loops = group.create_task(self._roll_out(group, tasks))
            await self._learn(group, num_batches)
            self.pool.close("the run is over")
            await loops

    async def _roll_out(self, group: asyncio.TaskGroup, tasks: Sequence[Task]) -> None:
        for task in tasks:
            try:
                reservation = await self.pool.reserve(task, learner_version=version(self.learner_version), sampler_version=version(self.sampler_version))
            except PoolClosedError:
                return
            self.trace.append(("reserved", reservation.group_id, self.sampler_version))
            for key in reservation.keys:
                group.create_task(self._rollout(group, key, task))
        self.pool.drain("no more tasks")

    async def _rollout(self, group: asyncio.TaskGroup, key: RolloutKey, task: Task) -> None:
        drawn: Counter[int] = Counter()
        async with self.slots:
            self.started[task.kind] += 1
            for _ in range(task.data["tokens"]):
                await asyncio.sleep(task.data["seconds"] / task.data["tokens"])
                drawn[self.sampler_version] += 1
                self.generated += 1
        failed = key.member == 0 and key.attempt < task.data.get("fail_attempts", 0)
        end = EndReason.ENVIRONMENT_ERROR if failed else EndReason.DONE
        self.pool.ledger.report_generated("w", self.generated)
        self.trace.append(("finished", key, dict(drawn), end))
        result = self.pool.add(finished(key, versions=drawn, reward=float(key.member), end=end, kind=task.kind), worker="w")
        if result.retry is not None:
            group.create_task(self._rollout(group, result.retry, task))

    async def _learn(self, group: asyncio.TaskGroup, num_batches: int | None) -> None:
        while num_batches is None or len(self.selections) < num_batches:
            try:
                selection = await self.pool.take(learner_version=version(self.learner_version))
            except PoolClosedError:
                return
            self.selections.append(selection)
            self.trace.append(("taken", self.learner_version, [member.summary.key for member in selection.members]))
            await asyncio.sleep(self.learn_seconds)
            result = learned(selection, trained_from=self.learner_version, settings=self.settings)
            self.learner_version = result.version_after.number
            if self.settings.waits_for_acknowledgements:
                await self._apply(self.learner_version)
            else:
                group.create_task(self._apply(self.learner_version))
            self.pool.retire(selection, result)
            self.pool.ledger.check()
            self.trace.append(("retired", self.learner_version, now()))

    async def _apply(self, number: int) -> None:
        await asyncio.sleep(self.apply_seconds)
        self.sampler_version = max(self.sampler_version, number)
        self.pool.observe(sampler_version=version(self.sampler_version))
