"""What one run will do, before it starts: simulated with its own settings, several times, as far apart as the profile is uncertain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from headrace.config import Settings
from headrace.config_loading import make_settings
from headrace.planner.estimate import Setup
from headrace.planner.forecast import from_the_start, uncertainty
from headrace.planner.inputs import apply_what_if
from headrace.planner.plan import Spread
from headrace.planner.profile import Profile
from headrace.planner.simulation import merged, settings_tree, simulated_tree
from headrace.planner.time_model import time_model
from headrace.report.summary import RunSummary
from headrace.runtime.simulated import simulate

_DRAWS = 9
_INPUTS = ("decode", "learn", "answers", "learning")
_SIMULATION_ERROR = 0.12
"""Relative, of forecasts for other setups than the one profiled, whose median error was 8 % (benchmarks/planner_here.py). For that one itself it
would be 5 % (planner_check.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast:
    """Of a whole run, from its first rollout to its last update."""

    num_updates: int
    finish_seconds: Spread
    staleness_mean: float | None
    """Of the trained tokens."""
    occupancy: float
    """Of all devices (DESIGN section 2), against the capacity that the profile states."""
    busy_fraction: float

    @property
    def step_seconds(self) -> float:
        """Mean, the filling of pool and slots included."""
        return self.finish_seconds.p50 / self.num_updates

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "step_seconds": self.step_seconds}


def simulated_settings(profile: Profile, values: Mapping[str, Mapping[str, Any]], overrides: Sequence[str] = ()) -> Settings:
    """Settings of a simulated run for those of a real one (section -> key -> value). Raises ConfigError for what a run would not take."""
    return make_settings(merged(simulated_tree(profile), settings_tree(values, profile)), overrides, file="forecast")


def forecast_run(profile: Profile, settings: Settings, *, draws: int = _DRAWS, cores: int | None = None) -> RunForecast:
    """Raises ConfigError for settings that the simulation does not know.

    `cores`: how many of this machine's the devices share, where they do (samplers first, then learner ranks, in turn). The interval carries
    what `headrace plan` states of a profile (forecast.py): another day, the scatter of the fits, the error of mean lengths; chance; and how far
    simulations are off.
    """
    summaries = []
    for index, factors in enumerate(_factors(profile, settings, draws)):
        seeded = settings.model_copy(update={"run": settings.run.model_copy(update={"seed": settings.run.seed + index})})
        summary, changed = RunSummary(), apply_what_if(from_the_start(profile), factors)
        simulate(seeded, time_model(changed, seeded, cores=cores), subscribers=[summary.add])
        summaries.append(summary.result())
    seconds = [each["wall_seconds"] * factor for each, factor in zip(summaries, _spread(_SIMULATION_ERROR, draws, stream=10), strict=True)]
    low, middle, high = (float(value) for value in np.quantile(seconds, (0.1, 0.5, 0.9)))
    ages = [each["staleness"]["mean"] for each in summaries if each["staleness"]["mean"] is not None]
    return RunForecast(
        num_updates=settings.run.num_updates,
        finish_seconds=Spread(p10=low, p50=middle, p90=high),
        staleness_mean=fmean(ages) if ages else None,
        occupancy=fmean(each["utilization"]["occupancy"] or 0.0 for each in summaries),
        busy_fraction=fmean(each["utilization"]["busy_fraction"] or 0.0 for each in summaries),
    )


def _factors(profile: Profile, settings: Settings, draws: int) -> list[dict[str, float]]:
    """Of the profile's inputs: each draw has one of as many equally likely parts of every input's distribution (Latin hypercube)."""
    if draws == 1:
        return [{}]
    setup = Setup(
        mode="sync" if settings.run.mode == "sync" else "async",
        placement="colocated" if settings.run.placement == "colocated" else "split",
        num_samplers=settings.run.num_samplers,
        num_learner_ranks=settings.run.num_learner_ranks,
        slots_per_sampler=settings.sampler.max_running,
        batch_trajectories=settings.batch_trajectories,
    )
    running = max(point.running for point in profile.decode.points)
    errors = uncertainty(profile, setup, min(running, settings.sampler.max_running))
    columns = {name: _spread(getattr(errors, name), draws, stream=stream) for stream, name in enumerate(_INPUTS, 11)}
    return [{name: column[index] for name, column in columns.items()} for index in range(draws)]


def _spread(deviation: float, draws: int, *, stream: int) -> list[float]:
    """Factors with median 1, one from each of as many equally likely parts, in an order of their own; one draw is the median."""
    levels = [NormalDist().inv_cdf((index + 0.5) / draws) for index in range(draws)]
    return [math.exp(deviation * float(level)) for level in np.random.default_rng(stream).permutation(levels)]
