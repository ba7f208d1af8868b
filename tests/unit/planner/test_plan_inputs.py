"""What-if: each input changes what it names, and wrong ones are answered with right ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.plan_profiles import plain_profile
from headrace.errors import ConfigError
from headrace.planner.distributions import Distribution
from headrace.planner.estimate import Setup, learn_seconds, steady_state
from headrace.planner.inputs import INPUTS, apply_what_if, parse_what_if
from headrace.planner.rewards import Rewards

SETUP = Setup(mode="async", placement="split", num_samplers=4, num_learner_ranks=4, slots_per_sampler=64, batch_trajectories=512, max_staleness=16)


def test_several_changes_in_one_text_or_in_many() -> None:
    assert parse_what_if(["answers=1.5x, tools=2x", "learn=0.8x", "tools=2x"]) == {"answers": 1.5, "tools": 4.0, "learn": 0.8}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("answer=2x", "Did you mean 'answers=1.5x'"),
        ("answers", "not of the form"),
        ("answers=2", "no factor"),
        ("answers=-1x", "no factor"),
        ("answers=nanx", "no factor"),
        ("answers=0x", "no factor"),
        ("=2x", "no input"),
    ],
)
def test_what_is_no_change_is_refused_with_what_is(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_what_if([text])


def test_a_factor_of_one_changes_no_prediction() -> None:
    profile = plain_profile(answers=Distribution.lognormal(1000, 800), steps=4.0, waits=1.0)
    assert steady_state(apply_what_if(profile, dict.fromkeys(INPUTS, 1.0)), SETUP) == steady_state(profile, SETUP)


def test_each_input_moves_its_side() -> None:
    profile = plain_profile(steps=4.0, waits=10.0, floor_seconds=0.01)
    held = replace(SETUP, max_in_flight=64)
    before = steady_state(profile, held)
    for name, generate, learn in (("decode", True, False), ("learn", False, True), ("answers", True, True), ("tools", True, False)):
        after = steady_state(apply_what_if(profile, {name: 2.0}), held)
        assert (after.generate_seconds > 1.05 * before.generate_seconds, after.learn_seconds > 1.05 * before.learn_seconds) == (generate, learn), name


def test_twice_the_decode_seconds_make_half_the_rate_where_nothing_else_counts() -> None:
    profile = plain_profile()
    assert steady_state(apply_what_if(profile, {"decode": 2.0}), SETUP).production_rate == pytest.approx(
        steady_state(profile, SETUP).production_rate / 2, rel=0.01
    )  # fmt: skip


def test_longer_answers_are_more_tokens_to_learn() -> None:
    profile = plain_profile(answers=Distribution.constant(500.0))
    assert learn_seconds(apply_what_if(profile, {"answers": 3.0}), 1, 10) == pytest.approx(3 * learn_seconds(profile, 1, 10))


def test_learning_changes_how_fast_rewards_rise_and_nothing_else() -> None:
    profile = replace(plain_profile(), rewards=Rewards(log_odds=0.0, per_length=0.0, spread=1.0, log_odds_per_update=0.1))
    changed = apply_what_if(profile, {"learning": 2.0})
    assert changed.rewards is not None and changed.rewards.log_odds_per_update == pytest.approx(0.2)
    assert replace(changed, rewards=profile.rewards) == profile
    assert apply_what_if(plain_profile(), {"learning": 2.0}) == plain_profile()
