"""`headrace compare`: arms of one recipe in turn, a table, a verdict, and where everything lies."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.cli import interrupts
from headrace.cli.output import INTERRUPTED, INTERRUPTED_ERROR, Output
from headrace.cli.run import sigterm_as_ctrl_c
from headrace.compare import SYNC, Arm, Plan, common_capacity, held_directory, make_arms, make_promises, run_comparison
from headrace.config_loading import load_settings, plain_values
from headrace.errors import ConfigError, HeadraceError, Problem
from headrace.planner.profile import Profile, load_profile
from headrace.report.comparison import MeasuredRun, as_json, compare_arm, default_target, jitter, mean_and_interval, time_to_reward


def execute(arguments: argparse.Namespace, output: Output) -> int:
    plan = make_plan(arguments)
    baseline = _baseline(plan, arguments.baseline)
    for arm in plan.arms:
        plan.resolve(arm, seed=0)  # every problem before anything is written
    profile = None if plan.profile is None else load_profile(plan.profile)
    _warn_of_shared_cores(plan, output)
    facts: dict[str, Any] = {"recipe": arguments.recipe, "run_dir": str(plan.directory), "seeds": list(plan.seeds()), "baseline": baseline}
    with held_directory(plan), sigterm_as_ctrl_c():
        output.say(f"headrace compare {arguments.recipe}: {', '.join(arm.name for arm in plan.arms)} -> {plan.directory}")
        try:
            measured = _run(plan, profile, output)
        except KeyboardInterrupt:
            interrupts.absorb()
            output.say(f"Interrupted. To go on: {_again(arguments, plan)}")
            output.result(facts, status="interrupted", error=INTERRUPTED_ERROR)
            return INTERRUPTED
        except HeadraceError as error:
            output.say_error(error)
            output.say(f"To go on: {_again(arguments, plan)}")
            output.result(facts, status="failed", error=error.as_json())
            return error.exit_code
        result = {**facts, **_result(plan, measured, baseline, arguments.target)}
        result["report"] = _write_report(plan, measured, result)
        (plan.directory / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print_comparison(measured, result, output)
    output.result(result)
    return 0


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Raises ConfigError with what is wrong in the arguments."""
    given = [_arm(words) for words in arguments.arm or ()]
    name = load_settings(arguments.recipe, arguments.overrides).settings.run.name
    directory = Path(arguments.run_dir or Path("runs") / f"compare-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return Plan(
        recipe=arguments.recipe,
        overrides=tuple(arguments.overrides),
        arms=make_arms(arguments.recipe, arguments.overrides, given, arguments.devices),
        num_seeds=arguments.seeds,
        profile=None if arguments.profile is None else Path(arguments.profile).resolve(),
        evaluate_every=arguments.evaluate_every,
        directory=directory.resolve(),
    )


def print_comparison(measured: Mapping[str, Sequence[MeasuredRun]], result: Mapping[str, Any], output: Output) -> None:
    from rich.table import Table

    from headrace.cli.safe_console import SafeConsole

    target = result["target_reward"]
    seeds = len(result["seeds"])
    table = Table(title=f"means of {seeds} seeds" if seeds > 1 else "1 seed", title_justify="left", box=None, pad_edge=False, header_style="bold")
    with_keys = any(run.key_staleness_mean is not None for runs in measured.values() for run in runs)
    headings = ["arm", f"s to {target:.3f}", "final ± 95 %", "jitter", "occupancy", "busy", "useful tok/s", "staleness", "s, said"]
    for heading in [*headings, *(["key steps", "over bound"] if with_keys else [])]:
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for name, runs in measured.items():
        table.add_row(name, *_cells(runs, target), *(_key_cells(runs) if with_keys else []))
    SafeConsole(file=output.people, width=max(output.width, 132 if with_keys else 112), highlight=False).print(table)
    floor = result["noise_floor"]
    noise = f"{floor:.4f} by evaluating alone" if floor else "evaluations are exact on their tasks"
    output.show(f"jitter: sd of evaluation differences near the end; {noise}. occupancy: of capacity {result['capacity']} for all arms.")
    runs = [run for each in measured.values() for run in each]
    by = "promised before them" if all(run.was_promised for run in runs) else "what they said after a tenth of their updates"
    output.show(f"s, said: seconds of the runs, and by how much {by} was off, on average.")
    if seeds == 1:
        output.show("± 95 %: of the evaluation alone; one seed says nothing about others.")
    output.show(f"\n{result['verdict']}")
    output.show(f"\nreport  {result['report']}\nruns and result.json  {result['run_dir']}")


def _run(plan: Plan, profile: Profile | None, output: Output) -> dict[str, list[MeasuredRun]]:
    from headrace.runtime.processes import end_forkserver

    promises = None if profile is None else make_promises(plan, profile, output.people)
    try:
        return interrupts.run(run_comparison(plan, output.people, promises))
    finally:
        end_forkserver()


def _result(plan: Plan, measured: Mapping[str, Sequence[MeasuredRun]], baseline: str, given_target: float | None) -> dict[str, Any]:
    target = default_target(measured[baseline]) if given_target is None else given_target
    comparisons = [compare_arm(runs, measured[baseline], target) for name, runs in measured.items() if name != baseline]
    return {**as_json(measured, _arm_settings(plan), comparisons, target), "capacity": common_capacity(plan)}


