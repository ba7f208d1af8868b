"""One rollout: reset -> (sample -> step)* -> trajectory.

takes: a RolloutRequest    gives: exactly one Trajectory, whatever happens    waits for: the environment, the sampler, the reward
woken by: their answers, or `RolloutProgress.cut`

A failure is data. Whatever the environment, the reward or the sampler does, the trajectory that comes out is consistent: one
log-probability and one version for each action token that the sampler delivered (cases 14 and 16), and each token that it drew
but did not deliver is counted in `discarded_tokens` (I7).

Limits. `max_steps` and `max_tokens` end a rollout between two actions; the last action has its reward. `max_seconds` cuts a wait for
the environment at once, but lets an action that is being drawn finish (it is bounded by `max_action_tokens`): its tokens are
paid for and can be trained. A rollout that ends by a limit keeps the rewards it has, gets the recipe's reward function if
there is one, and is trained.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from headrace import clock
from headrace.config import RolloutSettings
from headrace.errors import HeadraceError
from headrace.marks import TrajectoryView
from headrace.roles import Environment, Sampler, Tokenizer
from headrace.rollout.checks import (
    RolloutEnded,
    broken_completion,
    checked_observation,
    checked_reward,
    first_observation,
    shown_value,
    text_of,
)
from headrace.rollout.marking import Marker, RolloutMarks
from headrace.rollout.render import read_action, render_observation
from headrace.rollout.user_call import describe_exception
from headrace.types import (
    Action,
    Completion,
    EndReason,
    Observation,
    RolloutKey,
    RolloutRequest,
    SampleRequest,
    StepRecord,
    StopReason,
    Task,
    Trajectory,
    VersionSpan,
)


class UserCode(Protocol):
    """The recipe's environment and reward, ready to be awaited. Failures are UserCallErrors."""

    @property
    def has_reward(self) -> bool: ...

    def open_environment(self, key: RolloutKey) -> Environment | None:
        """A new environment for this rollout; None: one-step tasks. May raise whatever the user's constructor raises."""
        ...

    def release(self, key: RolloutKey) -> None:
        """The rollout is over: its environment can go."""
        ...

    async def reward(self, task: Task, answer: str) -> object:
        """What the recipe's reward function returned, unchecked."""
        ...

    async def mark(self, trajectory: TrajectoryView) -> object:
        """What the recipe's marking function returned, unchecked. Asked only where marks.function is set."""
        ...

    def warning(self) -> str | None:
        """Text for people about code that misbehaves, if there is any."""
        ...

    async def close(self) -> None: ...


class Phase(StrEnum):
    """What a rollout waits for."""

    START = "its turn to start"
    RESET = "its environment to reset"
    SAMPLER = "the sampler"
    ENVIRONMENT = "its environment"
    REWARD = "its reward"
    MARKS = "its marks"


ENVIRONMENT_PHASES = frozenset({Phase.RESET, Phase.ENVIRONMENT, Phase.REWARD, Phase.MARKS})


@dataclass(slots=True)
class _Step:
    """A StepRecord while its action waits for its reward."""

    action_start: int
    action_end: int
    version_spans: tuple[VersionSpan, ...]
    key_weight: float
    stop_reason: StopReason
    reward: float = 0.0
    wait_seconds: float = 0.0

    def record(self) -> StepRecord:
        return StepRecord(
            action_start=self.action_start,
            action_end=self.action_end,
            version_spans=self.version_spans,
            key_weight=self.key_weight,
            reward=self.reward,
            stop_reason=self.stop_reason,
            wait_seconds=self.wait_seconds,
        )


