"""The conductor drives three loops and moves things between the roles; it never touches a token or a step.

    roll_out   takes: room at a worker, admission by the pool, the next task   gives: requests to workers
               waits for: room, admission                                      woken by: reports, retirements
    collect    takes: a worker's reports                                       gives: trajectories to the pool; what a lost one had to others
               waits for: the worker                                           woken by: its messages
    learn      takes: a batch from the pool                                    gives: updates; announces weights; retires
               waits for: the pool, the learner                                woken by: additions, results
    verify     takes: aged rollouts that are about to be served                gives: them back to their workers; says what left
               waits for: the pool                                             woken by: whatever changes in the pool
    evaluate   takes: a version that is due                                    gives: evaluations
               waits for: learn                                                woken by: updates

Synchronous is the same loops with a bound of 0: admission lets exactly one batch out, `learn` waits until every sampler has
taken up the update, and only then retires the batch, which frees the admission for the next one. Whoever moves `retire`
before the acknowledgement breaks I6 at max_staleness 0.

Every wait for somebody else has a name and a limit. `roll_out` and `verify` wait for the pool without one of their own: when they stand
still no batch comes together, which `learn` notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace import events as ev
from headrace.checkpointing import Checkpoints, RepeatingSource, Restore, go_on
from headrace.clock import Waits, now, periodic_seconds
from headrace.config import Settings, Verify
from headrace.errors import HeadraceError, WaitTimeoutError, WorkerLostError, first_error
from headrace.evaluation import evaluated, evaluation_requests
from headrace.governor import Governor
from headrace.interruption import SteadyLearner, save_interrupted
from headrace.pool.group import lost_rollout
from headrace.pool.journal import Journal
from headrace.pool.pool import ExperiencePool
from headrace.roles import Evaluator, EventSink, Learner, RolloutWorker, TaskSource, TrajectoryRecorder
from headrace.setbacks import Setbacks
from headrace.supervision import Restart, Supervision, watch_waits
from headrace.types import FinishedRollout, PolicyVersion, RolloutKey, RolloutRequest, SamplingParameters, Task, WorkerReport
from headrace.updates import Selection, UpdateResult
from headrace.workers import Workers, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Everything the conductor drives, made by a runtime."""

    source: TaskSource
    workers: Sequence[RolloutWorker]
    learner: Learner
    evaluator: Evaluator | None
    restart: Restart | None = None
    """Of a lost worker or evaluator; None: each loss ends the run."""


