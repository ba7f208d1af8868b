"""The search: best splits known in closed form, and what must hold whatever the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.plan_profiles import plain_profile
from headrace.errors import ConfigError
from headrace.planner import search as search_module
from headrace.planner.distributions import Distribution
from headrace.planner.literature import pipeline_best_split, pipeline_rate
from headrace.planner.plan import Request
from headrace.planner.profile import Profile
from headrace.planner.search import FLAT, TIE, Candidate, Found, Search

LONG_TAIL = Distribution.lognormal(1000, 900).capped(8000)


def found(profile: Profile, num_gpus: int, *, max_staleness: int = 8, batch: int = 512, group_size: int = 8) -> Found:
    request = Request(num_gpus=num_gpus, max_staleness=max_staleness, batch_trajectories=(batch,), group_size=group_size)
    return Search(profile, request).run()


def best(profile: Profile, num_gpus: int, **how: int) -> Candidate:
    return found(profile, num_gpus, **how).candidates[0]


def test_pipeline_rl_case_study_splits_where_production_meets_consumption() -> None:
    """arXiv 2509.19128: N = 128, U(192) = 0.384, tau = 4.918 -> I = N / (1 + tau U) = 44.3. A flash is taken as a second here."""
    efficiency, train_cost = 0.384, 4.918
    floor = 192 / efficiency * 0.4
    profile = plain_profile(
        floor_seconds=floor, seconds_per_sequence=(192 / efficiency - floor) / 192, running=192, learn_seconds_per_token=train_cost, kind="estimated"
    )  # fmt: skip
    chosen = best(profile, 128, max_staleness=133, batch=128)
    assert chosen.setup.mode == "async" and chosen.tensor_parallel == 1
    assert chosen.setup.num_samplers in (44, 45)
    assert pipeline_best_split(128, efficiency, train_cost) == pytest.approx(44.3, abs=0.05)
    assert chosen.rate * 1000 == pytest.approx(pipeline_rate(128, 44, efficiency, train_cost), rel=0.01)


def test_two_equal_sides_share_the_devices_equally() -> None:
    # a sampler makes 128 / 0.02 = 6,400 tokens/s, and a learner takes as many; answers of one length leave no tail to wait for
    profile = plain_profile(floor_seconds=0.02, seconds_per_sequence=0.0, learn_seconds_per_token=1 / 6400, kind="estimated")
    plans = found(profile, 8, batch=1024, max_staleness=16).candidates
    overlapping = next(each for each in plans if each.setup.mode == "async")
    together = next(each for each in plans if each.setup.placement == "colocated")
    assert overlapping.split == "4:4" and overlapping.rate == pytest.approx(4 * 6.4, rel=0.01)
    assert together.rate == pytest.approx(overlapping.rate, rel=0.01)


def test_learner_that_exchanging_gradients_slows_down_leaves_devices_idle() -> None:
    profile = plain_profile(learn_seconds_per_token=1e-9, exchange_seconds=60.0)
    chosen = best(profile, 16)
    assert chosen.setup.num_learner_ranks == 1


def test_no_learner_rank_is_without_a_trajectory() -> None:
    plans = found(plain_profile(learn_seconds_per_token=1.0), 40, batch=16).candidates
    assert max(each.setup.num_learner_ranks for each in plans if each.setup.placement == "split") == 16


def test_asynchronous_loses_where_one_side_is_all_the_work() -> None:
    """Generation alone counts, and all devices of a colocated run do it; an asynchronous split gives one away."""
    profile = plain_profile(floor_seconds=0.0, seconds_per_sequence=1e-3, learn_seconds_per_token=1e-12)
    assert best(profile, 2, batch=512).setup.placement == "colocated"


def test_staleness_zero_leaves_synchronous_plans_only() -> None:
    assert {each.setup.mode for each in found(plain_profile(answers=LONG_TAIL), 8, max_staleness=0).candidates} == {"sync"}


def test_one_device_is_planned_colocated() -> None:
    (only,) = found(plain_profile(), 1).candidates
    assert only.setup.placement == "colocated" and only.num_devices == 1


def test_no_plan_where_the_learner_does_not_fit() -> None:
    # 16 bytes a parameter: 160 GB of states for 10 billion parameters, 88 GB usable on each of two
    profile = plain_profile(num_parameters=10**10, memory_bytes=10**11, kind="estimated")
    assert found(profile, 1).candidates == ()
    assert {each.setup.mode for each in found(profile, 2).candidates} == {"sync"}
    assert {each.setup.mode for each in found(profile, 3).candidates} == {"sync", "async"}


def test_batches_must_be_whole_groups() -> None:
    with pytest.raises(ConfigError, match=r"not a whole number of groups of 8\.[^-]*--batch 96"):
        found(plain_profile(), 4, batch=100)


def test_a_proposed_split_keeps_within_the_staleness_asked_for_and_loses_no_more_than_a_tie() -> None:
    profile = plain_profile(answers=LONG_TAIL)
    request = Request(num_gpus=16, max_staleness=6, batch_trajectories=(512,), group_size=8)
    search = Search(profile, request)
    for each in search.asynchronous(1, 512):
        settled = search.settled(each)
        assert 1 <= settled.setup.max_staleness <= 6 and settled.setup.slots_per_sampler <= each.setup.slots_per_sampler
        assert settled.rate >= (1 - 2.1 * TIE) * each.rate


def test_ladder_and_crossing_find_the_best_of_all_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = plain_profile(answers=LONG_TAIL, learn_seconds_per_token=3e-4)
    every = found(profile, 60)
    monkeypatch.setattr(search_module, "_ALL_SPLITS", 4)
    ladder = found(profile, 60)
    assert len(ladder.curve) < len(every.curve)
    assert ladder.candidates[0] == every.candidates[0] and ladder.flat == every.flat


def test_flat_region_ends_where_splits_lose_more_than_it_says() -> None:
    profile = plain_profile(answers=LONG_TAIL, learn_seconds_per_token=3e-4)
    result = found(profile, 40)
    assert result.flat is not None
    top = max(each.rate for each in result.curve)
    inside = [each.setup.num_samplers for each in result.curve if each.rate >= (1 - FLAT) * top]
    assert [each.setup.num_samplers for each in result.flat] == [min(inside), max(inside)]
    assert inside == list(range(min(inside), max(inside) + 1))


def test_slow_tools_are_answered_with_more_in_flight_not_with_more_samplers_than_needed() -> None:
    quick = best(plain_profile(steps=10.0), 16, batch=1024, max_staleness=16)
    slow = best(plain_profile(steps=10.0, waits=2.0), 16, batch=1024, max_staleness=16)
    assert slow.steady.in_flight > quick.steady.in_flight
    assert slow.rate <= quick.rate * (1 + TIE)


def test_several_batches_are_compared_by_trajectories_a_second() -> None:
    profile = plain_profile(overhead_seconds=30.0)
    request = Request(num_gpus=8, batch_trajectories=(64, 1024), group_size=8)
    assert Search(profile, request).run().candidates[0].setup.batch_trajectories == 1024


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    mean = draw(st.floats(50, 3000))
    spread = draw(st.floats(0, 1.5))
    steps = draw(st.sampled_from((1.0, 8.0)))
    return plain_profile(
        floor_seconds=draw(st.floats(1e-3, 0.05)),
        seconds_per_sequence=draw(st.floats(1e-6, 1e-3)),
        running=draw(st.sampled_from((16, 64, 256))),
        learn_seconds_per_token=draw(st.floats(1e-6, 1e-3)),
        overhead_seconds=draw(st.floats(0, 5)),
        exchange_seconds=draw(st.floats(0, 5)),
        answers=Distribution.lognormal(mean, spread * mean).capped(10 * mean),
        steps=steps,
        waits=draw(st.sampled_from((0.0, 0.5))),
    )  # fmt: skip


@settings(max_examples=6, deadline=None)
@given(profile=profiles(), few=st.integers(1, 12), more=st.integers(1, 12))
def test_more_devices_are_never_slower(profile: Profile, few: int, more: int) -> None:
    # whole engines and the tie that prefers less staleness leave a little
    assert best(profile, few + more, batch=256).rate >= (1 - 3 * TIE) * best(profile, few, batch=256).rate


@settings(max_examples=6, deadline=None)
@given(profile=profiles(), devices=st.integers(2, 16), tight=st.integers(0, 6), looser=st.integers(1, 12))
def test_looser_staleness_is_never_slower(profile: Profile, devices: int, tight: int, looser: int) -> None:
    loose = best(profile, devices, batch=256, max_staleness=tight + looser).rate
    assert loose >= (1 - 3 * TIE) * best(profile, devices, batch=256, max_staleness=tight).rate