@dataclass(slots=True)
class RolloutProgress:
    """Where a rollout is; written by roll_out, read by its worker."""

    phase: Phase = Phase.START
    since_seconds: float = 0.0
    """Loop time at which the phase began."""
    step: int = 0
    on_wait: Callable[[], None] = lambda: None
    """Called when the rollout begins to wait for the user's code: it holds no decode slot then."""
    _cut: bool = False
    _timeout: asyncio.Timeout | None = field(default=None, repr=False)

    def enter(self, phase: Phase) -> float:
        """The phase begins now: returns the loop's time."""
        self.phase = phase
        time = self.since_seconds = clock.now()
        if phase in ENVIRONMENT_PHASES:
            self.on_wait()
        return time

    def cut(self) -> None:
        """Ends the rollout as CANCELLED, at once. Harmless when it is ending already."""
        if not self._cut:
            self._cut = True
            if self._timeout is not None:
                self._timeout.reschedule(clock.now())

    @property
    def is_cut(self) -> bool:
        return self._cut

    def arm(self, timeout: asyncio.Timeout | None) -> None:
        self._timeout = timeout


async def roll_out(
    request: RolloutRequest,
    *,
    sampler: Sampler,
    tokenizer: Tokenizer,
    user_code: UserCode,
    settings: RolloutSettings,
    progress: RolloutProgress | None = None,
    marker: Marker | None = None,
) -> Trajectory:
    """Runs one rollout to its end; without a marker, only the environment marks key steps.

    Raises only when it is cancelled from outside (the worker ends) or headrace has a bug.
    """
    progress = progress or RolloutProgress()
    rollout = _Rollout(request, sampler, tokenizer, user_code, settings, progress, marker or Marker())
    try:
        if progress.is_cut:
            raise TimeoutError
        async with asyncio.timeout(None) as timeout:
            progress.arm(timeout)
            try:
                end_reason, error = await rollout.run(), None
            except RolloutEnded as ended:
                end_reason, error = ended.reason, ended.error
            finally:
                progress.arm(None)
    except TimeoutError:
        if not progress.is_cut:
            raise
        end_reason, error = EndReason.CANCELLED, "cancelled by the run"
    finally:
        rollout.discarded_tokens += sampler.release(request.key)
        user_code.release(request.key)
    return rollout.trajectory(end_reason, error)


