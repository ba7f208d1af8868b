"""A sampler and the rollouts it serves, in one loop.

takes: requests (`start`), announcements of weights    gives: reports (`next_report`)    waits for: sampler and environments
woken by: a rollout that ended, weights that were applied, room that opened, a heartbeat each second while rollouts run

The running batch is kept full: a rollout that waits for its environment holds no decode slot, so `room` counts it out, and the
number of rollouts in flight is not the number of slots.

Counting (I7). `generated_tokens` is the sampler's own count, read when a report is made. Each training rollout that ends delivers
num_action_tokens + discarded_tokens, lost ones included (Sampler.release tells them). So generated - delivered is exactly what
the rollouts in flight have drawn so far.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial

from headrace import clock
from headrace.config import Settings
from headrace.errors import InvariantError, WorkerLostError
from headrace.recipe import RecipeCode
from headrace.roles import Sampler, Tokenizer
from headrace.rollout import refresh
from headrace.rollout.marking import Marker
from headrace.rollout.progress import ENVIRONMENT_PHASES, Phase, RolloutProgress
from headrace.rollout.render import ShortTextCache
from headrace.rollout.rewind import Rewind
from headrace.rollout.roll_out import Rollout, UserCode
from headrace.rollout.user_code import RecipeUserCode
from headrace.rollout.verification import VerifyRule
from headrace.types import FinishedRollout, PolicyVersion, RolloutKey, RolloutRequest, Trajectory, WorkerReport
from headrace.updates import WeightUpdate

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
ROOM_CHECK_SECONDS = 0.05
"""Room that opens because rollouts wait is reported at most this often."""
RESET_SECONDS = 1.0
"""A reset that lasts longer no longer keeps a slot reserved for its rollout."""


def ready_limit(max_running: int, queue_share: float) -> int:
    """Rollouts that a worker holds at most besides those that wait for their environments: its decode slots and a queue for them."""
    return int(max_running * (1.0 + queue_share))


@dataclass(slots=True)
class _InFlight:
    request: RolloutRequest
    progress: RolloutProgress
    work: _Work
    """What is done for it: rolling out or verifying."""


_Work = Callable[[_InFlight], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True)
class _Delivered:
    """A rollout that may be verified, and its trajectory as it was delivered last."""

    rollout: Rollout
    trajectory: Trajectory


class RolloutWorkerCore:
    """Implements roles.RolloutWorker in the loop that awaits `run()`. A runtime hosts it in a process of its own, or not."""

    def __init__(self, name: str, *, sampler: Sampler, code: RecipeCode | UserCode, settings: Settings, tokenizer: Tokenizer) -> None:
        self.name = name
        self._sampler = sampler
        self._user_code: UserCode = RecipeUserCode(code, settings) if isinstance(code, RecipeCode) else code
        self._tokenizer = ShortTextCache(tokenizer)
        self._settings = settings
        self._gather_seconds = settings.sampler.gather_seconds
        self._marker = Marker(settings.marks, self._user_code.mark)
        self._rule = VerifyRule.of(settings)
        self._rollouts: dict[RolloutKey, _InFlight] = {}
        self._delivered: dict[RolloutKey, _Delivered] = {}
        self._unverified: str | None = None
        """Why a verification could not be made, the last time."""
        self._finished: list[FinishedRollout] = []
        self._rejected: list[RolloutKey] = []
        self._changed = asyncio.Event()
        self._changed.set()  # the first report tells the room
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._announced = asyncio.Event()
        self._announced_version: PolicyVersion | None = None
        self._group: asyncio.TaskGroup | None = None
        self._failure: BaseException | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._room_check: asyncio.TimerHandle | None = None
        self._reported_room = 0
        self._activity_seconds: float | None = None
        self._began_seconds = 0.0
        self._was_at_work = False

    async def run(self) -> None:
        """Serves until `stop`. Ends every rollout and the user's processes before it returns, however it ends."""
        self._activity_seconds = self._began_seconds = clock.now()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for rollout in self._rollouts.values():
                    group.create_task(rollout.work(rollout))
                engine = group.create_task(self._sampler.run(self._waiting_for))
                acknowledging = group.create_task(self._acknowledge())
                await self._stop.wait()
                for rollout in self._rollouts.values():
                    rollout.progress.cut()
                await self._idle.wait()
                acknowledging.cancel()
                engine.cancel()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._group = None
            self._stop.set()
            for timer in (self._heartbeat, self._room_check):
                if timer is not None:
                    timer.cancel()
            self._ended.set()
            self._changed.set()
            await self._user_code.close()

    async def start(self, requests: Sequence[RolloutRequest]) -> None:
        if self._stop.is_set():
            raise WorkerLostError(f"{self.name} has been stopped and starts no rollouts.")
        for request in requests:
            if request.key in self._rollouts:
                raise InvariantError(f"{self.name}: {request.key} was started twice.")
            self._begin(request, self._run_one)
        self._sampler.wake()  # what it waits for has changed

    async def verify(self, keys: Sequence[RolloutKey]) -> None:
        """They are in flight again until they are reported."""
        if self._stop.is_set():
            raise WorkerLostError(f"{self.name} has been stopped and verifies no rollouts.")
        for key in keys:
            if key in self._rollouts or key not in self._delivered:
                raise InvariantError(f"{self.name}: {key} is to be verified, but it {'runs' if key in self._rollouts else 'cannot be'}.")
            self._begin(self._delivered[key].rollout.request, self._verify_one)
        self._sampler.wake()

    async def forget(self, keys: Sequence[RolloutKey]) -> None:
        for key in keys:
            if key not in self._rollouts:
                self._forget(key)

    async def next_report(self) -> WorkerReport:
        """Raises WorkerLostError when the worker has ended and everything it finished has been reported."""
        await self._changed.wait()
        if self._ended.is_set() and not self._finished:
            cause = f": {self._failure!r}" if self._failure is not None else ""
            raise WorkerLostError(f"{self.name} has ended{cause}.") from self._failure
        if not self._ended.is_set():
            self._changed.clear()
        finished, self._finished = tuple(self._finished), []
        rejected, self._rejected = tuple(self._rejected), []
        self._reported_room = self._room()
        return WorkerReport(
            worker=self.name,
            version=self._sampler.version,
            finished=finished,
            room=self._reported_room,
            in_flight=len(self._rollouts),
            generated_tokens=self._sampler.generated_tokens,
            longest_wait=self._longest_wait(),
            activity=self._sampler.take_activity() if self._activity_is_due() else None,
            parked=self._sampler.parked,
            rejected=rejected,
        )

    def report_soon(self) -> None:
        """A report is due even if nothing happened. Hosts in processes of their own call it at intervals: a worker without rollouts
        is silent, and while the learner takes minutes over a batch it would be taken for a dead one."""
        self._changed.set()

    async def announce(self, update: WeightUpdate) -> None:
        if self._announced_version is None or update.version > self._announced_version:
            self._announced_version = update.version
        self._sampler.wake()
        self._announced.set()

    async def cancel(self, keys: Sequence[RolloutKey]) -> None:
        for key in keys:
            if key in self._rollouts:
                self._rollouts[key].progress.cut()

    async def stop(self) -> None:
        """Ends the rollouts in flight as CANCELLED; what finished can still be taken by `next_report`."""
        self._stop.set()
        if self._group is not None:
            await self._ended.wait()

    def _begin(self, request: RolloutRequest, work: _Work) -> None:
        rollout = _InFlight(request=request, progress=RolloutProgress(since_seconds=clock.now(), on_wait=self._expect_room), work=work)
        self._rollouts[request.key] = rollout
        self._idle.clear()
        if self._group is not None:
            self._group.create_task(work(rollout))
        if self._heartbeat is None:
            self._heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._beat)

    async def _run_one(self, in_flight: _InFlight) -> None:
        rollout = Rollout(
            in_flight.request,
            sampler=self._sampler,
            tokenizer=self._tokenizer,
            user_code=self._user_code,
            settings=self._settings.rollout,
            progress=in_flight.progress,
            marker=self._marker,
            rule=self._rule,
        )
        self._deliver(rollout, await rollout.run())

    async def _verify_one(self, in_flight: _InFlight) -> None:
        assert self._rule is not None
        delivered = self._delivered[in_flight.request.key]
        rejected = partial(self._note_rejected, in_flight.request.key)
        trajectory = await refresh.verify(
            delivered.rollout, delivered.trajectory, self._rule, in_flight.progress, warn=self._note_unverified, on_rejected=rejected
        )
        self._deliver(delivered.rollout, trajectory)

    def _deliver(self, rollout: Rollout, trajectory: Trajectory) -> None:
        key = trajectory.key
        if self._rule is not None and not rollout.request.evaluation:
            trajectory = self._keep(rollout, trajectory, self._rule)
        else:
            rollout.close()
        del self._rollouts[key]
        self._finished.append(FinishedRollout(summary=trajectory.summary(), payload=trajectory.to_bytes()))
        self._changed.set()
        if not self._rollouts:
            self._idle.set()
            self._sampler.wake()  # it waits for admission from now on, no longer for this environment

    def _keep(self, rollout: Rollout, trajectory: Trajectory, rule: VerifyRule) -> Trajectory:
        """Keeps what a verification needs; a trajectory that cannot be verified, now or ever, says so in its round."""
        key = trajectory.key
        can_go_on = not trajectory.failed and trajectory.round < rule.max_rounds and rollout.moments is not None
        if can_go_on and rule.checked(trajectory) and self._sampler.can_verify(key):
            if rollout.rewind is not Rewind.SNAPSHOT:
                rollout.close()
            self._delivered[key] = _Delivered(rollout, trajectory)
            return trajectory
        rollout.close()
        self._forget(key)
        return trajectory if trajectory.failed else dataclasses.replace(trajectory, round=rule.max_rounds)

    def _forget(self, key: RolloutKey) -> None:
        delivered = self._delivered.pop(key, None)
        if delivered is not None:
            delivered.rollout.close()
        if self._rule is not None:
            self._sampler.forget(key)

    def _note_rejected(self, key: RolloutKey) -> None:
        self._rejected.append(key)
        self._changed.set()

    def _note_unverified(self, reason: str) -> None:
        if reason != self._unverified:
            logger.warning("%s: a rollout could not be verified and stays as old as it is: %s", self.name, reason)
        self._unverified = reason

    async def _acknowledge(self) -> None:
        """A report follows as soon as announced weights are in use."""
        while True:
            await self._announced.wait()
            self._announced.clear()
            assert self._announced_version is not None
            await self._sampler.applied(self._announced_version)
            self._changed.set()

    def _beat(self) -> None:
        """They end when an activity was reported with nothing in flight: from then on silence means that there is nothing to do."""
        self._heartbeat = None
        self._changed.set()
        if self._rollouts or self._was_at_work:
            self._heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._beat)

    def _expect_room(self) -> None:
        if self._room_check is None:
            self._room_check = asyncio.get_running_loop().call_later(ROOM_CHECK_SECONDS, self._check_room)

    def _check_room(self) -> None:
        self._room_check = None
        if self._room() > self._reported_room:
            self._changed.set()

    def _room(self) -> int:
        if self._stop.is_set():
            return 0
        time, parked = clock.now(), frozenset(self._sampler.parked)
        holding = [key for key, rollout in self._rollouts.items() if not self._gave_its_slot_away(rollout.progress, time)]
        if parked:
            holding = [key for key in holding if key not in parked]
        long_rollouts, most_long = self._sampler.long_rollouts, self._sampler.most_long
        # long ones beyond their share are parked as soon as short work waits, so room for it is there
        yielding = max(0, sum(key in long_rollouts for key in holding) - most_long) if long_rollouts else 0
        free = ready_limit(self._sampler.max_running, self._settings.sampler.queue_share) - len(holding) + yielding
        if self._settings.sampler.max_in_flight is not None:
            free = min(free, self._settings.sampler.max_in_flight - len(self._rollouts))
        return max(0, free)

    def _gave_its_slot_away(self, progress: RolloutProgress, time: float) -> bool:
        """An environment that answers within the time in which the sampler gathers answers does not count as waiting."""
        if progress.phase not in ENVIRONMENT_PHASES:
            return False
        patience = RESET_SECONDS if progress.phase is Phase.RESET else self._gather_seconds
        return time - progress.since_seconds > patience

    def _longest_wait(self) -> str | None:
        texts = [self._user_code.warning()]
        if self._unverified is not None:
            texts.append(f"a rollout could not be verified: {self._unverified}")
        if self._rollouts:
            oldest = min(self._rollouts.values(), key=lambda rollout: rollout.progress.since_seconds)
            key, progress = oldest.request.key, oldest.progress
            waited = clock.now() - progress.since_seconds
            texts.append(
                f"group {key.group_id} member {key.member}, step {progress.step} of task {oldest.request.task.id}: waits {waited:.3g} s for {progress.phase}"
            )
        return "; ".join(text for text in texts if text) or None

    def _activity_is_due(self) -> bool:
        time = clock.now()
        if self._activity_seconds is None or (time - self._activity_seconds < clock.periodic_seconds(time - self._began_seconds) and not self._ended.is_set()):
            return False
        self._activity_seconds = time
        self._was_at_work = bool(self._rollouts)
        return True

    def _waiting_for(self) -> str:
        return "environment" if self._rollouts else "admission"
