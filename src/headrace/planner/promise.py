"""What a run was promised: the figures of a plan, or of a simulation with its own settings, as its first event carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config_loading import ResolvedSettings
from headrace.planner.plan import load_proposal
from headrace.planner.profile import Profile
from headrace.planner.run_forecast import forecast_run, simulated_settings


def promise_of_plan(planned: tuple[str, Sequence[str]], rank: int | None, resolved: ResolvedSettings) -> dict[str, Any] | None:
    """Of a plan.json whose settings the run keeps; None for a file that only holds settings, or where some were changed.

    `planned`: (file, key=value settings) as load_settings got them.
    """
    file, settings = planned
    path = Path(file)
    if path.suffix == ".toml" or any(resolved.origins.get(setting.partition("=")[0]) != file for setting in settings):
        return None
    plan = load_proposal(path).plan(rank or 1, file=str(path))
    updates = resolved.settings.run.num_updates
    finish = {name: getattr(plan.finish_seconds, name) * updates / plan.num_updates for name in ("p10", "p50", "p90")}
    return {
        "by": f"{path.name}, rank {plan.rank}",
        "finish_seconds": finish,
        "step_seconds": plan.step_seconds,
        "staleness_mean": plan.staleness.mean,
        "occupancy": plan.occupancy,
        "busy_fraction": plan.busy_fraction,
    }


def promise_of_profile(profile: Profile, settings: Mapping[str, Mapping[str, Any]], *, by: str, draws: int = 5, cores: int | None = None) -> dict[str, Any]:
    """Of a run with these settings, simulated. Raises ConfigError for settings that the simulation does not know."""
    forecast = forecast_run(profile, simulated_settings(profile, settings), draws=draws, cores=cores)
    return {"by": by, **{key: value for key, value in forecast.as_json().items() if key != "num_updates"}}
