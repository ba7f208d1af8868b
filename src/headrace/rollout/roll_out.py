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
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from headrace import clock
from headrace.config import ContextRule, RolloutSettings
from headrace.errors import HeadraceError
from headrace.marks import TrajectoryView
from headrace.roles import Environment, Sampler, Tokenizer
from headrace.rollout.checks import (
    RolloutEnded,
    broken_completion,
    checked_observation,
    checked_outcome,
    checked_reward,
    first_observation,
    shown_value,
    text_of,
)
from headrace.rollout.draft import Draft
from headrace.rollout.marking import Marker, RolloutMarks
from headrace.rollout.progress import ENVIRONMENT_PHASES, Phase, RolloutProgress
from headrace.rollout.render import read_action, render_observation
from headrace.rollout.rewind import Moment, Rewind, rewind_of, take_snapshot
from headrace.rollout.user_call import describe_exception
from headrace.rollout.verification import VerifyRule
from headrace.types import (
    Action,
    Completion,
    EndReason,
    Observation,
    RolloutKey,
    RolloutRequest,
    SampleRequest,
    SamplingParameters,
    StopReason,
    Task,
    Trajectory,
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
    rollout = Rollout(request, sampler=sampler, tokenizer=tokenizer, user_code=user_code, settings=settings, progress=progress, marker=marker)
    try:
        return await rollout.run()
    finally:
        rollout.close()


class Rollout:
    """The state of one rollout: what will be its trajectory, and, with a `rule`, what verification needs to go on from its middle."""

    def __init__(
        self,
        request: RolloutRequest,
        *,
        sampler: Sampler,
        tokenizer: Tokenizer,
        user_code: UserCode,
        settings: RolloutSettings,
        progress: RolloutProgress | None = None,
        marker: Marker | None = None,
        rule: VerifyRule | None = None,
    ) -> None:
        self.request = request
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.user_code = user_code
        self.settings = settings
        self.progress = progress or RolloutProgress()
        self.draft = Draft(request)
        self._markov = settings.context is ContextRule.OBSERVATION
        self.deadline_seconds = self.draft.started_seconds + settings.max_seconds
        self.environment: Environment | None = None
        self.rewind = Rewind.NONE
        self.moments: list[Moment] | None = None
        """One an action; None: this rollout is never verified."""
        self._marks = RolloutMarks(marker or Marker())
        self._rule = None if request.evaluation else rule
        self._token_limit = min(settings.max_tokens, sampler.max_context_tokens)
        self._last_text = ""
        self._chats = False

    async def run(self) -> Trajectory:
        """From the beginning to the end. The environment lives until `close`."""
        return self.draft.trajectory(*await self.bounded(self._begin))

    async def bounded(self, work: Callable[[], Awaitable[EndReason]]) -> tuple[EndReason, str | None]:
        """(how it ended, error): lets the worker cut it, and leaves nothing of it with the sampler."""
        try:
            if self.progress.is_cut:
                raise TimeoutError
            async with asyncio.timeout(None) as timeout:
                self.progress.arm(timeout)
                try:
                    return await work(), None
                except RolloutEnded as ended:
                    return ended.reason, ended.error
                finally:
                    self.progress.arm(None)
        except TimeoutError:
            if not self.progress.is_cut:
                raise
            return EndReason.CANCELLED, "cancelled by the run"
        finally:
            self.draft.discarded_tokens += self.sampler.release(self.request.key)

    def close(self) -> None:
        """Its environment can go."""
        self.environment = None
        self.user_code.release(self.request.key)

    async def _begin(self) -> EndReason:
        """Raises RolloutEnded for every end but the regular ones."""
        try:
            environment = self.environment = self.user_code.open_environment(self.request.key)
        except (Exception, SystemExit) as error:
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"making the environment failed: {text_of(error)}") from error
        if self._rule is not None:
            self.rewind = Rewind.NONE if environment is None else rewind_of(environment)
            self.moments = [] if environment is None or self.rewind is not Rewind.NONE else None
        if environment is None:
            observation = first_observation(self.request.task)
            self.progress.enter(Phase.SAMPLER)
            return await self._graded(self._answered(await self._act(observation, self._render(observation))))
        return await self._graded(await self._in_time(environment, lambda: self._first_action(environment)))

    async def go_on(self) -> EndReason:
        """From an action that has begun again to the end: what `_begin` does with the actions before it left out."""
        environment = self.environment
        self.progress.enter(Phase.SAMPLER)
        if environment is None:
            return await self._graded(self._answered(await self._finish_action()))
        return await self._graded(await self._in_time(environment, self._finish_action))

    async def _graded(self, end_reason: EndReason) -> EndReason:
        if self.user_code.has_reward and self.draft.steps:
            self.draft.graded = await self._grade()
        if not math.isfinite(self.draft.reward):
            raise RolloutEnded(EndReason.REWARD_ERROR, f"the rewards of the steps add up to {self.draft.reward}")
        if not self._marks.are_complete and self.draft.steps:
            await self._mark(end_reason)
        return end_reason

    # One-step tasks

    def _answered(self, action: Action) -> EndReason:
        if clock.now() >= self.deadline_seconds:
            return EndReason.MAX_SECONDS
        return EndReason.DONE if action.stop_reason is StopReason.STOP else EndReason.MAX_TOKENS

    # Tasks with an environment

    async def _in_time(self, environment: Environment, begin: Callable[[], Awaitable[Action]]) -> EndReason:
        """One timer a rollout: at the deadline it cuts a wait for the environment, and leaves an action that is being drawn alone."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as timeout:
                timer = loop.call_at(self.deadline_seconds, self._cut_environment, timeout)
                try:
                    return await self._walk(environment, await begin())
                finally:
                    timer.cancel()
        except TimeoutError as error:
            if self.progress.is_cut:
                raise
            if not self.draft.steps:
                text = f"reset gave no observation within the rollout's {self.settings.max_seconds:g} s (rollout.max_seconds)"
                raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, text) from error
            return EndReason.MAX_SECONDS

    def _cut_environment(self, timeout: asyncio.Timeout) -> None:
        if self.progress.phase in ENVIRONMENT_PHASES:
            timeout.reschedule(clock.now())

    async def _first_action(self, environment: Environment) -> Action:
        observation = await self._reset(environment)
        return await self._act(observation, self._render(observation))

    async def _walk(self, environment: Environment, action: Action) -> EndReason:
        """From a whole action to the end."""
        draft = self.draft
        while True:
            asked_seconds = self.progress.enter(Phase.ENVIRONMENT)
            if asked_seconds >= self.deadline_seconds:
                return EndReason.MAX_SECONDS
            following, done = await self._step(environment, action, asked_seconds)
            if done:
                return EndReason.DONE
            if following is None:
                raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"step {len(draft.steps) - 1} returned no observation although it is not done")
            if len(draft.steps) == self.settings.max_steps:
                return EndReason.MAX_STEPS
            shown = self._render(following)
            if len(draft.tokens) - self._context_start() + len(shown) >= self._token_limit:
                return EndReason.MAX_TOKENS
            action = await self._act(following, shown)

    async def _reset(self, environment: Environment) -> Observation:
        self.progress.enter(Phase.RESET)
        try:
            observation = await environment.reset(self.request.task)
        except Exception as error:
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, text_of(error)) from error
        self.progress.enter(Phase.SAMPLER)
        return checked_observation(observation, "reset")

    async def _step(self, environment: Environment, action: Action, asked_seconds: float) -> tuple[Observation | None, bool]:
        """(next observation, done); writes the action's reward."""
        try:
            outcome: Any = await environment.step(action)
        except Exception as error:
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, text_of(error)) from error
        finally:
            self.draft.steps[-1].wait_seconds = self.progress.enter(Phase.SAMPLER) - asked_seconds
        observation, self.draft.steps[-1].reward, done = checked_outcome(outcome, "step")
        return observation, done

    # Both

    def _render(self, observation: Observation) -> list[int]:
        chats, tokens = bool(observation.messages), self.draft.tokens
        if chats != self._chats and tokens:
            text = f"the rollout began with {'messages' if self._chats else 'a text'} and goes on with {'messages' if chats else 'a text'}: use one of the two"
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, text)
        self._chats = chats
        try:
            first = not tokens or self._markov
            return render_observation(self.tokenizer, observation, first=first, context=tokens, stop_tokens=self.request.sampling.stop_tokens)
        except HeadraceError as error:
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, str(error)) from error
        except Exception as error:
            shown = shown_value(list(observation.messages) if chats else observation.text)
            hint = "" if chats else " (a model from scratch knows only model.characters)"
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"the tokenizer refuses {shown}{hint}: {describe_exception(error)}") from error

    async def _act(self, observation: Observation, shown: list[int]) -> Action:
        """Appends the observation's tokens and the action sampled for them."""
        if self.progress.is_cut:  # the user's code may have swallowed the cancellation
            raise TimeoutError
        draft = self.draft
        context_start = self._context_start()
        num_context = len(draft.tokens) - context_start + len(shown)
        if num_context >= self._token_limit:  # of the first prompt: later observations were measured before
            text = f"the prompt has {len(shown)} tokens, with one token of an action more than {self._token_limit} (rollout.max_tokens, or the model's context)"
            raise RolloutEnded(EndReason.PROMPT_TOO_LONG, text)
        if not num_context:
            raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, "the prompt is empty: there is nothing to continue")
        key_weight = self._marks.before(observation)
        keep_distribution = self.moments is not None and await self._remember(observation, key_weight)
        draft.tokens.extend(shown)
        sampling = self._sampling(num_context)
        self.progress.step = len(draft.steps)
        completion = await self._sample(
            SampleRequest(
                key=self.request.key,
                step=len(draft.steps),
                seed=self.request.seed,
                tokens=tuple(draft.tokens[context_start:] if context_start else draft.tokens),
                sampling=sampling,
                round=draft.round,
                keep_distribution=keep_distribution,
                keep_cache=self._keeps_cache(len(draft.steps)),
                key_weight=key_weight,
                evaluation=self.request.evaluation,
            )
        )
        draft.append_action(completion, key_weight)
        return self._action(observation, completion, sampling)

    async def _finish_action(self) -> Action:
        """The last action ends with a redrawn token: goes on from there, unless that ended it."""
        draft, step = self.draft, self.draft.steps[-1]
        index = len(draft.steps) - 1
        assert self.moments is not None
        moment = self.moments[index]
        context_start = draft.steps[-2].action_end if self._markov and index else 0
        sampling = self._sampling(step.action_start - context_start)
        begun = tuple(draft.tokens[step.action_start :])
        self.progress.step = index
        stop_reason = self._stop_reason(begun, sampling)
        if stop_reason is not None:
            step.stop_reason = stop_reason
        else:
            completion = await self._sample(
                SampleRequest(
                    key=self.request.key,
                    step=index,
                    seed=self.request.seed,
                    tokens=tuple(draft.tokens[context_start:]),
                    sampling=sampling,
                    drawn_tokens=len(begun),
                    round=draft.round,
                    keep_distribution=True,
                    keep_cache=self._keeps_cache(index),
                    key_weight=step.key_weight,
                )
            )
            draft.continue_action(completion)
        return self._action(moment.observation, draft.last_action(), sampling)

    def _context_start(self) -> int:
        """Where the context of the next observation's action begins."""
        return self.draft.steps[-1].action_end if self._markov and self.draft.steps else 0

    def _sampling(self, num_context: int) -> SamplingParameters:
        """With the room that the context leaves."""
        sampling, room_tokens = self.request.sampling, self._token_limit - num_context
        return dataclasses.replace(sampling, max_action_tokens=room_tokens) if sampling.max_action_tokens > room_tokens else sampling

    def _keeps_cache(self, step: int) -> bool:
        """Whether a step may follow whose context continues this one's."""
        return self.environment is not None and step + 1 < self.settings.max_steps and not self._markov

    def _stop_reason(self, begun: tuple[int, ...], sampling: SamplingParameters) -> StopReason | None:
        """Why an action of these tokens is over; None: it goes on. As the sampler says it of the tokens that it draws."""
        if begun[-1] in sampling.stop_tokens:
            return StopReason.STOP
        if sampling.stop_strings:
            text = self.tokenizer.decode(begun, skip_special_tokens=False)
            if any(stop in text for stop in sampling.stop_strings):
                return StopReason.STOP
        return StopReason.MAX_TOKENS if len(begun) >= sampling.max_action_tokens else None

    async def _remember(self, observation: Observation, key_weight: float) -> bool:
        """What it takes to come back to before this action. Gives whether its distribution is to be kept."""
        assert self.moments is not None and self._rule is not None
        moment = Moment(observation, key_weight, clock.now() - self.draft.started_seconds)
        self.moments.append(moment)
        checked = self._rule.may_check(key_weight)
        if checked and self.rewind is Rewind.SNAPSHOT:
            try:
                moment.snapshot = await take_snapshot(self.environment)
            except Exception as error:
                raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, text_of(error)) from error
        return checked

    def _action(self, observation: Observation, completion: Completion, sampling: SamplingParameters) -> Action:
        action = read_action(self.tokenizer, completion, sampling)
        self._last_text = action.text
        self._marks.acted(len(self.draft.steps) - 1, observation, action, completion.logprobs, completion.entropies)
        if self.moments is not None:
            self.moments[-1].action = action
        return action

    async def _sample(self, sample_request: SampleRequest) -> Completion:
        try:
            completion = await self.sampler.sample(sample_request)
        except Exception as error:
            too_long = isinstance(error, HeadraceError) and error.kind == "PromptTooLongError"
            raise RolloutEnded(EndReason.PROMPT_TOO_LONG if too_long else EndReason.SAMPLER_ERROR, describe_exception(error)) from error
        self.draft.discarded_tokens += completion.discarded_tokens
        broken = broken_completion(completion)
        if broken:
            self.draft.discarded_tokens += len(completion.tokens)
            raise RolloutEnded(EndReason.SAMPLER_ERROR, broken)
        return completion

    async def _grade(self) -> float:
        """The recipe's reward function on the last action's text."""
        self.progress.enter(Phase.REWARD)
        try:
            reward = await self.user_code.reward(self.request.task, self._last_text)
        except Exception as error:
            raise RolloutEnded(EndReason.REWARD_ERROR, text_of(error)) from error
        return checked_reward(reward, "the reward function")

    async def _mark(self, end_reason: EndReason) -> None:
        """Key weights that are known only now. The recipe's reward function belongs to the last step."""
        if self._marks.ask_the_recipe:
            self.progress.enter(Phase.MARKS)
        steps = self.draft.steps
        rewards = [step.reward for step in steps]
        rewards[-1] += self.draft.graded
        for step, weight in zip(steps, await self._marks.at_the_end(self.request.task, rewards, end_reason), strict=True):
            step.key_weight = max(step.key_weight, weight)
