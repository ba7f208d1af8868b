"""`headrace simulate`: plays a plan, or a profile with settings, and writes a run directory."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from headrace.cli.output import Output
from headrace.cli.run import choose_run_directory, sigterm_as_ctrl_c
from headrace.config import Settings
from headrace.config_loading import make_settings
from headrace.errors import ConfigError, Problem
from headrace.event_log import read_events
from headrace.planner.plan import Plan, load_proposal
from headrace.planner.profile import Profile, profile_from_json
from headrace.planner.simulation import merged, observed_tree, plan_tree, simulated_tree
from headrace.planner.time_model import time_model
from headrace.report.picture import end_picture
from headrace.report.progress import duration
from headrace.report.summary import summarize
from headrace.runtime.simulated import simulate

DEFAULT_UPDATES = 50
"""Of a profile that no run was made for."""
_TOLD_SECONDS = 5.0
"""Between two lines of progress."""


def execute(arguments: argparse.Namespace, output: Output) -> int:
    path = Path(arguments.plan)
    profile, plan, tree = _read(path, arguments.rank)
    settings = _settings(tree, plan, arguments, file=str(path))
    name = path.stem if plan is None else f"{path.stem}-{plan.rank}"
    directory = choose_run_directory(arguments.run_dir, f"simulated-{name}")
    started = time.perf_counter()
    model, progress = time_model(profile, settings, failures=arguments.failures), _Progress(settings.run.num_updates, output)
    with sigterm_as_ctrl_c():
        outcome = simulate(settings, model, run_directory=directory, name=name, subscribers=[progress.on_event])
    took = time.perf_counter() - started
    events = list(read_events(directory / "events.jsonl"))
    output.show(end_picture(events, directory, width=output.width))
    rollouts = sum(line["event"] == "rollout_finished" for line in events)
    output.show(f"simulated {rollouts:,} rollouts in {took:.1f} s; headrace watch, report and profile read {directory}")
    values = {"rank": None if plan is None else plan.rank, "seconds": outcome.seconds, "num_rollouts": rollouts, "preempted": outcome.preempted}
    output.result({"run_dir": str(directory), **values, **summarize(events)})
    return 0


class _Progress:
    """Lines about a simulation that takes long."""

    def __init__(self, num_updates: int, output: Output) -> None:
        self._num_updates, self._output = num_updates, output
        self._started = self._told = time.monotonic()

    def on_event(self, line: dict[str, Any]) -> None:
        if line["event"] != "updated" or (now := time.monotonic()) - self._told < _TOLD_SECONDS:
            return
        self._told, made = now, line["version"]
        left = (now - self._started) * (self._num_updates / made - 1)
        self._output.say(f"update {made}/{self._num_updates}, {duration(line['time'])} simulated, {duration(left)} to go")


def _read(path: Path, rank: int | None) -> tuple[Profile, Plan | None, dict[str, dict[str, Any]]]:
    """(profile, plan, settings that both name); a file with `plans` is a plan, another one a profile."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, f"it cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise _wrong(path, f"it is no JSON: {error}.") from error
    if isinstance(values, dict) and "plans" in values:
        proposal = load_proposal(path)
        plan = proposal.plan(rank or 1, file=str(path))
        return proposal.profile_of(plan), plan, merged(simulated_tree(proposal.profile), plan_tree(plan, num_updates=plan.num_updates))
    if rank is not None:
        what = "it is a profile, which has no ranks."
        raise ConfigError([Problem(file=str(path), key="--rank", value=rank, message=what, remedy="Leave --rank out, or give a plan.json.")])
    profile = profile_from_json(values, file=str(path))
    return profile, None, merged(simulated_tree(profile), {"run": {"num_updates": DEFAULT_UPDATES}}, observed_tree(profile))


def _settings(tree: dict[str, dict[str, Any]], plan: Plan | None, arguments: argparse.Namespace, *, file: str) -> Settings:
    """The numbers of devices of a plan may be more than this machine's runtime starts, and more than one a sampler."""
    asked = {"seed": arguments.seed, "num_updates": arguments.updates}
    tree = merged(tree, {"run": {key: value for key, value in asked.items() if value is not None}})
    if plan is None:
        return make_settings(tree, arguments.overrides, file=file)
    given = {override.partition("=")[0].strip() for override in arguments.overrides}
    devices = {"num_samplers": plan.num_samplers, "num_learner_ranks": plan.num_learner_devices}
    settings = make_settings(merged(tree, {"run": dict.fromkeys(devices, 1)}), arguments.overrides, file=file)
    kept = {key: value for key, value in devices.items() if f"run.{key}" not in given}
    return settings.model_copy(update={"run": settings.run.model_copy(update=kept)})


def _wrong(path: Path, message: str) -> ConfigError:
    remedy = "Give what 'headrace plan' or 'headrace profile' wrote."
    return ConfigError([Problem(file=str(path), key="PLAN", value=str(path), message=message, remedy=remedy)])
