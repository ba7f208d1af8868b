"""Rollouts and times that a profile gives the simulation."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from fakes.plan_profiles import plain_profile
from headrace.config import Settings
from headrace.planner.distributions import Distribution
from headrace.planner.profile import Group, Observed, Profile
from headrace.planner.simulation import simulated_tree
from headrace.planner.time_model import rollout_planner, shared_part, time_model
from headrace.runtime.time_model import PlannedRollout
from headrace.types import RolloutKey, RolloutRequest, SamplingParameters, Task

TAILED = Distribution.lognormal(1000.0, 900.0)


def request(group_id: int = 0, member: int = 0, *, attempt: int = 0, seed: int = 0) -> RolloutRequest:
    return RolloutRequest(key=RolloutKey(group_id, member, attempt), task=Task(id="t", data={}), seed=seed, sampling=SamplingParameters())


def draw(profile: Profile, *, groups: int = 500, version: int = 0) -> list[list[PlannedRollout]]:
    plan = rollout_planner(profile)
    return [[plan(request(group_id, member), version) for member in range(profile.group.size)] for group_id in range(groups)]


def answer_tokens(rollout: PlannedRollout) -> int:
    return sum(step.action_tokens for step in rollout.steps)


def agent_profile() -> Profile:
    profile = plain_profile(answers=Distribution.lognormal(400.0, 300.0), group_size=4)
    lengths = replace(
        profile.distributions, steps=Distribution.lognormal(8.0, 5.0), prompt_tokens=Distribution.lognormal(240.0, 150.0),
        tool_wait_seconds=Distribution.lognormal(2.0, 3.0),
    )  # fmt: skip
    return profile.with_distributions(lengths)


def test_means_are_those_of_the_profile() -> None:
    rollouts = [rollout for group in draw(agent_profile(), groups=1000) for rollout in group]
    steps = [step for rollout in rollouts for step in rollout.steps]
    assert statistics.fmean(map(answer_tokens, rollouts)) == pytest.approx(400.0, rel=0.05)
    assert statistics.fmean(len(rollout.steps) for rollout in rollouts) == pytest.approx(8.0, rel=0.05)
    assert statistics.fmean(sum(step.observation_tokens for step in rollout.steps) for rollout in rollouts) == pytest.approx(240.0, rel=0.05)
    assert statistics.fmean(step.wait_seconds for step in steps) == pytest.approx(2.0, rel=0.05)
    assert min(step.action_tokens for step in steps) >= 1


def test_long_rollouts_have_many_steps_and_one_step_prompts_are_independent_of_answers() -> None:
    rollouts = [rollout for group in draw(agent_profile()) for rollout in group]
    assert statistics.correlation([answer_tokens(each) for each in rollouts], [len(each.steps) for each in rollouts]) > 0.95
    one_step = plain_profile(answers=TAILED)
    one_step = one_step.with_distributions(replace(one_step.distributions, prompt_tokens=Distribution.lognormal(200.0, 100.0)))
    rollouts = [rollout for group in draw(one_step) for rollout in group]
    assert {len(each.steps) for each in rollouts} == {1}
    assert abs(statistics.correlation([answer_tokens(each) for each in rollouts], [each.steps[0].observation_tokens for each in rollouts])) < 0.06


@pytest.mark.parametrize("tailness", [1.0, 1.4, 2.0, 3.0, math.inf])
def test_groups_are_as_uneven_as_the_profile_says(tailness: float) -> None:
    most = TAILED.tailness(8)
    profile = replace(plain_profile(answers=TAILED), group=Group(size=8, tailness=min(tailness, most)))
    groups = [[answer_tokens(rollout) for rollout in group] for group in draw(profile, groups=1500)]
    found = statistics.fmean(max(group) for group in groups) / statistics.fmean(length for group in groups for length in group)
    assert 2.0 < most < 3.0
    assert found == pytest.approx(min(tailness, most), rel=0.06)


def test_shared_part_falls_from_all_to_nothing_as_groups_get_uneven() -> None:
    parts = [shared_part(TAILED, 8, tailness) for tailness in (1.001, 1.3, 1.8, 2.3, 9.0)]
    assert parts == sorted(parts, reverse=True)
    assert parts[0] > 0.99 and parts[-1] == 0.0


def test_a_rollout_depends_on_its_seed_and_key_alone() -> None:
    plan, again = rollout_planner(agent_profile()), rollout_planner(agent_profile())
    requests = [request(group_id, member, attempt=attempt, seed=seed) for group_id in (0, 7) for member in (0, 3) for attempt in (0, 1) for seed in (0, 1)]
    first = [plan(each, 0) for each in requests]
    assert first == list(reversed([again(each, 0) for each in reversed(requests)]))
    assert len(set(first)) == len(first)


def test_lengths_drift_with_the_version_a_rollout_starts_under() -> None:
    profile = plain_profile(answers=replace(TAILED, drift_per_update=10.0))
    early, late = (statistics.fmean(answer_tokens(each) for group in draw(profile, groups=100, version=version) for each in group) for version in (0, 100))
    assert late == pytest.approx(2.0 * early, rel=0.01)


def test_failures_come_at_their_rate() -> None:
    plan = rollout_planner(agent_profile(), failures=0.25)
    assert statistics.fmean(plan(request(index), 0).fails for index in range(2000)) == pytest.approx(0.25, abs=0.03)


def test_times_are_those_of_the_fits() -> None:
    profile = plain_profile(learn_seconds_per_token=1e-4, overhead_seconds=0.5)
    profile = replace(profile, learn=replace(profile.learn, tokens_per_trajectory=500.0, handover_seconds=0.25, busy_fraction=0.75))
    update = replace(profile.weight_update, publish_seconds=0.5, transfer_seconds=2.0, pause_seconds=0.75, bytes=7)
    profile = replace(profile, weight_update=update, decode=replace(profile.decode, gap_seconds=0.002, gap_seconds_per_sequence=1e-5))
    model = time_model(profile, Settings.model_validate(simulated_tree(profile)), learn_scale=4.0)
    assert model.step_seconds(50) == pytest.approx(0.02 + 50e-4)
    assert model.gap_seconds(50) == pytest.approx(0.0025)
    # four times the trajectories that are simulated, half of whose 1,000 tokens the learner gets, on two ranks
    assert model.learn_seconds(8000.0, 2) == pytest.approx(0.5 + 8000 * 4 * 0.5 * 1e-4 / 2)
    assert (model.transfer_seconds, model.pause_seconds) == (1.25, 0.75)
    assert (model.publish_seconds, model.handover_seconds, model.learn_busy_fraction, model.update_bytes) == (0.5, 0.25, 0.75, 7)


def test_a_measured_drift_dies_away_beyond_the_run_that_was_measured() -> None:
    observed = Observed(
        mode="async", placement="split", num_sampler_devices=1, num_learner_devices=1, slots_per_sampler=8, batch_trajectories=8, max_staleness=2,
        num_updates=10, step_seconds=1.0, trajectories_per_second=1.0, mean_in_flight=1.0, rollout_seconds=1.0, staleness_mean=0.0,
        learner_busy_fraction=0.5, sampler_busy_fraction=0.5, mean_running=4.0,
    )  # fmt: skip
    profile = plain_profile(answers=replace(Distribution.constant(100.0), drift_per_update=10.0))
    for_ever, fading = rollout_planner(profile), rollout_planner(replace(profile, observed=observed))
    assert answer_tokens(for_ever(request(), 100)) == 1100
    assert answer_tokens(fading(request(), 5)) == pytest.approx(100 + 10 * 20 * (1 - math.exp(-5 / 20)), abs=1)
    assert answer_tokens(fading(request(), 1000)) == 300