class _Rollout:
    """The state of one rollout: what will be its trajectory."""

    def __init__(
        self,
        request: RolloutRequest,
        sampler: Sampler,
        tokenizer: Tokenizer,
        user_code: UserCode,
        settings: RolloutSettings,
        progress: RolloutProgress,
        marker: Marker,
    ) -> None:
        self._request = request
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._user_code = user_code
        self._settings = settings
        self._progress = progress
        self._marks = RolloutMarks(marker)
        self._started_seconds = clock.now()
        self._deadline_seconds = self._started_seconds + settings.max_seconds
        self._token_limit = min(settings.max_tokens, sampler.max_context_tokens)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._steps: list[_Step] = []
        self._graded = 0.0
        self._last_text = ""
        self._chats = False
        self.discarded_tokens = 0

    async def run(self) -> EndReason:
        """Raises RolloutEnded for every end but the regular ones."""
        try:
            environment = self._user_code.open_environment(self._request.key)
        except Exception as error:
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"making the environment failed: {text_of(error)}") from error
        end_reason = await (self._answer_once() if environment is None else self._walk_in_time(environment))
        if self._user_code.has_reward and self._steps:
            self._graded = await self._grade()
        if not math.isfinite(self._reward()):
            raise RolloutEnded(EndReason.REWARD_ERROR, f"the rewards of the steps add up to {self._reward()}")
        if not self._marks.are_complete and self._steps:
            await self._mark(end_reason)
        return end_reason

    def trajectory(self, end_reason: EndReason, error: str | None) -> Trajectory:
        reward = self._reward()
        return Trajectory(
            key=self._request.key,
            task_id=self._request.task.id,
            task_kind=self._request.task.kind,
            tokens=tuple(self._tokens[: self._steps[-1].action_end] if self._steps else ()),  # no observation that nobody answered
            sampler_logprobs=tuple(self._logprobs),
            steps=tuple(step.record() for step in self._steps),
            reward=reward if math.isfinite(reward) else 0.0,
            end_reason=end_reason,
            error=error,
            started_seconds=self._started_seconds,
            finished_seconds=clock.now(),
            wait_seconds=sum(step.wait_seconds for step in self._steps),
            discarded_tokens=self.discarded_tokens,
            temperature=self._request.sampling.temperature,
        )

    # One-step tasks

    async def _answer_once(self) -> EndReason:
        observation = first_observation(self._request.task)
        self._progress.enter(Phase.SAMPLER)
        action = await self._act(self._render(observation), observation, last=True)
        if clock.now() >= self._deadline_seconds:
            return EndReason.MAX_SECONDS
        return EndReason.DONE if action.stop_reason == "stop" else EndReason.MAX_TOKENS

    # Tasks with an environment

    async def _walk_in_time(self, environment: Environment) -> EndReason:
        """One timer a rollout: at the deadline it cuts a wait for the environment, and leaves an action that is being drawn alone."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as timeout:
                timer = loop.call_at(self._deadline_seconds, self._cut_environment, timeout)
                try:
                    return await self._walk(environment)
                finally:
                    timer.cancel()
        except TimeoutError as error:
            if self._progress.is_cut:
                raise
            if not self._steps:
                text = f"reset gave no observation within the rollout's {self._settings.max_seconds:g} s (rollout.max_seconds)"
                raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, text) from error
            return EndReason.MAX_SECONDS

    def _cut_environment(self, timeout: asyncio.Timeout) -> None:
        if self._progress.phase in ENVIRONMENT_PHASES:
            timeout.reschedule(clock.now())

    async def _walk(self, environment: Environment) -> EndReason:
        observation = await self._reset(environment)
        shown = self._render(observation)
        for step in range(self._settings.max_steps):
            last = step + 1 == self._settings.max_steps
            action = await self._act(shown, observation, last=last)
            asked_seconds = self._progress.enter(Phase.ENVIRONMENT)
            if asked_seconds >= self._deadline_seconds:
                return EndReason.MAX_SECONDS
            following, done = await self._step(environment, action, asked_seconds)
            if done:
                return EndReason.DONE
            if following is None:
                raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"step {step} returned no observation although it is not done")
            if not last:
                observation, shown = following, self._render(following)
                if len(self._tokens) + len(shown) >= self._token_limit:
                    return EndReason.MAX_TOKENS
        return EndReason.MAX_STEPS

    async def _reset(self, environment: Environment) -> Observation:
        self._progress.enter(Phase.RESET)
        try:
            observation = await environment.reset(self._request.task)
        except Exception as error:
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, text_of(error)) from error
        self._progress.enter(Phase.SAMPLER)
        return checked_observation(observation, "reset")

    async def _step(self, environment: Environment, action: Action, asked_seconds: float) -> tuple[Observation | None, bool]:
        """(next observation, done); writes the action's reward."""
        try:
            outcome: Any = await environment.step(action)
        except Exception as error:
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, text_of(error)) from error
        finally:
            self._steps[-1].wait_seconds = self._progress.enter(Phase.SAMPLER) - asked_seconds
        if not isinstance(outcome, tuple | list) or len(outcome) != 3:
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"step returned {shown_value(outcome)}, not (observation, reward, done)")
        observation, reward, done = outcome
        if not isinstance(done, bool) and type(done).__name__ not in ("bool", "bool_"):  # numpy has a bool of its own
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"step returned done = {shown_value(done)}, not True or False")
        self._steps[-1].reward = checked_reward(reward, "step")
        return (None if observation is None else checked_observation(observation, "step")), bool(done)

    # Both

    def _render(self, observation: Observation) -> list[int]:
        chats = bool(observation.messages)
        if chats != self._chats and self._tokens:
            text = f"the rollout began with {'messages' if self._chats else 'a text'} and goes on with {'messages' if chats else 'a text'}: use one of the two"
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, text)
        self._chats = chats
        try:
            stop_tokens = self._request.sampling.stop_tokens
            return render_observation(self._tokenizer, observation, first=not self._tokens, context=self._tokens, stop_tokens=stop_tokens)
        except HeadraceError as error:
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, str(error)) from error
        except Exception as error:
            shown = shown_value(list(observation.messages) if chats else observation.text)
            hint = "" if chats else " (a model from scratch knows only model.characters)"
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"the tokenizer refuses {shown}{hint}: {describe_exception(error)}") from error

    async def _act(self, shown: list[int], observation: Observation, *, last: bool) -> Action:
        """Appends the observation's tokens and the action sampled for them."""
        if self._progress.is_cut:  # the user's code may have swallowed the cancellation
            raise TimeoutError
        room_tokens = self._token_limit - len(self._tokens) - len(shown)
        if room_tokens <= 0:  # of the first prompt: later observations were measured before
            text = f"the prompt has {len(shown)} tokens, with one token of an action more than {self._token_limit} (rollout.max_tokens, or the model's context)"
            raise RolloutEnded(EndReason.PROMPT_TOO_LONG, text)
        if not self._tokens and not shown:
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, "the first prompt is empty: there is nothing to continue")
        self._tokens.extend(shown)
        sampling = self._request.sampling
        if sampling.max_action_tokens > room_tokens:
            sampling = dataclasses.replace(sampling, max_action_tokens=room_tokens)
        key_weight = self._marks.before(observation)
        sample_request = SampleRequest(
            key=self._request.key,
            step=len(self._steps),
            seed=self._request.seed,
            tokens=tuple(self._tokens),
            sampling=sampling,
            keep_cache=not last,
            key_weight=key_weight,
            evaluation=self._request.evaluation,
        )
        self._progress.step = len(self._steps)
        completion = await self._sample(sample_request)
        self._record(completion, key_weight)
        action = read_action(self._tokenizer, completion, sampling)
        self._marks.acted(len(self._steps) - 1, observation, action, completion.logprobs, completion.entropies)
        self._last_text = action.text
        return action

    async def _sample(self, sample_request: SampleRequest) -> Completion:
        try:
            completion = await self._sampler.sample(sample_request)
        except Exception as error:
            too_long = isinstance(error, HeadraceError) and error.kind == "PromptTooLongError"
            raise RolloutEnded(EndReason.PROMPT_TOO_LONG if too_long else EndReason.SAMPLER_ERROR, describe_exception(error)) from error
        self.discarded_tokens += completion.discarded_tokens
        broken = broken_completion(completion)
        if broken:
            self.discarded_tokens += len(completion.tokens)
            raise RolloutEnded(EndReason.SAMPLER_ERROR, broken)
        return completion

    def _record(self, completion: Completion, key_weight: float) -> None:
        start = len(self._tokens)
        self._tokens.extend(completion.tokens)
        self._logprobs.extend(completion.logprobs)
        spans = tuple(VersionSpan(version=span.version, start=start + span.start, end=start + span.end) for span in completion.version_spans)
        self._steps.append(
            _Step(
                action_start=start,
                action_end=len(self._tokens),
                version_spans=spans,
                key_weight=key_weight,
                stop_reason=completion.stop_reason,
            )
        )

    async def _grade(self) -> float:
        """The recipe's reward function on the last action's text."""
        self._progress.enter(Phase.REWARD)
        try:
            reward = await self._user_code.reward(self._request.task, self._last_text)
        except Exception as error:
            raise RolloutEnded(EndReason.REWARD_ERROR, text_of(error)) from error
        return checked_reward(reward, "the reward function")

    async def _mark(self, end_reason: EndReason) -> None:
        """Key weights that are known only now. The recipe's reward function belongs to the last step."""
        if self._marks.ask_the_recipe:
            self._progress.enter(Phase.MARKS)
        rewards = [step.reward for step in self._steps]
        rewards[-1] += self._graded
        for step, weight in zip(self._steps, await self._marks.at_the_end(self._request.task, rewards, end_reason), strict=True):
            step.key_weight = max(step.key_weight, weight)

    def _reward(self) -> float:
        return sum(step.reward for step in self._steps) + self._graded
