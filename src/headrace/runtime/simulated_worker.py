"""A rollout worker that only takes time: roles.RolloutWorker under the virtual clock.

takes: requests, announcements of weights    gives: reports    waits for: the clock
woken by: an action that ends, an environment that answers, weights that arrive, a heartbeat while rollouts run

It reports when, and what, rollout/worker.py reports (I11); the rollouts' tokens are only counted. One timer runs for the decode engine,
whatever the batch: answers of environments join at the boundary between two steps that is next when they come, which is known before.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from headrace import clock
from headrace.config import Settings
from headrace.errors import InvariantError, WorkerLostError
from headrace.rollout.worker import ROOM_CHECK_SECONDS, ready_limit
from headrace.runtime.simulated_checks import CheckRule
from headrace.runtime.simulated_cores import Seat
from headrace.runtime.simulated_engine import Action, DecodeEngine
from headrace.runtime.simulated_rollouts import SimulatedRollout, WaitingRollouts
from headrace.runtime.time_model import TimeModel
from headrace.types import (
    EndReason,
    FinishedRollout,
    PolicyVersion,
    RolloutKey,
    RolloutRequest,
    TrajectorySummary,
    WorkerReport,
)
from headrace.updates import WeightUpdate


class _Engine(Enum):
    IDLE = 0
    RUNNING = 1
    PAUSED = 2
    CHECKING = 3


class SimulatedWorker:
    """Implements roles.RolloutWorker. Made in the loop that it lives in."""

    def __init__(self, name: str, *, settings: Settings, model: TimeModel, seat: Seat | None = None) -> None:
        """`seat`: where it shares a core with other devices."""
        self.name = name
        self.engine = DecodeEngine(model, max_running=settings.sampler.max_running)
        self._seat = seat
        if seat is not None:
            seat.on_change = self._pace_changed
        self._settings, self._model = settings, model
        self._rollouts: dict[RolloutKey, SimulatedRollout] = {}
        self._waits = WaitingRollouts(settings.sampler.gather_seconds)
        self._answers: list[tuple[float, int, bool, SimulatedRollout]] = []
        """When environments answer, earliest first: (time, order, noticed then, rollout)."""
        self._num_answers = 0
        self._finished: list[FinishedRollout] = []
        self._rule = CheckRule.of(settings, model.rejects)
        self._delivered: dict[RolloutKey, SimulatedRollout] = {}
        self._checks: list[SimulatedRollout] = []
        self._being_checked: list[SimulatedRollout] = []
        self._rejected: list[RolloutKey] = []
        self._changed = asyncio.Event()
        self._changed.set()  # the first report tells the room
        self._loop = asyncio.get_running_loop()
        self._state = _Engine.IDLE
        self._timer: asyncio.Handle | None = None
        self._goes_on_soon = False
        self._due_steps = 0
        self._idle_since, self._idle_reason = clock.now(), "admission"
        self._newest = self._announced = self._taking_up = self.engine.version
        self._stopped = False
        self._heartbeat: asyncio.TimerHandle | None = None
        self._room_check: asyncio.TimerHandle | None = None
        self._reported_room = 0
        self._reported_seconds = -1.0
        self._activity_seconds = clock.now()
        self._was_at_work = False

    # --- roles.RolloutWorker -----------------------------------------------------------------------------------------------

    async def start(self, requests: Sequence[RolloutRequest]) -> None:
        if self._stopped:
            raise WorkerLostError(f"{self.name} has been stopped and starts no rollouts.")
        begins, version = clock.now() + self._model.dispatch_seconds, self.engine.version.number
        started = []
        for request in requests:
            if request.key in self._rollouts:
                raise InvariantError(f"{self.name}: {request.key} was started twice.")
            rollout = self._rollouts[request.key] = SimulatedRollout(request, self._model.plan_rollout(request, version), begins)
            started.append(rollout)
        if self._model.dispatch_seconds > 0:
            self._loop.call_at(begins, self._open, started)
        else:
            self._open(started)
        self._expect_room()
        if self._rollouts and self._heartbeat is None:
            self._heartbeat = self._loop.call_later(self._model.heartbeat_seconds, self._beat)
        self._note_idle("environment")

    async def next_report(self) -> WorkerReport:
        """Raises WorkerLostError when the worker has been stopped and everything it finished has been reported."""
        early = self._reported_seconds + self._model.report_seconds - clock.now()
        if early > 0 and self._reported_seconds >= 0:
            await asyncio.sleep(early)
        await self._changed.wait()
        if self._stopped and not self._finished:
            raise WorkerLostError(f"{self.name} has ended.")
        if not self._stopped:
            self._changed.clear()
        now = self._reported_seconds = clock.now()
        self._settle(now)
        finished, self._finished = tuple(self._finished), []
        rejected, self._rejected = tuple(self._rejected), []
        self._reported_room = self._room(now)
        return WorkerReport(
            worker=self.name,
            version=self.engine.version,
            finished=finished,
            room=self._reported_room,
            in_flight=len(self._rollouts),
            generated_tokens=self.engine.generated_tokens,
            longest_wait=self._longest_wait(now),
            activity=self.engine.take_activity() if self._activity_is_due(now) else None,
            rejected=rejected,
        )

    async def announce(self, update: WeightUpdate) -> None:
        self._announced = max(self._announced, update.version)
        if self._model.transfer_seconds > 0:
            self._loop.call_later(self._model.transfer_seconds, self._arrived, update.version)
        else:
            self._arrived(update.version)

    async def verify(self, keys: Sequence[RolloutKey]) -> None:
        """They are in flight again until they are reported."""
        if self._stopped:
            raise WorkerLostError(f"{self.name} has been stopped and verifies no rollouts.")
        for key in keys:
            if key in self._rollouts or key not in self._delivered:
                raise InvariantError(f"{self.name}: {key} is to be verified, but it {'runs' if key in self._rollouts else 'cannot be'}.")
            rollout = self._rollouts[key] = self._delivered[key]
            rollout.is_over = rollout.is_cut = False
            self._checks.append(rollout)
        if self._heartbeat is None:
            self._heartbeat = self._loop.call_later(self._model.heartbeat_seconds, self._beat)
        self._interrupt()

    async def forget(self, keys: Sequence[RolloutKey]) -> None:
        for key in keys:
            if key not in self._rollouts:
                self._delivered.pop(key, None)

    async def cancel(self, keys: Sequence[RolloutKey]) -> None:
        self._settle(clock.now())
        for key in keys:
            if (rollout := self._rollouts.get(key)) is not None:
                self._give_up(rollout)

    async def stop(self) -> None:
        """Ends the rollouts in flight as CANCELLED; what finished can still be taken by `next_report`."""
        await self.cancel(tuple(self._rollouts))
        self._stopped = True
        self._changed.set()
        for timer in (self._timer, self._heartbeat, self._room_check):
            if timer is not None:
                timer.cancel()

    # --- the decode engine -------------------------------------------------------------------------------------------------

    def _on_timer(self) -> None:
        """What the engine's timer was set for has come."""
        self._timer, self._goes_on_soon = None, True
        self._collect(clock.now())
        if self._state is _Engine.PAUSED:
            self._take_up()
        elif self._state is _Engine.CHECKING:
            self._checked()
        elif self._state is _Engine.RUNNING:
            for action in self.engine.advance(self._due_steps):
                self._acted(action)
        self._goes_on_soon = False
        self._go_on()

    def _go_on(self) -> None:
        """Between two steps: weights, then waiting actions, then the next steps."""
        now = clock.now()
        if self._state is _Engine.IDLE:
            self._close_idle(now)
        if self._newest > self.engine.version:
            self._taking_up, self._state = self._newest, _Engine.PAUSED
            if self._model.pause_seconds > 0:
                self._timer = self._loop.call_later(self._model.pause_seconds, self._on_timer)
                return
            self._take_up()
        if self._checks and self._begin_checks():
            return
        self._due_steps = self.engine.begin(now, 1 if self._seat is None else self._seat.slowdown_at_work)
        if self._due_steps:
            self._state = _Engine.RUNNING
            if self._answers and self.engine.num_running < self.engine.max_running:
                self._due_steps = min(self._due_steps, self.engine.steps_done(self._answers[0][0]) + 1)
            self._timer = self._loop.call_at(self.engine.time_of(self._due_steps), self._on_timer)
        else:
            self._state, self._idle_since = _Engine.IDLE, now
            self._idle_reason = "environment" if self._rollouts else "admission"
            if self._answers:
                self._timer = self._loop.call_at(self._answers[0][0], self._on_timer)
        if self._seat is not None:
            self._seat.work(self._state is not _Engine.IDLE)

    def _begin_checks(self) -> bool:
        """All that wait, one after the other; False where they take no time and are done."""
        self._being_checked, self._checks = self._checks, []
        seconds = sum(self._model.verify_seconds(rollout.tokens) for rollout in self._being_checked)
        seconds *= 1 if self._seat is None else self._seat.slowdown_at_work
        self.engine.checked(seconds, sum(rollout.tokens for rollout in self._being_checked))
        if seconds <= 0:
            self._checked()
            return False
        self._state, self._timer = _Engine.CHECKING, self._loop.call_later(seconds, self._on_timer)
        if self._seat is not None:
            self._seat.work(True)
        return True

    def _checked(self) -> None:
        """Accepted ones are delivered again as they are, the others drawn again from the token that was rejected."""
        done, self._being_checked = self._being_checked, []
        for rollout in done:
            if rollout.is_over or self._rule is None:
                continue
            rollout.round += 1
            stands, cut = self._rule.accept(rollout.drawn, rollout.plan.steps, self.engine.version, rollout.request.key, rollout.round)
            rollout.refreshed_tokens = rollout.refreshed_key_steps = 0
            if cut is None:
                rollout.drawn = stands
                self._end(rollout, EndReason.DONE)
                continue
            rollout.action = rollout.cut(stands, cut, clock.now())
            self.engine.waiting.append(rollout.action)
            self._rejected.append(rollout.request.key)
        self._changed.set()

    def _take_up(self) -> None:
        self.engine.take_up(self._taking_up, self._model.pause_seconds)
        self._changed.set()

    def _arrived(self, version: PolicyVersion) -> None:
        """Weights can be taken up from now on."""
        if version <= self._newest:
            self._changed.set()  # acknowledges once more, as the first publish asks for
            return
        self._newest = version
        self._interrupt()

    def _interrupt(self) -> None:
        """Something new waits for the next boundary between two steps."""
        if self._state is _Engine.IDLE:
            if not self._goes_on_soon:  # a moment later: what else arrives now comes along
                if self._timer is not None:
                    self._timer.cancel()
                self._timer, self._goes_on_soon = self._loop.call_soon(self._on_timer), True
        else:
            self._stop_at_next_step()

    def _stop_at_next_step(self) -> None:
        if self._state is _Engine.RUNNING and self._timer is not None:
            steps = self.engine.steps_done(clock.now()) + 1
            if steps < self._due_steps:
                self._due_steps = steps
                self._timer.cancel()
                self._timer = self._loop.call_at(self.engine.time_of(steps), self._on_timer)

    def _pace_changed(self) -> None:
        """Another device of the core began or ended work: from the next step on this one is slower or faster."""
        self._settle(clock.now())
        self._stop_at_next_step()

    def _settle(self, now: float) -> None:
        """Counts what has been decoded, idled or answered by now; what is noticed between two steps waits for that."""
        if self._model.answer_delay_steps == 0:
            self._collect(now)
        if self._state is _Engine.RUNNING:
            steps = min(self.engine.steps_done(now), self._due_steps - 1)  # the last one is the timer's
            self.engine.advance(steps)
            self._due_steps -= steps
        elif self._state is _Engine.IDLE:
            self._close_idle(now)

    def _close_idle(self, now: float) -> None:
        self.engine.idle(self._idle_reason, now - self._idle_since)
        self._idle_since = now

    def _note_idle(self, reason: str) -> None:
        """Why the engine has nothing to do may have changed."""
        if self._state is _Engine.IDLE and reason != self._idle_reason:
            self._close_idle(clock.now())
            self._idle_reason = reason

    def _open(self, rollouts: Sequence[SimulatedRollout]) -> None:
        """They begin: the environment's reset is an answer too."""
        now = clock.now()
        for rollout in rollouts:
            if rollout.is_over:
                continue
            if (delay := self._notice_seconds()) > 0:
                self._answer_comes(now + delay, True, rollout)
            else:
                self._act(rollout)

    # --- rollouts ----------------------------------------------------------------------------------------------------------

    def _act(self, rollout: SimulatedRollout) -> None:
        """Its next action waits for a slot."""
        step = rollout.plan.steps[rollout.step]
        rollout.timer = None
        action = rollout.action = Action(rollout, context=rollout.tokens, observation_tokens=step.observation_tokens, action_tokens=step.action_tokens)
        self.engine.waiting.append(action)
        if self.engine.num_running < self.engine.max_running:
            self._interrupt()

    def _acted(self, action: Action) -> None:
        rollout = action.owner
        assert isinstance(rollout, SimulatedRollout)
        self._note_drawn(rollout, action)
        step = rollout.plan.steps[rollout.step]
        self._expect_room()
        if step.wait_seconds <= 0:
            self._go_to_next_step(rollout)
            return
        now = clock.now()
        self._waits.begin(rollout, now)
        if rollout.step + 1 < len(rollout.plan.steps):
            self._answer_comes(now + step.wait_seconds, False, rollout)
        else:
            rollout.timer = self._loop.call_later(step.wait_seconds, self._noticed, rollout)

    def _note_drawn(self, rollout: SimulatedRollout, action: Action) -> None:
        rollout.action = None
        if action.drawn:  # an observation that nobody answered is no part of the trajectory
            rollout.tokens = action.context + action.observation_tokens
        rollout.note(action.drawn)

    def _answer_comes(self, time: float, noticed: bool, rollout: SimulatedRollout) -> None:
        heapq.heappush(self._answers, (time, self._num_answers, noticed, rollout))
        self._num_answers += 1

    def _notice_seconds(self) -> float:
        """From an answer until the loop that decodes has noticed; the last half step, on average, is until the next boundary."""
        steps = max(0.0, self._model.answer_delay_steps - 0.5)
        return steps * self.engine.period_seconds if self._state is _Engine.RUNNING else 0.0

    def _collect(self, now: float) -> None:
        """Answers that have come by now."""
        while self._answers and self._answers[0][0] <= now:
            time, _, noticed, rollout = heapq.heappop(self._answers)
            if rollout.is_over:
                continue
            delay = 0.0 if noticed else self._notice_seconds()
            if delay > 0:
                self._answer_comes(time + delay, True, rollout)
            elif rollout in self._waits:
                self._noticed(rollout, now if noticed else time)
            else:
                self._act(rollout)

    def _noticed(self, rollout: SimulatedRollout, time: float | None = None) -> None:
        rollout.wait_seconds += self._waits.end(rollout, clock.now() if time is None else time)
        self._go_to_next_step(rollout)

    def _go_to_next_step(self, rollout: SimulatedRollout) -> None:
        rollout.step += 1
        if rollout.step < len(rollout.plan.steps):
            self._act(rollout)
        else:
            self._end(rollout, EndReason.ENVIRONMENT_ERROR if rollout.plan.fails else EndReason.DONE)

    def _give_up(self, rollout: SimulatedRollout) -> None:
        if rollout.action is not None:
            self.engine.drop(rollout.action)
            self._note_drawn(rollout, rollout.action)
        else:
            if rollout.timer is not None:
                rollout.timer.cancel()
            if rollout in self._waits:
                rollout.wait_seconds += self._waits.end(rollout, clock.now())
        self._end(rollout, EndReason.CANCELLED)

    def _end(self, rollout: SimulatedRollout, reason: EndReason) -> None:
        del self._rollouts[rollout.request.key]
        rollout.is_over = True
        self._finished.append(FinishedRollout(summary=self._kept(rollout, self._summary(rollout, reason)), payload=b""))
        self._changed.set()
        if not self._rollouts:
            self._note_idle("admission")

    def _summary(self, rollout: SimulatedRollout, reason: EndReason) -> TrajectorySummary:
        request, delivered = rollout.request, rollout.delivered
        if delivered is not None and reason is EndReason.CANCELLED:  # what was delivered stands
            since = rollout.num_drawn - (delivered.num_action_tokens - rollout.refreshed_tokens) if rollout.is_cut else 0
            return replace(delivered, round=self._settings.pool.verify_rounds, discarded_tokens=since, refreshed_tokens=0, refreshed_key_steps=0)
        stands = delivered is not None and not rollout.is_cut
        return TrajectorySummary(
            key=request.key,
            task_id=request.task.id,
            task_kind=request.task.kind,
            reward=0.0 if reason is EndReason.CANCELLED else rollout.plan.reward,
            end_reason=reason,
            error=_ERRORS.get(reason),
            num_tokens=rollout.tokens,
            num_action_tokens=rollout.num_drawn,
            num_steps=rollout.step,
            num_key_steps=rollout.num_key_steps,
            discarded_tokens=0,
            versions=rollout.versions(),
            seconds=delivered.seconds if delivered is not None and stands else max(0.0, clock.now() - rollout.started),
            wait_seconds=rollout.wait_seconds,
            round=rollout.round,
            refreshed_tokens=rollout.refreshed_tokens,
            refreshed_key_steps=rollout.refreshed_key_steps,
        )

    def _kept(self, rollout: SimulatedRollout, summary: TrajectorySummary) -> TrajectorySummary:
        """What a verification needs is kept; a trajectory that cannot be verified, now or ever, says so in its round."""
        if self._rule is None or summary.failed:
            return summary
        if summary.round < self._rule.max_rounds and any(map(self._rule.checks, rollout.plan.steps)):
            self._delivered[summary.key], rollout.delivered = rollout, summary
            return summary
        self._delivered.pop(summary.key, None)
        return replace(summary, round=self._rule.max_rounds)

    # --- reports, as rollout/worker.py makes them ----------------------------------------------------------------------------

    def _beat(self) -> None:
        self._heartbeat = None
        self._changed.set()
        if self._rollouts or self._was_at_work:
            self._heartbeat = self._loop.call_later(self._model.heartbeat_seconds, self._beat)

    def _expect_room(self) -> None:
        if self._room_check is None:
            self._room_check = self._loop.call_later(ROOM_CHECK_SECONDS * self._model.heartbeat_seconds, self._check_room)

    def _check_room(self) -> None:
        self._room_check, now = None, clock.now()
        self._settle(now)
        if self._room(now) > self._reported_room:
            self._changed.set()

    def _room(self, now: float) -> int:
        if self._stopped:
            return 0
        free = ready_limit(self.engine.max_running, self._settings.sampler.queue_share) - (len(self._rollouts) - self._waits.num_long(now))
        if self._settings.sampler.max_in_flight is not None:
            free = min(free, self._settings.sampler.max_in_flight - len(self._rollouts))
        return max(0, free)

    def _longest_wait(self, now: float) -> str | None:
        if not self._rollouts:
            return None
        key, oldest = next(iter(self._rollouts.items()))
        what = "its environment" if oldest.action is None else "the sampler"
        where = f"group {key.group_id} member {key.member}, step {oldest.step} of task {oldest.request.task.id}"
        return f"{where}: out for {now - oldest.started:.3g} s, waits for {what}"

    def _activity_is_due(self, now: float) -> bool:
        if now - self._activity_seconds < self._model.heartbeat_seconds:
            return False
        self._activity_seconds = now
        self._was_at_work = bool(self._rollouts)
        return True


_ERRORS = {EndReason.ENVIRONMENT_ERROR: "a failure by the simulated rate", EndReason.CANCELLED: "cancelled by the run"}
