"""Continuous batching as arithmetic, held against the same thing step by step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.simulated_runs import random_times
from headrace.runtime.simulated_engine import Action, DecodeEngine
from headrace.runtime.time_model import TimeModel
from headrace.types import PolicyVersion


def make(owner: object, tokens: int, *, context: int = 0, observation: int = 0) -> Action:
    return Action(owner, context=context, observation_tokens=observation, action_tokens=tokens)


def run_out(engine: DecodeEngine, now: float = 0.0) -> list[tuple[object, float]]:
    """(owner, when it ended), all that the engine holds."""
    ended = []
    while steps := engine.begin(now):
        now = engine.time_of(steps)
        ended += [(action.owner, now) for action in engine.advance(steps)]
    return ended


def step_by_step(model: TimeModel, actions: list[tuple[int, int, int]], max_running: int) -> list[tuple[object, float]]:
    """The same, one decode step after another: (tokens, context, observation) of each action."""
    waiting = [[index, *action] for index, action in enumerate(actions)]
    running: list[list[int]] = []
    now, ended = 0.0, []
    while waiting or running:
        observed = 0.0
        while waiting and len(running) < max_running:
            index, tokens, context, observation = waiting.pop(0)
            observed += model.observation_seconds(observation)
            running.append([index, tokens, context + observation])
        read = sum(row[2] for row in running)
        now += observed + model.step_seconds(len(running)) + model.gap_seconds(len(running)) + model.seconds_per_context_token * read
        for row in running:
            row[1] -= 1
            row[2] += 1
        ended += [(row[0], now) for row in running if row[1] == 0]
        running = [row for row in running if row[1] > 0]
    return ended


@given(
    actions=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 300), st.integers(0, 40)), min_size=1, max_size=25),
    max_running=st.integers(1, 8),
)
def test_actions_end_when_they_end_step_by_step(actions: list[tuple[int, int, int]], max_running: int) -> None:
    model = random_times()
    engine = DecodeEngine(model, max_running=max_running)
    engine.waiting.extend(make(index, tokens, context=context, observation=observation) for index, (tokens, context, observation) in enumerate(actions))
    found, expected = run_out(engine), step_by_step(model, actions, max_running)
    assert [owner for owner, _ in found] == [owner for owner, _ in expected]
    assert [time for _, time in found] == pytest.approx([time for _, time in expected], rel=1e-9)
    assert engine.generated_tokens == sum(tokens for tokens, _, _ in actions)


@given(tokens=st.integers(2, 500), context=st.integers(0, 5000), share=st.floats(0.001, 0.999), reading=st.sampled_from([0.0, 1e-6, 1e-3]))
def test_whole_steps_by_a_moment_are_those_that_end_before_it(tokens: int, context: int, share: float, reading: float) -> None:
    engine = DecodeEngine(random_times(seconds_per_context_token=reading), max_running=2)
    engine.waiting.extend([make("a", tokens, context=context), make("b", tokens + 3, observation=7)])
    steps = engine.begin(10.0)
    moment = 10.0 + share * (engine.time_of(steps) - 10.0)
    done = engine.steps_done(moment)
    assert engine.time_of(done) <= moment < engine.time_of(done + 1)
    ends = engine.time_of(steps)
    engine.advance(done)
    assert engine.time_of(steps - done) == pytest.approx(ends, rel=1e-12)


def test_tokens_belong_to_the_version_that_drew_them() -> None:
    engine = DecodeEngine(random_times(), max_running=4)
    long, short = make("long", 30), make("short", 12)
    engine.waiting.append(long)
    engine.begin(0.0)
    engine.advance(10)
    engine.take_up(PolicyVersion(0, 3), 0.5)
    engine.waiting.append(short)
    engine.begin(5.0)
    engine.advance(12)
    engine.take_up(PolicyVersion(0, 4), 0.5)
    run_out(engine, 9.0)
    assert long.drawn == {PolicyVersion(0, 0): 10, PolicyVersion(0, 3): 12, PolicyVersion(0, 4): 8}
    assert short.drawn == {PolicyVersion(0, 3): 12}
    activity = engine.take_activity()
    assert (activity.applied_updates, activity.apply_seconds, activity.sampled_tokens) == (2, 1.0, 42)


def test_of_a_step_only_the_models_work_is_busy_and_what_is_between_two_is_the_rollouts_python() -> None:
    engine = DecodeEngine(random_times(step_seconds=lambda running: 0.010, gap_seconds=lambda running: 0.002, work_share=0.75), max_running=4)
    engine.waiting.extend(make(index, 100) for index in range(4))
    (_, end), *_ = run_out(engine)
    activity = engine.take_activity()
    assert activity.step_seconds == pytest.approx(end - 100 * 0.002)
    assert activity.busy_seconds == pytest.approx(0.75 * activity.step_seconds)
    assert activity.idle_seconds == pytest.approx({"bookkeeping": 0.25 * activity.step_seconds, "rollouts": 0.2})
    assert activity.seconds == pytest.approx(end)
    assert activity.decode_work[0][4] == pytest.approx(activity.step_seconds)


def test_a_full_kv_cache_throws_out_the_newest_which_draws_the_rest_later() -> None:
    capacity, stream = 900, random.Random(0)
    engine = DecodeEngine(random_times(kv_capacity_tokens=capacity), max_running=64)
    lengths = {index: stream.randint(20, 300) for index in range(40)}
    actions = [make(index, tokens, observation=50) for index, tokens in lengths.items()]
    engine.waiting.extend(actions)
    now, most, ended = 0.0, 0, []
    while steps := engine.begin(now):
        most = max(most, engine.num_running)
        assert engine.context_tokens + steps * engine.num_running <= capacity
        now = engine.time_of(steps)
        ended += engine.advance(steps)
    assert 3 < most < 20
    assert engine.preempted > 0
    assert {action.owner: sum(action.drawn.values()) for action in ended} == lengths
    assert all(action.context == 50 + lengths[action.owner] for action in ended)  # type: ignore[index]


def test_what_is_given_up_in_the_middle_keeps_what_it_has_drawn() -> None:
    engine = DecodeEngine(random_times(), max_running=2)
    a, b, c = make("a", 20), make("b", 30), make("c", 5)
    engine.waiting.extend([a, b, c])
    engine.begin(0.0)
    engine.advance(7)
    engine.drop(a)
    engine.drop(c)
    assert (a.drawn, c.drawn) == ({PolicyVersion(0, 0): 7}, {})
    assert [owner for owner, _ in run_out(engine, 1.0)] == ["b"]
    assert engine.generated_tokens == 7 + 30
