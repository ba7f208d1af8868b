"""A run foretold: the same settings simulated, as far apart as the profile is uncertain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.plan_profiles import plain_profile
from headrace.errors import ConfigError
from headrace.planner.distributions import Distribution
from headrace.planner.run_forecast import forecast_run, simulated_settings
from headrace.planner.time_model import time_model
from headrace.report.summary import summarize
from headrace.runtime.simulated import simulate

PROFILE = plain_profile(answers=Distribution.lognormal(300.0, 250.0))
SETUP = {"run": {"mode": "async", "num_updates": 12}, "pool": {"groups_per_batch": 4, "max_staleness": 2}, "sampler": {"max_running": 32}}


def test_one_draw_is_the_simulated_run_itself() -> None:
    settings = simulated_settings(PROFILE, SETUP)
    lines: list[dict[str, object]] = []
    simulate(settings, time_model(PROFILE, settings), subscribers=[lines.append])
    summary, forecast = summarize(lines), forecast_run(PROFILE, settings, draws=1)
    assert forecast.finish_seconds.p50 == summary["wall_seconds"]
    assert forecast.staleness_mean == summary["staleness"]["mean"]
    assert forecast.step_seconds == pytest.approx(summary["wall_seconds"] / 12)


def test_an_uncertain_profile_gives_a_wide_interval() -> None:
    settings = simulated_settings(PROFILE, SETUP)
    unsure = replace(PROFILE, decode=replace(PROFILE.decode, fit=replace(PROFILE.decode.fit, relative_error=0.5)))
    widths = []
    for profile in (PROFILE, unsure):
        finish = forecast_run(profile, settings).finish_seconds
        assert finish.p10 < finish.p50 < finish.p90
        widths.append(finish.p90 / finish.p10)
    assert widths[1] > 1.2 * widths[0]


def test_settings_of_a_real_run_that_take_no_time_are_left_out() -> None:
    values = {**SETUP, "task": {"source": "task:tasks"}, "learner": {"learning_rate": 1e-3, "num_minibatches": 2}}
    settings = simulated_settings(PROFILE, values, ["pool.max_staleness=5"])
    assert (settings.task.source, settings.learner.num_minibatches, settings.pool.max_staleness) == ("simulated:tasks", 2, 5)


def test_a_setup_that_no_run_would_take_is_refused() -> None:
    with pytest.raises(ConfigError):
        simulated_settings(PROFILE, SETUP, ["run.placement=colocated"])
