"""Runs that are only simulated: of a plan, or of a profile and settings; and what their steady state was.

simulate_plan   checks a plan for the search: at a part of its size where it would be too long
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.config import Settings
from headrace.planner.plan import Plan, StalenessSpread, Verification, overlay_settings
from headrace.planner.profile import Profile
from headrace.planner.proposal import Simulated
from headrace.planner.time_model import time_model
from headrace.report.utilization import Windows, utilization
from headrace.runtime.simulated import simulate

_LONG_SECONDS = 1e6
"""Limits of a simulated run: what takes long is its result, not its failure."""
_MOST_EMPTY_BATCHES = 1000
_LEAST_UPDATES = 24
_MOST_UPDATES = 64
_WARM_UP = 0.25
"""Share of the updates left out: pool and slots fill."""
_SETUP: Mapping[str, Sequence[str]] = {
    "run": ("mode", "placement", "seed", "num_updates", "num_samplers", "num_learner_ranks", "max_failed_rollouts_in_a_row"),
    "rollout": ("group_size", "max_attempts"),
    "sampler": ("max_running", "max_in_flight", "gather_seconds", "queue_share", "update_mode", "apply"),
    "pool": (
        "groups_per_batch",
        "max_staleness",
        "selection",
        "quorum",
        "on_expiry",
        "verify",
        "verify_after",
        "verify_rounds",
        "pace_key_steps",
        "max_key_staleness",
        "no_signal",
    ),
    "learner": ("num_minibatches", "num_epochs", "micro_batch_tokens"),
}
"""Settings that change how long what takes, and who waits for whom; those that the simulation refuses too."""

Line = Mapping[str, Any]


def simulated_tree(profile: Profile) -> dict[str, dict[str, Any]]:
    """Settings (section -> key -> value) of any simulated run of this profile, as in a recipe file."""
    lengths = profile.distributions
    total = math.ceil(1.1 * (lengths.prompt_tokens.most + lengths.answer_tokens.most)) + 2
    names = ("batch_seconds", "report_seconds", "learn_seconds", "apply_seconds")
    return {
        "run": {"name": "simulated", "record_trajectories": "none", "max_empty_batches": _MOST_EMPTY_BATCHES},
        "model": {"path": "simulated"},
        "task": {"source": "simulated:tasks", "reward": "simulated:reward"},
        "rollout": {
            "group_size": profile.group.size,
            "max_steps": max(1, math.ceil(1.1 * lengths.steps.most)),
            "max_tokens": total,
            "max_action_tokens": total - 1,
        },
        # where rewards are not known no group is left out for them
        "pool": {"no_signal": "train" if profile.rewards is None else profile.rewards.no_signal},
        "learner": {"micro_batch_tokens": max(16, profile.learn.micro_batch_tokens)},
        "limits": dict.fromkeys(names, _LONG_SECONDS),
    }


def observed_tree(profile: Profile) -> dict[str, dict[str, Any]]:
    """The setup of the run that was measured, where it was one."""
    seen = profile.observed
    if seen is None:
        return {}
    limits = {"max_in_flight": seen.max_in_flight, "gather_seconds": seen.gather_seconds, "queue_share": seen.queue_share}
    ranks = seen.num_sampler_devices if seen.placement == "colocated" else seen.num_learner_devices
    return {
        "run": {
            "mode": seen.mode,
            "placement": seen.placement,
            "num_updates": seen.num_updates,
            "num_samplers": max(1, seen.num_sampler_devices),
            "num_learner_ranks": max(1, ranks),
        },
        "sampler": {"max_running": seen.slots_per_sampler, **{key: value for key, value in limits.items() if value is not None}},
        "pool": {
            "groups_per_batch": max(1, round(seen.batch_trajectories / profile.group.size)),
            "max_staleness": seen.max_staleness,
            "selection": seen.selection,
        },
    }


def settings_tree(values: Mapping[str, Mapping[str, Any]], profile: Profile) -> dict[str, dict[str, Any]]:
    """The setup of a run with these settings (section -> key -> value, as in config.toml): what the simulation has a use for."""
    tree = {section: {key: values[section][key] for key in keys if key in values[section]} for section, keys in _SETUP.items() if section in values}
    if profile.rewards is None:
        tree.get("pool", {}).pop("no_signal", None)
    return tree


def plan_tree(plan: Plan, *, num_updates: int) -> dict[str, dict[str, Any]]:
    """The setup that a plan proposes."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in overlay_settings(plan, num_updates=num_updates).items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def merged(*trees: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Later ones win."""
    result: dict[str, dict[str, Any]] = {}
    for tree in trees:
        for section, values in tree.items():
            result[section] = {**result.get(section, {}), **values}
    return result


# checking plans ---------------------------------------------------------------------------------------------------------


