"""A finished rollout verified: checked under the newest weights, cut at the first rejected token, gone on with from there.

takes: a rollout that has ended and the trajectory that was delivered    gives: exactly one Trajectory, whatever happens
waits for: the sampler, then whatever a rollout waits for                woken by: their answers, or `RolloutProgress.cut`

Nothing rejected: the same trajectory with a newer side table. Rejected: everything from that token on is cut, the redrawn token
stands in its place, the environment goes back to before that action, and the rollout goes on as any other; the reward plays no part in it.

When it cannot be done (the sampler fails, the environment cannot go back) or is cut, the delivered trajectory stands as it was, and its
round says that it is not to be asked for again. What was drawn meanwhile counts as discarded (I7). A rollout that fails after the cut is a
failed rollout as any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from headrace import clock
from headrace.errors import HeadraceError
from headrace.roles import Environment
from headrace.rollout.checks import RolloutEnded, checked_observation, checked_outcome, shown_value, text_of
from headrace.rollout.progress import Phase, RolloutProgress
from headrace.rollout.rewind import Moment, Rewind, name_of, restore
from headrace.rollout.roll_out import Rollout
from headrace.rollout.verification import VerifyRule, verified_by, verify_request, wrong_result
from headrace.types import EndReason, Task, Trajectory, VerifyResult


class BrokenPromiseError(HeadraceError):
    """An environment said that it is replayable, and answered differently."""


async def verify(
    rollout: Rollout, delivered: Trajectory, rule: VerifyRule, progress: RolloutProgress, *, warn: Callable[[str], None], on_rejected: Callable[[], None]
) -> Trajectory:
    """`warn` hears why a verification could not be made, `on_rejected` that the rollout is sampled again from a rejected token.

    Raises only when it is cancelled from outside (the worker ends) or headrace has a bug.
    """
    rollout.progress = progress
    verification = _Verification(rollout, delivered, rule, warn, on_rejected)
    end_reason, error = await rollout.bounded(verification.run)
    return verification.trajectory(end_reason, error)


class _Verification:
    def __init__(self, rollout: Rollout, delivered: Trajectory, rule: VerifyRule, warn: Callable[[str], None], on_rejected: Callable[[], None]) -> None:
        self._rollout = rollout
        self._delivered = delivered
        self._rule = rule
        self._warn, self._on_rejected = warn, on_rejected
        self._accepted = False
        """Every checked token stands."""
        self._is_cut = False
        self._num_kept = delivered.num_action_tokens
        """Delivered tokens that the draft still holds."""
        self._num_redrawn = 0
        """Tokens that the sampler redrew and the draft does not hold."""

    async def run(self) -> EndReason:
        rollout, delivered = self._rollout, self._delivered
        try:
            result = await self._check()
            if result.rejected is not None:
                self._num_redrawn, rollout.draft.rejected_seconds = 1, clock.now()
                await self._go_back(result.rejected)
        except Exception as error:
            self._warn(str(error.error) if isinstance(error, RolloutEnded) else str(error) if isinstance(error, HeadraceError) else text_of(error))
            return delivered.end_reason
        draft = rollout.draft
        draft.round = delivered.round + 1
        draft.verified = draft.verified.overlaid(verified_by(self._rule, result, delivered))
        if result.rejected is None:
            self._accepted = True
            return delivered.end_reason
        self._cut(result)
        self._on_rejected()
        return await rollout.go_on()

    def trajectory(self, end_reason: EndReason, error: str | None) -> Trajectory:
        """What is delivered."""
        draft, delivered = self._rollout.draft, self._delivered
        if self._is_cut and end_reason is not EndReason.CANCELLED:
            return draft.trajectory(end_reason, error)
        if self._accepted:
            delivered = dataclasses.replace(delivered, verified_spans=draft.verified.spans, verified_logprobs=draft.verified.logprobs)
        return dataclasses.replace(
            delivered,
            round=draft.round if self._accepted else self._rule.max_rounds,
            discarded_tokens=draft.discarded_tokens + self._num_redrawn + len(draft.logprobs) - self._num_kept,
            refreshed_tokens=0,
            refreshed_key_steps=0,
            refresh_seconds=0.0,
        )

    async def _check(self) -> VerifyResult:
        """Raises what the sampler raises, and HeadraceError for an answer that cannot be."""
        rollout = self._rollout
        rollout.progress.enter(Phase.VERIFICATION)
        request = verify_request(self._rule, self._delivered, rollout.request)
        result = await rollout.sampler.verify(request)
        wrong = wrong_result(request, result)
        if wrong:
            self._num_redrawn = int(result.rejected is not None)
            raise HeadraceError(f"the sampler's verification cannot be used: {wrong}")
        return result

    async def _go_back(self, token: int) -> None:
        """The environment is where it was before the action of this token. Raises when it cannot be."""
        rollout = self._rollout
        assert rollout.moments is not None
        index = rollout.draft.step_of(token)
        rollout.progress.step = index
        match rollout.rewind:
            case Rewind.SNAPSHOT:
                rollout.progress.enter(Phase.REWIND)
                await restore(rollout.environment, rollout.moments[index].snapshot)
            case Rewind.REPLAY:
                rollout.progress.enter(Phase.REWIND)
                rollout.environment = rollout.user_code.open_environment(rollout.request.key)
                assert rollout.environment is not None
                rewards = [step.reward for step in self._delivered.steps]
                await replay(rollout.environment, rollout.request.task, rollout.moments[: index + 1], rewards)

    def _cut(self, result: VerifyResult) -> None:
        """The rollout is where it was when the redrawn token had just been drawn, its clock included: the time in the pool is left out."""
        rollout = self._rollout
        assert rollout.moments is not None
        draft, token = rollout.draft, result.rejected
        assert token is not None
        draft.cut(result, self._delivered, rollout.moments[draft.step_of(token)].key_weight)
        self._is_cut, self._num_kept, self._num_redrawn = True, len(draft.logprobs) - 1, 0
        del rollout.moments[len(draft.steps) :]
        draft.started_seconds = clock.now() - rollout.moments[-1].seconds
        rollout.deadline_seconds = draft.started_seconds + rollout.settings.max_seconds


async def replay(environment: Environment, task: Task, moments: Sequence[Moment], rewards: Sequence[float]) -> None:
    """Brings a new environment to where the last of `moments` was: before its action.

    `rewards` [at least moments - 1] are those recorded. Raises BrokenPromiseError when it answers differently, and what the environment raises.
    """
    observation = checked_observation(await environment.reset(task), "reset")
    _compare(environment, "reset", observation, moments[0].observation)
    for step, (moment, following, reward) in enumerate(zip(moments, moments[1:], rewards, strict=False)):
        assert moment.action is not None
        answer = checked_outcome(await environment.step(moment.action), "step")
        for replayed, recorded in zip(answer, (following.observation, reward, False), strict=True):
            _compare(environment, f"step {step}", replayed, recorded)


def _compare(environment: Environment, source: str, replayed: object, recorded: object) -> None:
    if replayed != recorded:
        raise BrokenPromiseError(
            f"{name_of(environment)} says that it is replayable, but in a replay {source} gave {shown_value(replayed)} instead of {shown_value(recorded)}.",
            remedy="Its answers must follow from the task and the actions alone; else give it snapshot() and restore(), or set replayable = False.",
        )
