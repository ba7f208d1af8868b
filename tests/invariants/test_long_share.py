"""Long rollouts leave slots to short work, and nobody starves: over random arrivals and lengths (DESIGN section 7)."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampler.scheduling import Candidate, LongRule, share_slots
from headrace.types import RolloutKey

LIMIT = 20
"""Tokens beyond which a row is long."""


@dataclass(eq=False)
class Work:
    order: int
    num_tokens: int
    arrives: int
    drawn: int = 0
    ended: int = -1

    @property
    def is_long(self) -> bool:
        return self.drawn > LIMIT


@st.composite
def workloads(draw: st.DrawFn) -> list[Work]:
    sizes = draw(st.lists(st.tuples(st.one_of(st.integers(1, 15), st.integers(21, 120)), st.integers(0, 12)), min_size=1, max_size=40))
    arrives, result = 0, []
    for order, (num_tokens, pause) in enumerate(sizes):
        arrives += pause
        result.append(Work(order, num_tokens, arrives))
    return result


def serve(work: list[Work], *, num_slots: int, most_long: int) -> None:
    """One token a step for each row that runs. Checks every step."""
    running: list[Work] = []
    waiting: list[Work] = []
    step = 0
    while any(each.ended < 0 for each in work):
        waiting.extend(each for each in work if each.arrives == step)
        shares = share_slots(
            [Candidate(each.order, each.is_long) for each in running],
            [Candidate(each.order, each.is_long) for each in waiting],
            num_slots=num_slots,
            most_long=most_long,
        )
        parked = [running[index] for index in shares.park]
        admitted = [waiting[index] for index in shares.admit]
        running = [each for each in running if each not in parked] + admitted
        waiting = sorted([each for each in waiting if each not in admitted] + parked, key=lambda each: each.order)
        assert len(running) == min(num_slots, len(running) + len(waiting)), "a slot is free although somebody waits"
        if any(not each.is_long for each in waiting):
            assert sum(each.is_long for each in running) <= most_long, "long rows hold more than their share while short work waits"
        for each in running:
            each.drawn += 1
            if each.drawn == each.num_tokens:
                each.ended = step
        running = [each for each in running if each.ended < 0]
        step += 1


@given(work=workloads(), num_slots=st.integers(1, 8), share=st.sampled_from([0.1, 0.5, 0.9]))
@settings(max_examples=150, deadline=None)
def test_long_rows_keep_to_their_share_the_batch_is_full_and_everybody_finishes_in_bounded_time(work: list[Work], num_slots: int, share: float) -> None:
    rule = LongRule(max_running=num_slots, long_share=share, long_factor=4.0)
    assert 1 <= rule.most_long < max(2, num_slots)
    serve(work, num_slots=num_slots, most_long=rule.most_long)
    for each in work:
        before = sum(other.num_tokens for other in work if other.order <= each.order)
        if each.num_tokens > LIMIT:  # it may be passed over by short work that came later, while others of its kind run
            before += sum(min(other.num_tokens, LIMIT + 1) for other in work if other.order > each.order)
        assert each.ended - each.arrives < before


def test_without_short_work_long_rows_fill_the_batch() -> None:
    assert share_slots([], [Candidate(order, True) for order in range(6)], num_slots=4, most_long=1).admit == [0, 1, 2, 3]


def test_the_long_rows_that_came_last_are_parked_and_only_as_many_as_short_work_needs() -> None:
    running = [Candidate(5, True), Candidate(1, True), Candidate(3, True), Candidate(4, False)]
    assert share_slots(running, [Candidate(6, False)], num_slots=4, most_long=1).park == [0]
    assert share_slots(running, [Candidate(6, False), Candidate(7, False), Candidate(8, False)], num_slots=4, most_long=1).park == [0, 2]
    assert share_slots(running, [Candidate(6, True)], num_slots=4, most_long=1) == ([], [])


def test_nothing_is_long_before_enough_rollouts_have_finished_and_the_median_follows_the_newest() -> None:
    rule = LongRule(max_running=8, long_share=0.5, long_factor=4.0)
    for number in range(15):
        rule.acted(RolloutKey(number, 0, 0), 10)
        rule.released(RolloutKey(number, 0, 0))
        assert rule.limit_tokens == float("inf")
    rule.acted(RolloutKey(15, 0, 0), 10)
    rule.released(RolloutKey(15, 0, 0))
    assert rule.limit_tokens == 40
    for number in range(512):
        rule.acted(RolloutKey(100 + number, 0, 0), 30)
        rule.released(RolloutKey(100 + number, 0, 0))
    assert rule.limit_tokens == 120


def test_a_step_that_shows_only_its_observation_adds_to_the_length_of_its_rollout() -> None:
    rule, key = LongRule(max_running=8, long_share=0.5, long_factor=4.0), RolloutKey(1, 0, 0)
    rule.acted(key, 30)
    assert rule.tokens_before(key, 31) == 0
    assert rule.tokens_before(key, 5) == 30
    rule.released(key)
    assert rule.tokens_before(key, 5) == 0
