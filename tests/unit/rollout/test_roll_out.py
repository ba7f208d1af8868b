"""One rollout under scripted roles: how it ends, what its trajectory holds, and what a failure leaves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fakes.rollouts import (
    CharacterTokenizer,
    LoopUserCode,
    ScriptedEnvironment,
    ScriptedSampler,
    ScriptedWeights,
    one_step_user_code,
    rollout_request,
    scripted_settings,
    scripted_task,
    scripted_user_code,
)
from headrace.clock import now, run_virtual
from headrace.rollout.progress import RolloutProgress
from headrace.rollout.roll_out import roll_out
from headrace.types import Action, Completion, EndReason, Observation, Outcome, SampleRequest, StopReason, Task, Trajectory, VersionSpan


def run_one(
    task: Task | None = None,
    *,
    sampler: ScriptedSampler | None = None,
    code: LoopUserCode | None = None,
    during: Callable[[RolloutProgress], Awaitable[None]] | None = None,
    tokenizer: Any = None,
    max_action_tokens: int = 16,
    **limits: Any,
) -> Trajectory:
    async def main() -> Trajectory:
        engine = sampler or ScriptedSampler()
        progress = RolloutProgress()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.run(lambda: "environment"))
            if during is not None:
                group.create_task(during(progress))
            trajectory = await roll_out(
                rollout_request(task=task, max_action_tokens=max_action_tokens),
                sampler=engine,
                tokenizer=tokenizer or CharacterTokenizer(),
                user_code=code or scripted_user_code(),
                settings=scripted_settings(rollout={"max_steps": 8, "max_tokens": 400, "max_action_tokens": 16, **limits}).rollout,
                progress=progress,
            )
            assert engine.generated_tokens == trajectory.num_action_tokens + trajectory.discarded_tokens
            running.cancel()
        assert Trajectory.from_bytes(trajectory.to_bytes()).summary() == trajectory.summary()
        return trajectory

    return run_virtual(main())


class OneAnswer:
    """An environment whose step returns, or does, what a test wants."""

    def __init__(self, outcome: Any = None, observation: Any = None) -> None:
        self._outcome = outcome
        self._observation = Observation(text="?") if observation is None else observation

    async def reset(self, task: Task) -> Observation:
        return self._observation() if callable(self._observation) else self._observation

    async def step(self, action: Action) -> Any:
        return self._outcome() if callable(self._outcome) else self._outcome


def environment(outcome: Any = None, observation: Any = None) -> LoopUserCode:
    return LoopUserCode(make_environment=lambda: OneAnswer(outcome, observation))


def raiser(error: BaseException) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run


def test_the_sampler_gets_exactly_the_tokens_of_the_trajectory() -> None:
    sampler = ScriptedSampler()
    trajectory = run_one(scripted_task("t", answers=4), sampler=sampler)
    assert trajectory.end_reason is EndReason.DONE
    assert len(sampler.requests) == 4
    for request, step in zip(sampler.requests, trajectory.steps, strict=True):
        assert tuple(request.tokens) == trajectory.tokens[: step.action_start]


def test_only_the_first_prompt_gets_special_tokens() -> None:
    trajectory = run_one(scripted_task("t", answers=3))
    assert [index for index, token in enumerate(trajectory.tokens) if token == CharacterTokenizer.bos_token_id] == [0]


def test_the_last_request_of_a_rollout_asks_for_no_cache() -> None:
    sampler = ScriptedSampler()
    run_one(scripted_task("t", answers=9), sampler=sampler, max_steps=3)
    assert [request.keep_cache for request in sampler.requests] == [True, True, False]


def test_a_key_observation_marks_the_action_that_answers_it() -> None:
    sampler = ScriptedSampler()
    trajectory = run_one(scripted_task("t", answers=4, key_steps=[0, 2], key_weight=2.5), sampler=sampler)
    assert [step.key_weight for step in trajectory.steps] == [2.5, 0.0, 2.5, 0.0]
    assert [request.key_weight for request in sampler.requests] == [2.5, 0.0, 2.5, 0.0]
    assert trajectory.summary().num_key_steps == 2


@pytest.mark.parametrize(("key", "weight"), [(True, 1.0), (False, 0.0), (3, 3.0), (0.5, 0.5)])
def test_a_key_may_be_a_truth_value_or_a_weight(key: Any, weight: float) -> None:
    trajectory = run_one(code=environment((None, 1.0, True), Observation(text="?", key=key)))
    assert trajectory.end_reason is EndReason.DONE
    assert trajectory.steps[0].key_weight == weight
    assert type(trajectory.steps[0].key_weight) is float


def test_marks_change_no_token_and_no_logprob() -> None:
    plain, marked = run_one(scripted_task("t", answers=4)), run_one(scripted_task("t", answers=4, key_steps=[1, 3]))
    assert (plain.tokens, plain.sampler_logprobs) == (marked.tokens, marked.sampler_logprobs)


def test_waits_are_recorded_by_step() -> None:
    trajectory = run_one(scripted_task("t", answers=2, wait_seconds=[1.5, 4.0], reward=0.5))
    assert [step.wait_seconds for step in trajectory.steps] == pytest.approx([1.5, 4.0])
    assert trajectory.wait_seconds == pytest.approx(5.5)
    assert [step.reward for step in trajectory.steps] == [0.0, 0.5]
    assert trajectory.reward == 0.5


def test_weights_that_arrive_in_the_middle_of_an_action_show_in_its_spans() -> None:
    weights = ScriptedWeights()
    sampler = ScriptedSampler(weights=weights, seconds_per_token=1.0, action_tokens=lambda request: 5)

    async def publish(progress: RolloutProgress) -> None:
        await asyncio.sleep(2.5)
        weights.publish(1)

    (step,) = run_one(sampler=sampler, during=publish).steps
    assert [(str(span.version), span.end - span.start) for span in step.version_spans] == [("0", 3), ("1", 2)]


def test_tokens_that_an_update_threw_away_are_counted() -> None:
    weights = ScriptedWeights()
    sampler = ScriptedSampler(weights=weights, seconds_per_token=1.0, action_tokens=lambda request: 5, abort=True)

    async def publish(progress: RolloutProgress) -> None:
        await asyncio.sleep(2.5)
        weights.publish(1)

    trajectory = run_one(sampler=sampler, during=publish)
    assert (trajectory.num_action_tokens, trajectory.discarded_tokens) == (5, 3)


# One-step tasks


def test_a_one_step_task_is_graded_by_the_reward_function() -> None:
    seen: list[tuple[str, str]] = []

    def reward(task: Task, answer: str) -> float:
        seen.append((task.id, answer))
        return 0.25

    trajectory = run_one(code=one_step_user_code(reward))
    assert (trajectory.end_reason, trajectory.reward, len(trajectory.steps)) == (EndReason.DONE, 0.25, 1)
    answered = trajectory.tokens[trajectory.steps[0].action_start :]
    assert answered[-1] == 0
    assert seen == [("t", "".join(chr(token) for token in answered[:-1]))]  # the stop token is in the action, not in the answer


def test_an_answer_cut_by_the_token_limit_is_graded_and_says_so() -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 99)
    trajectory = run_one(code=one_step_user_code(lambda task, answer: len(answer)), sampler=sampler, max_action_tokens=4)
    assert (trajectory.end_reason, trajectory.reward) == (EndReason.MAX_TOKENS, 4.0)
    assert trajectory.steps[0].stop_reason is StopReason.MAX_TOKENS


def test_a_one_step_answer_that_took_longer_than_max_seconds_is_finished_and_graded() -> None:
    sampler = ScriptedSampler(seconds_per_token=1.0, action_tokens=lambda request: 5)
    trajectory = run_one(code=one_step_user_code(lambda task, answer: 0.5), sampler=sampler, max_seconds=3.0)
    assert (trajectory.end_reason, trajectory.reward, trajectory.num_action_tokens) == (EndReason.MAX_SECONDS, 0.5, 5)


def test_an_observation_that_exactly_fills_the_context_ends_the_rollout_by_its_token_limit() -> None:
    """2 prompt tokens and 4 of an action; an observation of n more leaves room only if another token fits behind it."""
    sampler = ScriptedSampler(action_tokens=lambda request: 4)
    for length, num_steps in [(13, 2), (14, 1), (15, 1)]:
        trajectory = run_one(code=environment((Observation(text="x" * length), 0.0, False)), sampler=sampler, max_tokens=20)
        assert (trajectory.end_reason, len(trajectory.steps)) == (EndReason.MAX_TOKENS, num_steps)
        sampler = ScriptedSampler(action_tokens=lambda request: 4)


@pytest.mark.parametrize("data", [{}, {"prompt": 3}])
def test_a_one_step_task_without_a_prompt_is_named(data: dict[str, Any]) -> None:
    trajectory = run_one(Task(id="bare", data=data), code=one_step_user_code(lambda task, answer: 1.0))
    assert trajectory.end_reason is EndReason.ENVIRONMENT_ERROR
    assert trajectory.error is not None and "task 'bare'" in trajectory.error and "'prompt'" in trajectory.error


def test_the_reward_function_is_added_to_the_rewards_of_the_environment() -> None:
    async def reward(task: Task, answer: str) -> float:
        return 10.0

    assert run_one(scripted_task("t", answers=2, reward=0.5), code=scripted_user_code(reward=reward)).reward == 10.5
    assert run_one(scripted_task("t", answers=99), code=scripted_user_code(reward=reward), max_steps=3).reward == 10.0


# Limits


def test_a_rollout_ends_after_max_steps_with_the_reward_of_its_last_action() -> None:
    trajectory = run_one(code=environment((Observation(text="again"), 0.5, False)), max_steps=3)
    assert (trajectory.end_reason, len(trajectory.steps), trajectory.reward, trajectory.failed) == (EndReason.MAX_STEPS, 3, 1.5, False)
    assert trajectory.tokens[-1] == trajectory.tokens[trajectory.steps[-1].action_end - 1]  # no observation that nobody answered


@pytest.mark.parametrize("context", [60, 1000])
def test_a_rollout_never_passes_its_token_limit_or_the_context(context: int) -> None:
    sampler = ScriptedSampler(max_context_tokens=context, action_tokens=lambda request: 16)
    trajectory = run_one(scripted_task("t", answers=99), sampler=sampler, max_steps=50, max_tokens=100)
    assert trajectory.end_reason is EndReason.MAX_TOKENS
    assert not trajectory.failed
    assert min(100, context) - 3 <= len(trajectory.tokens) <= min(100, context)


def test_an_action_gets_only_the_room_that_is_left() -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 16)
    run_one(scripted_task("t", answers=99), sampler=sampler, max_steps=50, max_tokens=50)
    assert all(len(request.tokens) + request.sampling.max_action_tokens <= 50 for request in sampler.requests)
    assert sampler.requests[0].sampling.max_action_tokens == 16


@pytest.mark.parametrize(("characters", "fits"), [(38, True), (39, False), (5000, False)])
def test_a_prompt_without_room_for_one_action_token_is_refused_before_it_is_sampled(characters: int, fits: bool) -> None:
    sampler = ScriptedSampler()
    trajectory = run_one(Task(id="t", data={"prompt": "x" * characters}), code=one_step_user_code(lambda task, answer: 1.0), sampler=sampler, max_tokens=40)
    assert (trajectory.end_reason is not EndReason.PROMPT_TOO_LONG) is fits
    assert len(sampler.requests) == int(fits)
    if not fits:
        assert trajectory.tokens == ()
        assert trajectory.error is not None and f"{characters + 1} tokens" in trajectory.error and "40" in trajectory.error


def test_a_wait_past_max_seconds_is_cut_and_the_rollout_is_trained_with_what_it_has() -> None:
    trajectory = run_one(scripted_task("t", answers=3, wait_seconds=[1.0, 100.0]), max_seconds=10.0)
    assert (trajectory.end_reason, trajectory.failed, len(trajectory.steps)) == (EndReason.MAX_SECONDS, False, 2)
    assert trajectory.finished_seconds == pytest.approx(10.0)
    assert trajectory.steps[1].wait_seconds == pytest.approx(9.0, abs=0.5)


def test_an_action_that_is_being_drawn_at_max_seconds_is_finished() -> None:
    sampler = ScriptedSampler(seconds_per_token=1.0, action_tokens=lambda request: 5)
    trajectory = run_one(scripted_task("t", answers=3), sampler=sampler, max_seconds=7.0)
    assert (trajectory.end_reason, trajectory.num_action_tokens, trajectory.discarded_tokens) == (EndReason.MAX_SECONDS, 10, 0)


def test_a_reset_past_max_seconds_is_a_failure_because_nothing_was_sampled() -> None:
    trajectory = run_one(scripted_task("t", reset_seconds=100.0), max_seconds=10.0)
    assert trajectory.end_reason is EndReason.ENVIRONMENT_ERROR
    assert trajectory.error is not None and "rollout.max_seconds" in trajectory.error


def test_a_hanging_environment_fails_at_its_own_limit() -> None:
    trajectory = run_one(scripted_task("t", answers=3, hang_at=1), code=scripted_user_code(limit_seconds=5.0))
    assert trajectory.end_reason is EndReason.ENVIRONMENT_ERROR
    assert trajectory.error == "ScriptedEnvironment.step gave no answer in 5 s (rollout.max_environment_seconds)"
    assert len(trajectory.steps) == 2


# Failures


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (environment(None), "None (NoneType), not (observation, reward, done)"),
        (environment((Observation(text="?"), 1.0)), "not (observation, reward, done)"),
        (environment((None, 0.0, False)), "step 0 returned no observation although it is not done"),
        (environment(("text", 0.0, False)), "'text' (str) where an Observation belongs"),
        (environment((None, 0.0, "yes")), "done = 'yes' (str)"),
        (environment((Observation(text=3), 0.0, False)), "text is 3 (int)"),  # type: ignore[arg-type]
        (environment((Observation(text="?", key=-1.0), 0.0, False)), "key is -1.0"),
        (environment((Observation(text="?", key=math.nan), 0.0, False)), "key is nan"),
        (environment(None, "text"), "reset returned 'text' (str)"),
        (environment(None, Observation(text="?", key="yes")), "key is 'yes' (str)"),  # type: ignore[arg-type]
        (environment(raiser(ValueError("no door"))), "OneAnswer.step raised ValueError: no door (test_roll_out.py:"),
        (environment(raiser(TimeoutError("socket"))), "OneAnswer.step raised TimeoutError: socket"),
        (environment(raiser(SystemExit(3))), "OneAnswer.step called exit(3)"),
        (environment(None, raiser(KeyError("task"))), "OneAnswer.reset raised KeyError: 'task'"),
        (LoopUserCode(make_environment=raiser(RuntimeError("no sandbox"))), "making the environment failed: RuntimeError: no sandbox"),
    ],
)
def test_whatever_an_environment_does_wrong_is_named(code: LoopUserCode, told: str) -> None:
    trajectory = run_one(code=code)
    assert trajectory.end_reason is EndReason.ENVIRONMENT_ERROR
    assert trajectory.error is not None and told in trajectory.error


def test_an_empty_first_prompt_is_refused() -> None:
    class Bare(CharacterTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text, add_special_tokens=False)

    trajectory = run_one(code=environment((None, 1.0, True), Observation(text="")), tokenizer=Bare())
    assert trajectory.end_reason is EndReason.ENVIRONMENT_ERROR
    assert trajectory.error is not None and "empty" in trajectory.error


def test_an_empty_later_observation_is_allowed() -> None:
    trajectory = run_one(code=environment((Observation(text=""), 0.0, False)), max_steps=3)
    assert trajectory.end_reason is EndReason.MAX_STEPS
    assert trajectory.steps[1].action_start == trajectory.steps[0].action_end


def test_a_text_that_the_tokenizer_refuses_is_named() -> None:
    class Narrow(CharacterTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            if "é" in text:
                raise ValueError("'é' is not in the alphabet")
            return super().encode(text, add_special_tokens=add_special_tokens)

    trajectory = run_one(code=environment((Observation(text="café"), 0.0, False)), tokenizer=Narrow())
    assert trajectory.end_reason is EndReason.ENVIRONMENT_ERROR
    assert trajectory.error is not None and "not in the alphabet" in trajectory.error and "'café'" in trajectory.error
    assert trajectory.num_action_tokens > 0


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (math.nan, "the reward nan"),
        (math.inf, "the reward inf"),
        (None, "None (NoneType) as reward, not a number"),
        ("0.5", "'0.5' (str) as reward"),
        (1j, "(complex) as reward"),
        ([1.0], "(list) as reward"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_a_reward_error(reward: Any, told: str) -> None:
    by_function = run_one(code=one_step_user_code(lambda task, answer: reward))
    by_environment = run_one(code=environment((None, reward, True)))
    for trajectory in (by_function, by_environment):
        assert trajectory.end_reason is EndReason.REWARD_ERROR
        assert trajectory.error is not None and told in trajectory.error
        assert trajectory.reward == 0.0


def test_rewards_of_numpy_and_truth_values_count_as_numbers() -> None:
    import numpy

    assert run_one(code=environment((None, numpy.float32(0.5), numpy.bool_(True)))).reward == 0.5
    assert run_one(code=one_step_user_code(lambda task, answer: True)).reward == 1.0


def test_rewards_that_overflow_in_the_sum_are_a_reward_error() -> None:
    trajectory = run_one(code=environment((Observation(text="?"), 1.7e308, False)), max_steps=3)
    assert (trajectory.end_reason, trajectory.reward) == (EndReason.REWARD_ERROR, 0.0)


def test_a_raising_reward_function_is_named_and_its_tokens_are_kept() -> None:
    def reward(task: Task, answer: str) -> float:
        raise ZeroDivisionError("division by zero")

    trajectory = run_one(code=one_step_user_code(reward))
    assert trajectory.end_reason is EndReason.REWARD_ERROR
    assert trajectory.error is not None and "reward raised ZeroDivisionError: division by zero (test_roll_out.py:" in trajectory.error
    assert trajectory.num_action_tokens > 0


def test_an_environment_that_fails_half_way_leaves_a_consistent_trajectory() -> None:
    trajectory = run_one(scripted_task("t", answers=5, fail_at=2))
    assert (trajectory.end_reason, len(trajectory.steps)) == (EndReason.ENVIRONMENT_ERROR, 3)
    assert trajectory.num_action_tokens == sum(step.action_end - step.action_start for step in trajectory.steps)
    assert trajectory.steps[-1].action_end == len(trajectory.tokens)


def test_tokens_of_an_action_that_the_sampler_lost_are_counted() -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 5, fail=lambda request: 3 if request.step == 1 else None)
    trajectory = run_one(scripted_task("t", answers=5), sampler=sampler)
    assert trajectory.end_reason is EndReason.SAMPLER_ERROR
    assert trajectory.error is not None and "RuntimeError: scripted sampler failure after 3 tokens" in trajectory.error
    assert (trajectory.num_action_tokens, trajectory.discarded_tokens) == (5, 3)


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, 0.1])
def test_a_sampler_that_delivers_a_wrong_logprob_fails_only_its_rollout(logprob: float) -> None:
    class Broken(ScriptedSampler):
        async def sample(self, request: SampleRequest) -> Completion:
            good = await super().sample(request)
            return Completion(tokens=good.tokens, logprobs=(logprob,) * len(good.tokens), version_spans=good.version_spans, stop_reason=good.stop_reason)

    trajectory = run_one(sampler=Broken())
    assert trajectory.end_reason is EndReason.SAMPLER_ERROR
    assert trajectory.error is not None and "log-probability" in trajectory.error
    assert trajectory.sampler_logprobs == () and trajectory.discarded_tokens > 0


# Being cut


@pytest.mark.parametrize(
    ("seconds", "num_steps", "num_discarded"),
    [(0.0, 0, 0), (0.5, 0, 0), (3.5, 0, 2), (6.5, 1, 0), (18.0, 2, 0)],
    ids=["at once", "reset", "sampling", "environment", "reward"],
)
def test_a_cut_rollout_ends_at_once_in_any_phase_and_accounts_for_its_tokens(seconds: float, num_steps: int, num_discarded: int) -> None:
    async def hanging(task: Task, answer: str) -> float:
        await asyncio.sleep(100.0)
        return 0.0

    async def cut(progress: RolloutProgress) -> None:
        await asyncio.sleep(seconds)
        progress.cut()
        progress.cut()

    task = scripted_task("t", reset_seconds=1.0, answers=2, wait_seconds=[3.0, 2.0])
    sampler = ScriptedSampler(seconds_per_token=1.0, action_tokens=lambda request: 5)
    trajectory = run_one(task, sampler=sampler, code=scripted_user_code(reward=hanging), during=cut)
    assert trajectory.end_reason is EndReason.CANCELLED
    assert trajectory.finished_seconds == pytest.approx(seconds)
    assert (len(trajectory.steps), trajectory.discarded_tokens) == (num_steps, num_discarded)


def test_an_environment_that_swallows_its_cancellation_does_not_keep_a_cut_rollout_alive() -> None:
    class Stubborn(ScriptedEnvironment):
        async def step(self, action: Action) -> Outcome:
            try:
                await asyncio.sleep(10.0)
            except asyncio.CancelledError:
                pass
            return Outcome(Observation(text="again"), 0.0, False)

    async def cut(progress: RolloutProgress) -> None:
        await asyncio.sleep(5.0)
        progress.cut()

    trajectory = run_one(code=LoopUserCode(make_environment=Stubborn), during=cut)
    assert (trajectory.end_reason, len(trajectory.steps)) == (EndReason.CANCELLED, 1)
    assert trajectory.finished_seconds == pytest.approx(5.0)


def test_cancelling_the_task_of_a_rollout_is_not_swallowed() -> None:
    async def main() -> None:
        sampler = ScriptedSampler(seconds_per_token=1.0)
        async with asyncio.TaskGroup() as group:
            engine = group.create_task(sampler.run(lambda: "environment"))
            rollout = group.create_task(
                roll_out(
                    rollout_request(), sampler=sampler, tokenizer=CharacterTokenizer(), user_code=scripted_user_code(), settings=scripted_settings().rollout
                )
            )
            await asyncio.sleep(1.5)
            rollout.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rollout
            assert sampler.num_running == 0
            assert now() == 1.5
            engine.cancel()

    run_virtual(main())


def test_the_fake_tiles_versions_as_the_real_sampler_must() -> None:
    trajectory = run_one(scripted_task("t", answers=2))
    for step in trajectory.steps:
        assert step.version_spans == (VersionSpan(version=step.version_spans[0].version, start=step.action_start, end=step.action_end),)