def _write_report(plan: Plan, measured: Mapping[str, Sequence[MeasuredRun]], result: Mapping[str, Any]) -> str:
    from headrace.report.page import write_report

    runs = [run for arm in measured.values() for run in arm]
    directories, names = [Path(run.run_dir) for run in runs], [run.arm for run in runs]
    out = plan.directory / "report.html"
    shown = {key: result[key] for key in ("verdict", "capacity")}
    return str(write_report(directories, out, arm_names=names, target=result["target_reward"], **shown).path)


def _arm_settings(plan: Plan) -> dict[str, dict[str, Any]]:
    """What each arm has other than the recipe's file says; the seed apart."""
    recipe = plain_values(load_settings(plan.recipe).settings)
    found = {}
    for arm in plan.arms:
        values = plain_values(plan.resolve(arm, seed=0).settings)
        found[arm.name] = {key: value for key, value in values.items() if value != recipe[key] and key != "run.seed"}
    return found


def _arm(words: Sequence[str]) -> Arm:
    name, *settings = words
    wrong = next((word for word in settings if "=" not in word), None)
    if wrong is not None or "=" in name or not settings:
        what = f"'{wrong}' is not of the form KEY=VALUE" if wrong is not None else f"'{name}' is not a name" if "=" in name else "it has no settings"
        message = f"--arm {' '.join(words)}: {what}."
        raise ConfigError([Problem(key="--arm", value=" ".join(words), message=message, remedy="Write --arm NAME KEY=VALUE ..., after RECIPE.")])
    return Arm(name=name, settings=tuple(settings))


def _baseline(plan: Plan, asked: str | None) -> str:
    names = [arm.name for arm in plan.arms]
    name = asked or SYNC
    if name not in names:
        message = f"--baseline '{name}' is no arm."
        raise ConfigError([Problem(key="--baseline", value=name, message=message, limit=", ".join(names), remedy=f"Arms are {', '.join(names)}.")])
    return name


def _warn_of_shared_cores(plan: Plan, output: Output) -> None:
    for arm in plan.arms:
        settings = plan.resolve(arm, seed=0).settings
        devices = settings.run.num_samplers if settings.run.placement == "colocated" else settings.run.num_samplers + settings.run.num_learner_ranks
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if settings.model.device == "cpu" and devices > cores:
            output.say(f"arm '{arm.name}' has {devices} devices, this machine {cores} cores: devices share cores, so its times say little.")


def _again(arguments: argparse.Namespace, plan: Plan) -> str:
    words = ["headrace", "compare", arguments.recipe, *arguments.overrides]
    for arm in arguments.arm or ():
        words += ["--arm", *arm]
    for option in ("seeds", "devices", "evaluate_every", "target", "baseline", "profile"):
        value = getattr(arguments, option)
        if value is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--run-dir", str(plan.directory)])


def _cells(runs: Sequence[MeasuredRun], target: float) -> list[str]:
    times = [time_to_reward(run.curve, target) for run in runs]
    reached = [one for one in times if one is not None]
    seconds = f"{statistics.fmean(reached):.1f}" if reached else "never"
    if reached and len(reached) < len(times):
        seconds += f" ({len(times) - len(reached)} never)"
    final, interval = mean_and_interval([run.final_mean for run in runs])
    half_width = runs[0].final_half_width if interval is None else (interval[1] - interval[0]) / 2
    occupancy, attainable = _mean([run.occupancy for run in runs]), _mean([run.attainable_occupancy for run in runs])
    largest = max((run.staleness_max for run in runs if run.staleness_max is not None), default=0)
    return [
        seconds,
        f"{final:.4f} ± {half_width:.4f}",
        _shown(_mean([jitter(run.curve) for run in runs]), ".4f"),
        f"{_shown(occupancy, '.0%')} of {_shown(attainable, '.0%')}",
        _shown(_mean([run.busy_fraction for run in runs]), ".0%"),
        _shown(_mean([run.useful_tokens_per_second for run in runs]), ",.0f"),
        f"{_shown(_mean([run.staleness_mean for run in runs]), '.1f')} (max {largest})",
        _said_cell(runs),
    ]


def _said_cell(runs: Sequence[MeasuredRun]) -> str:
    """Seconds of the run and, of the same runs, how far off what was said of them lay."""
    said = [(run.wall_seconds, run.predicted_seconds) for run in runs if run.predicted_seconds is not None]
    seconds = f"{statistics.fmean(run.wall_seconds for run in runs):.1f}"
    if not said:
        return seconds
    return f"{seconds}, {statistics.fmean(predicted / actual - 1 for actual, predicted in said):+.0%}"


def _key_cells(runs: Sequence[MeasuredRun]) -> list[str]:
    """Staleness of key steps, and the share of them over their bound."""
    mean = _mean([run.key_staleness_mean for run in runs])
    largest = max((run.key_staleness_max for run in runs if run.key_staleness_max is not None), default=0)
    staleness = "-" if mean is None else f"{mean:.1f} (max {largest})"
    return [staleness, _shown(_mean([run.key_over_bound_fraction for run in runs]), ".0%")]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
