"""What is refused before it is made, on numbers alone."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.learner.guard import LEAST, MAX_KL, WINDOW, Guard

FACTOR = 300.0


def guard(norms: list[float] | None = None, *, kl: float = 0.0, factor: float = FACTOR) -> Guard:
    made = Guard(explosion_factor=factor, max_gradient_norm=1.0)
    for norm in norms or []:
        assert made.refusal(norm, kl) is None
    return made


@pytest.mark.parametrize("factor", [0.0, FACTOR])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_what_is_not_finite_is_always_refused(norm: float, factor: float) -> None:
    assert "not finite" in (guard(factor=factor).refusal(norm, 0.0) or "")


def test_a_norm_is_refused_over_the_factor_times_the_median_and_not_under_it() -> None:
    usual = [0.5] * LEAST
    assert guard(usual).refusal(0.5 * FACTOR * 0.99, 0.0) is None
    reason = guard(usual).refusal(0.5 * FACTOR * 1.01, 0.0)
    assert reason is not None and "explodes (norm 152, 303 times the median of the last 16)" in reason


@given(st.lists(st.floats(0.0, 1.0), max_size=3 * WINDOW))
def test_a_gradient_that_needs_no_scaling_down_is_never_refused(norms: list[float]) -> None:
    guard(norms)


def test_nothing_explodes_before_it_is_known_what_is_usual() -> None:
    assert guard([0.001] * (LEAST - 1)).refusal(1e9, 1e3) is None


def test_a_run_whose_norms_vary_much_has_a_wider_bound() -> None:
    wild = [10.0 ** (index % 5 - 2) for index in range(WINDOW)]  # 0.01 to 100, median 1
    assert guard(wild).refusal(1000.0, 0.0) is None
    assert guard([1.0] * WINDOW).refusal(1000.0, 0.0) is not None


def test_norms_that_have_risen_for_good_are_taken_again_after_half_a_window() -> None:
    made = guard([1.0] * WINDOW)
    refused = [made.refusal(1e6, 0.0) is not None for _ in range(WINDOW)]
    assert refused[:10] == [True] * 10 and not refused[WINDOW // 2 + 1]


def test_a_batch_is_refused_that_the_policy_has_left_behind() -> None:
    assert guard([0.5] * LEAST, kl=0.01).refusal(0.5, 0.99 * MAX_KL) is None
    assert "moved away" in (guard([0.5] * LEAST, kl=0.01).refusal(0.5, 1.01 * MAX_KL) or "")
    assert guard([0.5] * LEAST, kl=0.5).refusal(0.5, 4.0) is None, "ten times the usual 0.5"
    assert guard([0.5] * LEAST, kl=0.5).refusal(0.5, math.nan) is not None


def test_a_factor_of_0_leaves_only_what_is_not_finite() -> None:
    made = guard([0.5] * WINDOW, factor=0.0)
    assert not made.on and made.refusal(1e12, 1e3) is None


@given(st.lists(st.floats(1e-6, 1e6), max_size=2 * WINDOW), st.lists(st.floats(1e-6, 1e6), max_size=WINDOW))
def test_a_guard_that_was_kept_in_between_refuses_what_one_that_never_stopped_refuses(before: list[float], after: list[float]) -> None:
    never_stopped, stopped = (Guard(explosion_factor=FACTOR, max_gradient_norm=1.0) for _ in range(2))
    for norm in before:
        assert never_stopped.refusal(norm, norm * 1e-3) == stopped.refusal(norm, norm * 1e-3)
    again = Guard(explosion_factor=FACTOR, max_gradient_norm=1.0)
    again.restore(json.loads(json.dumps(stopped.state())))
    assert [again.refusal(norm, norm) for norm in after] == [never_stopped.refusal(norm, norm) for norm in after]


def test_a_checkpoint_that_kept_nothing_begins_with_an_empty_window() -> None:
    made = guard([0.5] * LEAST)
    made.restore({})
    assert made.refusal(0.5 * FACTOR * 10, 0.0) is None