class Conductor:
    def __init__(
        self,
        settings: Settings,
        roles: Roles,
        *,
        sampling: SamplingParameters,
        evaluation_sampling: SamplingParameters,
        evaluation_tasks: Sequence[Task],
        events: EventSink,
        checkpoint_directory: Path | None,
        recorder: TrajectoryRecorder | None = None,
        journal: Journal | None = None,
        restore: Restore | None = None,
    ) -> None:
        """`journal`: what makes the run one that can be gone on with. `restore`: what it goes on from; the learner has those weights."""
        self.settings = settings
        self.waits = Waits()
        self.source, self.evaluator = RepeatingSource(roles.source), roles.evaluator
        self.learner = SteadyLearner(roles.learner, self.waits, settings.limits.learn_seconds)
        self.recorder = recorder
        self.pool = ExperiencePool(
            settings,
            on_retire=None if recorder is None else lambda member: recorder.retired(member.key, member.reason),
            on_pace=lambda paced, wait_seconds: events.emit(ev.Paced.of(paced, wait_seconds=wait_seconds)),
            journal=journal,
            source_place=self.source.place,
        )
        self.restored = None if restore is None else go_on(restore, self.learner, self.pool, self.source, recorder)
        self.sampling, self.evaluation_sampling = sampling, evaluation_sampling
        self.evaluation_tasks = evaluation_tasks
        self.events = events
        self.checkpoints = Checkpoints(settings, self.learner, events, self.waits, directory=checkpoint_directory, journal=journal, restore=restore)
        self.workers = Workers(roles.workers, PolicyVersion(0, 0))
        self._supervision = Supervision(settings, events, self.waits, roles.restart)
        self._changed = asyncio.Condition()
        self._due: asyncio.Queue[PolicyVersion] = asyncio.Queue()
        self._setbacks = Setbacks(settings)
        self.governor = Governor(settings, self.pool, events, restore=restore)
        self._began_seconds, self._levels_due = now(), 0.0
        self._in_hand: Selection | None = None  # learned, until it is retired

    async def run(self) -> None:
        """Trains until num_updates. Raises the first HeadraceError of any loop; cancelling it ends every loop, and saves what was learned."""
        async with self.learner.calls():
            try:
                await self._train()
            except asyncio.CancelledError:
                limit_seconds = self.settings.checkpoint.interrupt_seconds
                await save_interrupted(limit_seconds, self.learner, self.checkpoints, self._save, self.events, self._in_hand, self._learned)
                raise

    async def _train(self) -> None:
        await self._publish()
        if self.learner.version.number == 0:
            await self._evaluate(self.learner.version)
        self.events.emit(ev.TimedWindow(phase="start"))
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(self._collect(state)) for state in self.workers.states.values()]
                background += [group.create_task(self._roll_out()), group.create_task(watch_waits(self.waits, self.events))]
                if self.settings.pool.verify is not Verify.OFF:
                    background.append(group.create_task(self._verify()))
                evaluating = group.create_task(self._evaluate_when_due())
                await self._learn()
                self.events.emit(ev.TimedWindow(phase="end"))
                for task in background:
                    task.cancel()
                self._due.put_nowait(_END)
                await evaluating
                for state in self.workers.states.values():
                    await state.worker.stop()
        except BaseExceptionGroup as group_error:
            raise first_error(group_error) from group_error
        await self._save()
        await self.learner.stop()
        await self._evaluate(self.learner.version)

    # --- the loops ---------------------------------------------------------------------------------------------------------

    async def _roll_out(self) -> None:
        if self.restored is not None:
            await self._wait_applied(self.learner.version)  # nothing is sampled by older weights
            for task, keys in self.restored.in_flight:
                await self._wait_changed(self.workers.have_room)
                await self.workers.give([self._request(key, task) for key in keys])
        while True:
            await self._wait_changed(self.workers.have_room)
            reservation = await self.pool.reserve(self.source.next(), learner_version=self.learner.version, sampler_version=self.workers.oldest_version())
            task = reservation.task
            self.events.emit(ev.GroupReserved(group_id=reservation.group_id, task_id=task.id, task_kind=task.kind, size=len(reservation.keys)))
            await self.workers.give([self._request(key, task) for key in reservation.keys])

    async def _collect(self, state: WorkerState) -> None:
        while True:
            try:
                report = await self.waits.limited(
                    state.worker.next_report(),
                    lambda: f"conductor waits for a sign of life from {state.name}",
                    self.settings.limits.report_seconds,
                    "It may be blocked by the recipe's Python, or its machine may be overloaded; raise limits.report_seconds if that is expected.",
                )
            except (WorkerLostError, WaitTimeoutError) as error:
                report = await self._replace(state, error)
            self.pool.report_generated(report.worker, report.generated_tokens)
            self.pool.rejected(report.rejected)
            for finished in report.finished:
                await self._add(finished, state)
            self._note(state, report)
            await self._notify()

    async def _learn(self) -> None:
        limits = self.settings.limits
        while self.learner.version.number < self.settings.run.num_updates:
            started = now()
            selection = await self.waits.limited(
                self.pool.take(learner_version=self.learner.version),
                lambda: f"learner waits for a batch: {self.pool.waiting_text(self.learner.version)}{self._oldest_wait()}",
                limits.batch_seconds,
                "Raise limits.batch_seconds, pool.max_staleness or run.num_samplers, or lower rollout.max_seconds.",
            )
            self.events.emit(ev.SelectionTaken.of(selection, wait_seconds=now() - started))
            if not selection.members:
                self.pool.retire(selection, None)
                self.governor.empty(selection.learner_version, self.pool.reward_mean(selection))
                self._setbacks.empty(self.pool.reward_mean(selection))
                continue
            self._in_hand = selection
            await self.checkpoints.written_down()
            sent = now()
            result = await self.learner.learn(selection)
            learned = now()
            if result.version_after > result.version_before:
                version = await self._publish()
                if self.pool.waits_for_acknowledgements:
                    await self._wait_applied(version)
            self._learned(selection, result, away_seconds=learned - sent, finished_seconds_ago=now() - learned)
            await self._after_update(result)

    async def _verify(self) -> None:
        while True:
            change = self.pool.next_change()
            for name, keys in self.pool.due_for_verification().items():
                self.events.emit(ev.VerificationAsked(role=name, rollouts=len(keys)))
                await self.workers.states[name].worker.verify(keys)
            for name, left in self.pool.take_forgotten().items():
                await self.workers.states[name].worker.forget(left)
            await change.wait()

    async def _evaluate_when_due(self) -> None:
        while (version := await self._due.get()) is not _END:
            await self._evaluate(version)

    # --- verbs -------------------------------------------------------------------------------------------------------------

    async def _publish(self) -> PolicyVersion:
        """Makes the learner's weights the newest and says so. Nobody waits for a sampler here."""
        update = await self.learner.publish()
        self.events.emit(ev.WeightsPublished.of(update))
        await self.workers.announce(update)
        return update.version

    async def _wait_applied(self, version: PolicyVersion) -> None:
        def late() -> list[str]:
            return [state.name for state in self.workers.up if state.version < version]

        started = now()
        await self.waits.limited(
            self._wait_changed(lambda: not late()),
            lambda: f"conductor waits for {', '.join(late())} to take up version {version}",
            self.settings.limits.apply_seconds,
            "The sampler may be stuck in a decode step or in the recipe's Python; raise limits.apply_seconds if the weights are large.",
        )
        self.events.emit(ev.WeightsAcknowledged.of(version, wait_seconds=now() - started))

    async def _add(self, finished: FinishedRollout, state: WorkerState) -> None:
        summary = finished.summary
        if self.recorder is not None:
            self.recorder.finished(finished)
        state.rollouts.discard(summary.key)
        result = self.pool.add(finished, worker=state.name)
        self.events.emit((ev.RolloutVerified if result.verified else ev.RolloutFinished).of(summary, role=state.name))
        if summary.failed:
            self.events.emit(ev.RolloutFailed.of(summary, role=state.name, retried=result.retry is not None))
        self._setbacks.came_back(summary)
        if result.retry is not None:
            await self.workers.give_to(state, self._request(result.retry, result.task))

    async def _replace(self, state: WorkerState, error: HeadraceError) -> WorkerReport:
        """A worker is lost: the others take what it had, its successor joins them. Returns that one's first report under the newest weights."""
        keys = state.lose()
        self._supervision.lost(state.name, error, rollouts=len(keys))
        again = []
        for key, result in zip(keys, self.pool.worker_lost(state.name, keys), strict=True):
            lost = lost_rollout(key, result.task).summary
            self.events.emit(ev.RolloutFinished.of(lost, role=state.name))
            self.events.emit(ev.RolloutFailed.of(lost, role=state.name, retried=result.retry is not None))
            again += [] if result.retry is None else [self._request(result.retry, result.task)]
        await self.workers.give(again)
        await self._notify()
        report = await self._supervision.restarted(state.name, lambda: self.workers.taken_up(state))
        await self.workers.joined(state)
        return report

    async def _evaluate(self, version: PolicyVersion) -> None:
        if self.evaluator is None:
            return
        requests = evaluation_requests(self.settings, self.evaluation_tasks, self.evaluation_sampling)
        started = now()
        evaluate = partial(self.evaluator.evaluate, version, requests, self.evaluation_tasks)
        result = await self._supervision.repeated(
            "evaluator",
            lambda: self.waits.limited(
                evaluate(),
                f"evaluation of version {version}",
                self.settings.limits.evaluate_seconds,
                "Lower evaluation.num_tasks or raise limits.evaluate_seconds; an evaluate function or environment that waits for ever does this too.",
            ),
        )
        self.pool.ledger.add_evaluation([finished.summary for finished in result.finished])
        line = evaluated(self.settings, result, now() - started)
        self.checkpoints.retention.evaluated(version.number, line.mean)
        self.events.emit(line)

    async def _save(self) -> None:
        await self.checkpoints.save(self.pool, self.source, self.governor.saved())

    async def _after_update(self, result: UpdateResult) -> None:
        if self.checkpoints.due(result) and self.governor.lets_save(result.version_after):
            await self._save()
        elif result.version_after > result.version_before:
            await self.checkpoints.copy(self.pool, self.source, self.governor.state())
        before, after = result.version_before.number, result.version_after.number
        every = self.settings.evaluation.every_updates
        if every and before // every != after // every and after < self.settings.run.num_updates and self._due.empty():
            self._due.put_nowait(result.version_after)

    # --- notes -------------------------------------------------------------------------------------------------------------

    def _note(self, state: WorkerState, report: WorkerReport) -> None:
        if report.version > state.version:
            self.events.emit(ev.WeightsApplied.of(report))
        state.heard(report)
        self.pool.observe(sampler_version=self.workers.oldest_version())
        self.pool.observe_worker(state.name, version=report.version, parked=report.parked)
        if report.activity is not None:
            self.events.emit(ev.WorkerActive(role=report.worker, in_flight=report.in_flight, activity=report.activity, longest_wait=report.longest_wait))
        if now() >= self._levels_due:
            self._levels_due = now() + periodic_seconds(now() - self._began_seconds)
            self.events.emit(ev.PoolLevels.of(self.pool.statistics(), waits=self.waits.current()))

    def _learned(self, selection: Selection, result: UpdateResult, *, away_seconds: float = 0.0, finished_seconds_ago: float = 0.0) -> None:
        if self.recorder is not None:
            self.recorder.learned(selection, result)
        self.pool.retire(selection, result)
        self._in_hand = None
        version = result.version_after
        reward_mean = self.pool.reward_mean(selection)
        self.checkpoints.retention.updated(reward_mean)
        self.events.emit(ev.Updated.of(selection, result, reward_mean=reward_mean, away_seconds=away_seconds, finished_seconds_ago=finished_seconds_ago))
        self.pool.ledger.check()
        self.events.emit(ev.LedgerClosed(ledger=self.pool.ledger.snapshot(at_update=version.number, lineage=version.lineage)))
        self._setbacks.updated()
        self.governor.updated(result, reward_mean)

    # --- small things ------------------------------------------------------------------------------------------------------

    def _request(self, key: RolloutKey, task: Task) -> RolloutRequest:
        return RolloutRequest(key=key, task=task, seed=self.settings.run.seed, sampling=self.sampling)

    def _oldest_wait(self) -> str:
        return "".join(f"; {wait}" for wait in self.workers.longest_waits())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_changed(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)


_END = PolicyVersion(-1, -1)