def simulate_plan(profile: Profile, plan: Plan, max_rollouts: int) -> Simulated | None:
    """How a plan goes with at most so many rollouts: as proposal.Simulate asks. None where not even one sampler could be simulated.

    A plan that is too large is simulated at a part of its samplers and batch, with the learner's time of the whole batch.
    """
    affordable = max_rollouts / _LEAST_UPDATES / _in_a_run(plan)
    parts = math.ceil(plan.batch_trajectories / affordable) if affordable < plan.batch_trajectories else 1
    samplers = max(1, round(plan.num_samplers / parts))
    scale = samplers / plan.num_samplers
    groups = max(1, round(plan.batch_trajectories * scale / plan.group_size))
    num_updates = int(min(_MOST_UPDATES, max_rollouts / _in_a_run(plan) / (groups * plan.group_size)))
    if num_updates < _LEAST_UPDATES // 2:
        return None
    few = {"run": {"num_samplers": 1, "num_learner_ranks": 1}}  # a plan's may be more than this machine's runtime starts
    settings = Settings.model_validate(merged(simulated_tree(profile), plan_tree(plan, num_updates=num_updates), few))
    run = settings.run.model_copy(update={"num_samplers": samplers, "num_learner_ranks": plan.num_learner_devices})
    pool = settings.pool.model_copy(update={"groups_per_batch": groups})
    settings = settings.model_copy(update={"run": run, "pool": pool})
    learn_scale = plan.batch_trajectories / settings.batch_trajectories
    meter = SteadyMeter(num_updates=num_updates)
    simulate(settings, time_model(profile, settings, learn_scale=learn_scale), subscribers=[meter.add])
    return meter.result(plan, scale=min(1.0, scale), num_rollouts=num_updates * settings.batch_trajectories)


def _in_a_run(plan: Plan) -> float:
    """Rollouts begun for each one that is trained in a run of _LEAST_UPDATES: those in flight at its end are begun too."""
    return 1.0 + (plan.max_staleness + 1) / _LEAST_UPDATES


@dataclass(slots=True)
class SteadyMeter:
    """Fed with the events of a run, says how its steady state was."""

    num_updates: int
    _lines: list[Line] = field(default_factory=list)
    _updates: list[Line] = field(default_factory=list)

    def add(self, line: Line) -> None:
        if line["event"] in _OF_DEVICES:
            self._lines.append(line)
        if line["event"] == "updated":
            self._updates.append(line)

    @property
    def window(self) -> tuple[float, float]:
        first = max(1, round(_WARM_UP * len(self._updates)))
        return _finished(self._updates[first - 1]), _finished(self._updates[self._last])

    @property
    def kept(self) -> Sequence[Line]:
        """Updates in the window."""
        return self._updates[max(1, round(_WARM_UP * len(self._updates))) : self._last + 1]

    @property
    def _last(self) -> int:
        """The last but one, so that every sampler has reported past it."""
        return max(1, len(self._updates) - 2)

    @property
    def step_seconds(self) -> float:
        start, end = self.window
        return max(end - start, 1e-12) / len(self.kept)

    @property
    def tokens_per_second(self) -> float:
        """Sampled."""
        start, end = self.window
        window = Windows((self.window,), cut_out=True)
        active = [line for line in self._lines if line["event"] == "worker_active"]
        sampled = sum(line["activity"]["sampled_tokens"] * window.share(line["time"], line["activity"]["seconds"]) for line in active)
        return float(sampled / max(end - start, 1e-12))

    def staleness(self) -> StalenessSpread:
        histogram: dict[int, int] = {}
        for line in self.kept:
            for age, count in line["statistics"]["staleness_histogram"].items():
                histogram[int(age)] = histogram.get(int(age), 0) + count
        total = sum(histogram.values())
        if not total:
            return StalenessSpread(mean=0.0, p95=0.0, max=0.0)
        below, p95 = 0, 0
        for age, count in sorted(histogram.items()):
            below, p95 = below + count, age
            if below >= 0.95 * total:
                break
        mean = sum(age * count for age, count in histogram.items()) / total
        return StalenessSpread(mean=mean, p95=float(p95), max=float(max(histogram)))

    def utilization(self) -> dict[str, Any]:
        return utilization(self._lines, Windows((self.window,), cut_out=True))

    def result(self, plan: Plan, *, scale: float, num_rollouts: int) -> Simulated:
        used = _weighted(plan, self.utilization())
        return Simulated(
            verification=Verification(
                num_rollouts=num_rollouts,
                num_updates=self.num_updates,
                scale=scale,
                step_seconds=self.step_seconds,
                closed_form_step_seconds=plan.step_seconds,
            ),
            staleness=self.staleness(),
            occupancy=used("occupancy"),
            busy_fraction=used("busy_fraction"),
        )


_OF_DEVICES = frozenset({"run_started", "worker_active", "updated", "selection_taken", "weights_acknowledged", "weights_published", "checkpoint_saved"})


def _finished(line: Line) -> float:
    return float(line["time"] - line.get("finished_seconds_ago", 0.0))


def _weighted(plan: Plan, used: Mapping[str, Any]) -> Callable[[str], float]:
    """Mean over the plan's devices, of which the simulation may have had other numbers on the two sides."""

    def mean(key: str) -> float:
        by_role: dict[str, list[float]] = {}
        for device in used["devices"]:
            by_role.setdefault(device["role"], []).append(device[key])
        means = {role: sum(values) / len(values) for role, values in by_role.items()}
        if "colocated" in means:
            return means["colocated"]
        weights = {"sampler": plan.num_sampler_devices, "learner": plan.num_learner_devices}
        return sum(means[role] * weight for role, weight in weights.items()) / sum(weights.values())

    return mean
