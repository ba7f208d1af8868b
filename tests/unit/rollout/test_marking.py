"""Markers of a rollout: which weights they give, when, and what a marking function that fails does."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import MarkSettings
from headrace.marks import StepView, TrajectoryView
from headrace.rollout.checks import RolloutEnded
from headrace.rollout.marking import Marker, RecentEntropies, marks_afterwards
from headrace.types import EndReason, Observation, Task


async def unasked(trajectory: TrajectoryView) -> object:
    raise AssertionError("no marking function is set")


def marker(ask: Any = unasked, **settings: Any) -> Marker:
    return Marker(MarkSettings(**settings), ask)


def view(*steps: StepView) -> TrajectoryView:
    return TrajectoryView(task=Task(id="t", data={"word": "x"}), steps=steps, reward=1.0, end_reason=EndReason.DONE)


def step(observation: str = "", action: str = "", **more: Any) -> StepView:
    return StepView(observation=observation, action=action, **more)


def after(made: Marker, *steps: StepView) -> list[float]:
    return asyncio.run(made.after(view(*steps)))


def test_the_environments_weight_counts_unless_it_is_switched_off() -> None:
    marked = Observation(text="x", key=2.5)
    assert marker().before(marked) == 2.5
    assert marker().before(Observation(text="x")) == 0.0
    assert marker(environment=False).before(marked) == 0.0


def test_a_rule_on_the_observation_marks_before_the_action_and_never_lowers_a_weight() -> None:
    made = marker(rules=["observation:[1-4]", "observation:yes"])
    assert [made.before(Observation(text=text, key=key)) for text, key in (("3", 0.0), ("no", 0.0), ("3", 0.25), ("3", 2.5), ("no", 0.25))] == [
        1.0,
        0.0,
        1.0,
        2.5,
        0.25,
    ]
    assert made.before(Observation(messages=({"role": "user", "content": "yes"},))) == 1.0
    assert after(made, step("3")) == [0.0]


def test_rules_on_action_tool_and_reward_mark_after_the_rollout() -> None:
    made = marker(rules=["action:so$", "tool:search", "reward:positive"])
    steps = [step(action="and so"), step(action="so on"), step(action="search(1)"), step("and so"), step(reward=0.5), step(reward=-0.5)]
    assert after(made, *steps) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert made.before(Observation(text="and so")) == 0.0


@pytest.mark.parametrize(
    ("settings", "late"),
    [
        ({}, False),
        ({"rules": ["observation:x"], "environment": False, "min_advantage": 1.0}, False),
        ({"rules": ["observation:x", "tool:y"]}, True),
        ({"entropy_fraction": 0.1}, True),
        ({"function": "task:marks"}, True),
    ],
)
def test_it_is_known_whether_an_action_can_become_key_after_it_was_sampled(settings: dict[str, Any], late: bool) -> None:
    assert marks_afterwards(MarkSettings(**settings)) is late
    assert marker(**settings).marks_afterwards is late


def test_the_marking_function_sees_the_whole_rollout_and_gives_weights() -> None:
    seen: list[TrajectoryView] = []

    async def function(trajectory: TrajectoryView) -> object:
        seen.append(trajectory)
        return (True, False, 0.5)

    steps = (step("a", "b", key=1.0), step("c", "d"), step("e", "f", tokens=(1, 2), logprobs=(-1.0, -2.0)))
    assert after(marker(function, function="task:marks", rules=["action:d"]), *steps) == [1.0, 1.0, 0.5]
    assert seen == [view(*steps)]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "returned None (NoneType), not a list of weights"),
        ("11", "returned '11' (str), not a list of weights"),
        ({0: 1}, "not a list of weights"),
        ([1.0], "returned 1 weights for 2 steps"),
        ([1.0, -1.0], "returned -1.0 (float) for step 1"),
        ([1.0, float("nan")], "nan (float) for step 1"),
        (["a", 1.0], "'a' (str) for step 0"),
    ],
)
def test_a_marking_function_that_gives_no_weight_for_each_step_ends_the_rollout_as_mark_error(answer: object, told: str) -> None:
    async def function(trajectory: TrajectoryView) -> object:
        return answer

    with pytest.raises(RolloutEnded) as ended:
        after(marker(function, function="task:marks"), step(), step())
    assert ended.value.reason is EndReason.MARK_ERROR
    assert "marks.function 'task:marks'" in str(ended.value.error) and told in str(ended.value.error)


def test_a_marking_function_that_raises_ends_the_rollout_as_mark_error() -> None:
    def weights() -> Any:
        yield 1.0
        raise LookupError("no such door")

    async def raises(trajectory: TrajectoryView) -> object:
        raise LookupError("no such door")

    async def raises_late(trajectory: TrajectoryView) -> object:
        return weights()

    for function in (raises, raises_late):
        with pytest.raises(RolloutEnded) as ended:
            after(marker(function, function="task:marks"), step(), step())
        assert ended.value.reason is EndReason.MARK_ERROR
        assert "marks.function 'task:marks': LookupError: no such door (test_marking.py:" in str(ended.value.error)


def test_the_most_uncertain_steps_are_marked_by_their_mean_entropy_a_token() -> None:
    made = marker(entropy_fraction=0.25)
    steps = [step(entropies=(1.0, 1.0, 1.0)), step(entropies=(2.0,)), step(entropies=(0.5, 0.5)), step(entropies=(0.0,))]
    assert after(made, *steps) == [0.0, 1.0, 0.0, 0.0]
    assert after(made, step(entropies=(1.5,)), step(entropies=(0.1,))) == [0.0, 0.0], "1.5 is second of 6, a quarter of 6 is one step"
    assert after(made, step(entropies=(3.0,)), step(entropies=(1.6,))) == [1.0, 0.0]


@pytest.mark.parametrize("entropies", [None, (float("nan"),)])
def test_a_sampler_that_measures_no_entropies_is_named(entropies: Any) -> None:
    with pytest.raises(RolloutEnded) as ended:
        after(marker(entropy_fraction=0.5), step(entropies=entropies))
    assert ended.value.reason is EndReason.SAMPLER_ERROR and "entropies" in str(ended.value.error)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 0.5, 1.0, 2.0]) | st.floats(0, 3), min_size=1, max_size=9), max_size=30), st.floats(0.01, 0.9))
def test_no_more_than_the_share_of_recent_steps_has_as_much_entropy_as_a_marked_one(rollouts: list[list[float]], fraction: float) -> None:
    recent = RecentEntropies(fraction, num_recent=20)
    again = RecentEntropies(fraction, num_recent=20)
    seen: list[float] = []
    for entropies in rollouts:
        marks = recent.mark(entropies)
        assert marks == again.mark(entropies), "depends on the order only"
        seen = (seen + entropies)[-20:]
        for entropy, mark in zip(entropies, marks, strict=True):
            as_high = sum(other >= entropy for other in seen)
            assert (mark > 0) == (as_high <= fraction * len(seen))


def test_about_the_share_is_marked_and_it_follows_a_falling_entropy() -> None:
    source = random.Random(0)
    recent = RecentEntropies(0.2, num_recent=500)
    marked = sum(sum(mark > 0 for mark in recent.mark([source.random() * scale for _ in range(10)])) for scale in [1.0] * 100 + [0.1] * 200)
    assert 0.16 * 3000 < marked < 0.22 * 3000
