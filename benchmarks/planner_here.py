"""This machine, profiled once for each of two recipes; twelve other runs of them, predicted and then made.

    python benchmarks/planner_here.py --out DIR [--seconds 25] [--only NAME ...] [--json]
    python benchmarks/planner_here.py --out DIR --again [--profiled door=RUN ...]    # recorded runs, foretold after the fact; nothing is run

Order: two profiling runs; all predictions, each written to DIR/predictions before anything that it predicts starts; the twelve runs; two of
them again, with other seeds, for how far equal runs lie apart. Goes on where it was cut, with the same --out. Wants a machine without other
work, and takes about 15 minutes. A run's --seconds decide how many updates it makes, by its prediction.

What is predicted enters through the profile alone. A setup with other tools than the profiled run's says by which factor they are slower.
Real occupancies are of the capacity that the profile states, as the predicted ones are. Time is that of the timed window.

--again measures the profiling runs anew and foretells recorded runs as this version of the planner does, with the settings that they had:
what a change of the planner gives on the same runs. It is no prediction, as the runs were there to be looked at. --profiled takes another of
the recorded runs for the profile of a recipe, such as one that other work disturbed in the same way.

At the end, four simulated runs of over 5 minutes from the same profiles: the time to finish as it was said after a tenth of the updates. Two of them
solve their tasks on the way as fast as the profiled run did, so that fewer and fewer groups teach anything; in the others rewards stay as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.cli.main import main as headrace
from headrace.config_loading import load_settings
from headrace.event_log import read_events
from headrace.planner.inputs import apply_what_if
from headrace.planner.measure import measure
from headrace.planner.profile import Profile, load_profile, save_profile
from headrace.planner.run_forecast import forecast_run, simulated_settings
from headrace.planner.time_model import time_model
from headrace.report.comparison import with_capacity
from headrace.report.finish import FinishMeter
from headrace.report.summary import summarize
from headrace.runtime.simulated import simulate

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
PLAIN = ("evaluation.every_updates=0", "evaluation.num_tasks=8", "checkpoint.every_updates=0", "checkpoint.every_seconds=0")
"""What a profile does not hold is left out of the runs."""
PROFILE_UPDATES = {"door": 50, "arithmetic": 50}
LEAST_UPDATES, MOST_UPDATES = 12, 160
REPEATS = 2
"""More runs of one setup of each recipe."""
LONG_SECONDS = 330.0
FIRST_PART = 0.1
LEARNING = (1.0, 0.001)
"""Of how fast rewards were measured to rise: as then, and as good as not at all."""


@dataclass(frozen=True, slots=True)
class Setup:
    name: str
    recipe: str
    settings: tuple[str, ...]
    tools: float = 1.0
    """Their seconds / those of the profiled run."""
    repeated: bool = False


SETUPS = (
    Setup("door-staleness-2", "door", ("pool.max_staleness=2",), repeated=True),
    Setup("door-slots-16", "door", ("sampler.max_running=16", "pool.max_staleness=4")),
    Setup("door-batch-8", "door", ("pool.groups_per_batch=8", "pool.max_staleness=6")),
    Setup("door-sync", "door", ("run.mode=sync",)),
    Setup("door-colocated", "door", ("run.mode=sync", "run.placement=colocated")),
    Setup("door-slow-2-samplers", "door", ("task.options.tool_seconds=0.2", "run.num_samplers=2", "pool.max_staleness=4"), tools=10.0),
    Setup("door-slow-3-samplers", "door", ("task.options.tool_seconds=0.2", "run.num_samplers=3", "pool.max_staleness=6"), tools=10.0),
    Setup("door-2-samplers", "door", ("run.num_samplers=2", "pool.max_staleness=4")),
    Setup("arithmetic-staleness-2", "arithmetic", ("pool.max_staleness=2",), repeated=True),
    Setup("arithmetic-slots-48", "arithmetic", ("sampler.max_running=48", "pool.max_staleness=4")),
    Setup("arithmetic-sync", "arithmetic", ("run.mode=sync",)),
    Setup("arithmetic-batch-8", "arithmetic", ("pool.groups_per_batch=8", "pool.max_staleness=4")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=25.0, help="of one run, about")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the setups: " + ", ".join(setup.name for setup in SETUPS))
    parser.add_argument("--draws", type=int, default=9, help="simulations of one prediction")
    parser.add_argument("--again", action="store_true", help="foretell the recorded runs of DIR after the fact; nothing is run")
    parser.add_argument("--profiled", nargs="+", default=[], metavar="RECIPE=RUN", help="with --again: the recorded run that is a recipe's profile")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [setup for setup in SETUPS if not arguments.only or setup.name in arguments.only]
    if arguments.only and len(chosen) < len(set(arguments.only)):
        parser.error("no such setup: " + ", ".join(sorted(set(arguments.only) - {setup.name for setup in chosen})))
    if arguments.again:
        return foretell_again(chosen, arguments)
    profiles = {recipe: profiled(recipe, arguments.out) for recipe in dict.fromkeys(setup.recipe for setup in chosen)}
    predictions = {setup.name: predicted(setup, profiles[setup.recipe], arguments) for setup in chosen}
    rows, repeats = [], []
    for setup in chosen:
        for seed in range(1 + REPEATS * setup.repeated):
            actual = made(setup, predictions[setup.name], arguments.out, seed, profiles[setup.recipe])
            (repeats if seed else rows).append({"name": setup.name, **actual})
    long_runs = [finish_of_long_run(recipe, profile, learning) for recipe, profile in profiles.items() for learning in LEARNING]
    result = judged(rows, repeats, predictions) | {"long_runs": long_runs}
    result |= {"cores": cores(), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    (arguments.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result, sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps(result))
    return 0


# the parts --------------------------------------------------------------------------------------------------------------


def profiled(recipe: str, out: Path) -> Profile:
    """Of a run with the recipe's own setup."""
    path = out / "profiles" / f"{recipe}.json"
    if not path.is_file():
        run(recipe, (f"run.num_updates={PROFILE_UPDATES[recipe]}",), out / "profiles" / recipe)
        save_profile(measure(out / "profiles" / recipe, kind="measured", origin=recipe), path)
    return load_profile(path)


def predicted(setup: Setup, profile: Profile, arguments: argparse.Namespace) -> dict[str, Any]:
    """Written down before the run; read again when it is there, so that no later version of anything changes it."""
    path = arguments.out / "predictions" / f"{setup.name}.json"
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    if list((arguments.out / "runs").glob(f"{setup.name}-*")):
        sys.exit(f"{setup.name} has been run already, but {path} is missing: a prediction must come first. Remove the run, or give another --out.")
    profile = apply_what_if(profile, {"tools": setup.tools})
    values = load_settings(RECIPES / setup.recipe, [*setup.settings, *PLAIN]).settings.model_dump(mode="json", exclude_none=True)
    few = forecast_run(profile, simulated_settings(profile, values, ["run.num_updates=30"]), draws=1, cores=cores())
    updates = round(min(MOST_UPDATES, max(LEAST_UPDATES, arguments.seconds / few.step_seconds)))
    forecast = forecast_run(profile, simulated_settings(profile, values, [f"run.num_updates={updates}"]), draws=arguments.draws, cores=cores())
    found = {"name": setup.name, "settings": list(setup.settings), "written": datetime.now(UTC).isoformat(timespec="seconds"), **forecast.as_json()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def foretell_again(chosen: Sequence[Setup], arguments: argparse.Namespace) -> int:
    """Of recorded runs, from their events; writes DIR/again.json."""
    sources = dict(text.partition("=")[::2] for text in arguments.profiled)
    rows, repeats, predictions = [], [], {}
    profiles = {}
    for setup in chosen:
        directory = arguments.out / "runs" / f"{setup.name}-0"
        source = arguments.out / "runs" / sources[setup.recipe] if setup.recipe in sources else arguments.out / "profiles" / setup.recipe
        if not (directory / "events.jsonl").is_file() or source.name.rpartition("-")[0] == setup.name:
            continue  # never made, or the very setup that the profile is of
        profile = profiles.setdefault(setup.recipe, measure(source))
        values = tomllib.loads((directory / "config.toml").read_text(encoding="utf-8"))
        values["sampler"].setdefault("queue_share", 0.0)  # before there was that setting
        settings = simulated_settings(apply_what_if(profile, {"tools": setup.tools}), values)
        forecast = forecast_run(apply_what_if(profile, {"tools": setup.tools}), settings, draws=arguments.draws, cores=cores())
        predictions[setup.name] = {"name": setup.name, **forecast.as_json()}
        for seed in range(1 + REPEATS * setup.repeated):
            run_of = arguments.out / "runs" / f"{setup.name}-{seed}"
            if (run_of / "events.jsonl").is_file():
                (repeats if seed else rows).append({"name": setup.name, **figures_of(run_of, profile, seed)})
    result = judged(rows, repeats, predictions) | {"long_runs": [], "profiled": sources, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    (arguments.out / "again.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result, sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps(result))
    return 0


def made(setup: Setup, prediction: Mapping[str, Any], out: Path, seed: int, profile: Profile) -> dict[str, Any]:
    """The same figures of the run itself."""
    directory = out / "runs" / f"{setup.name}-{seed}"
    run(setup.recipe, (*setup.settings, f"run.num_updates={prediction['num_updates']}", f"run.seed={seed}"), directory)
    return figures_of(directory, profile, seed)


def figures_of(directory: Path, profile: Profile, seed: int) -> dict[str, Any]:
    """Of a finished run."""
    lines = list(read_events(directory / "events.jsonl"))
    summary = summarize(with_capacity(lines, profile.decode.saturation.running))
    return {
        "seed": seed,
        "seconds": summary["wall_seconds"],
        "staleness": summary["staleness"]["mean"],
        "occupancy": summary["utilization"]["occupancy"],
        "busy": summary["utilization"]["busy_fraction"],
        "said_after_a_tenth": said_after(lines, FIRST_PART),
    }


def run(recipe: str, settings: Sequence[str], directory: Path) -> None:
    """Unless it is there already, whole."""
    events = directory / "events.jsonl"
    if events.is_file() and any(line["event"] == "run_finished" and line["status"] == "done" for line in read_events(events)):
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(sys.stderr):
        code = headrace(["run", str(RECIPES / recipe), *settings, *PLAIN, "--run-dir", str(directory)])
    if code:
        sys.exit(code)


def said_after(lines: Sequence[Mapping[str, Any]], part: float) -> dict[str, float] | None:
    """What the run said after this part of its updates: seconds from the first rollout to its end. None where it said nothing yet."""
    meter = FinishMeter()
    for line in lines:
        meter.add(line)
        if line["event"] == "updated" and line["version"] >= part * meter.num_updates:
            start = next(each["time"] for each in lines if each["event"] == "timed_window")
            left = meter.forecast()
            ran = line["time"] - start
            return None if left is None else {"p10": ran + left.low, "p50": ran + left.seconds, "p90": ran + left.high}
    return None


def finish_of_long_run(recipe: str, profile: Profile, learning: float) -> dict[str, Any]:
    """Simulated, with the recipe's own setup. `learning`: how fast rewards rise, of what was measured."""
    profile = apply_what_if(profile, {"learning": learning})
    values = load_settings(RECIPES / recipe, PLAIN).settings.model_dump(mode="json", exclude_none=True)
    few = forecast_run(profile, simulated_settings(profile, values, ["run.num_updates=30"]), draws=1, cores=cores())
    updates = round(LONG_SECONDS / few.step_seconds)
    settings = simulated_settings(profile, values, [f"run.num_updates={updates}", "run.seed=5"])
    lines: list[dict[str, Any]] = []
    simulate(settings, time_model(profile, settings, cores=cores()), subscribers=[lines.append])
    seconds, said = summarize(lines)["wall_seconds"], said_after(lines, FIRST_PART)
    return {
        "recipe": recipe,
        "learning": learning,
        "num_updates": updates,
        "seconds": seconds,
        "said_after_a_tenth": said,
        "error": said["p50"] / seconds - 1 if said else None,
    }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# the verdict ------------------------------------------------------------------------------------------------------------


def judged(rows: Sequence[dict[str, Any]], repeats: Sequence[dict[str, Any]], predictions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    compared = []
    for row in rows:
        foretold = predictions[row["name"]]
        finish = foretold["finish_seconds"]
        stale = None if foretold["staleness_mean"] is None or row["staleness"] is None else foretold["staleness_mean"] - row["staleness"]
        compared.append(
            {
                **row,
                "num_updates": foretold["num_updates"],
                "predicted": {"seconds": finish, **{key: foretold[key] for key in ("staleness_mean", "occupancy", "busy_fraction")}},
                "time_error": finish["p50"] / row["seconds"] - 1,
                "inside": finish["p10"] <= row["seconds"] <= finish["p90"],
                "staleness_error": stale,
                "occupancy_error": foretold["occupancy"] - row["occupancy"],
            }
        )
    spread = spread_of_repeats(rows, repeats)
    return {
        "runs": compared,
        "median_time_error": statistics.median(abs(row["time_error"]) for row in compared),
        "spread_of_repeated_runs": spread,
        "time_goal": max(0.1, 2 * spread) if spread is not None else 0.1,
        "share_inside_p80": statistics.fmean(row["inside"] for row in compared),
        "largest_staleness_error": max((abs(row["staleness_error"]) for row in compared if row["staleness_error"] is not None), default=None),
        "largest_occupancy_error": max(abs(row["occupancy_error"]) for row in compared),
    }


def spread_of_repeats(rows: Sequence[Mapping[str, Any]], repeats: Sequence[Mapping[str, Any]]) -> float | None:
    """Standard deviation of equal runs' seconds / their mean, the largest of the repeated setups."""
    found = []
    for row in rows:
        seconds = [row["seconds"], *(each["seconds"] for each in repeats if each["name"] == row["name"])]
        if len(seconds) > 1:
            found.append(statistics.stdev(seconds) / statistics.fmean(seconds))
    return max(found, default=None)


def show(result: Mapping[str, Any], out: Any) -> None:
    print(f"{'run':26}{'updates':>8}{'seconds':>9}{'predicted (P80)':>22}{'error':>8}{'':>4}{'staleness':>14}{'occupancy':>14}{'after a tenth':>15}", file=out)
    for row in result["runs"]:
        foretold, said = row["predicted"], row["said_after_a_tenth"]
        finish = foretold["seconds"]
        interval = f"{finish['p50']:.1f} ({finish['p10']:.1f}-{finish['p90']:.1f})"
        stale = "-" if row["staleness_error"] is None else f"{row['staleness']:.2f} > {foretold['staleness_mean']:.2f}"
        tenth = "-" if said is None else f"{said['p50'] / row['seconds'] - 1:+.0%}"
        inside = "in" if row["inside"] else "out"
        full = f"{row['occupancy']:.0%} > {foretold['occupancy']:.0%}"
        print(
            f"{row['name']:26}{row['num_updates']:8}{row['seconds']:9.1f}{interval:>22}{row['time_error']:+8.1%}{inside:>4}{stale:>14}{full:>14}{tenth:>15}",
            file=out,
        )
    spread = result["spread_of_repeated_runs"]
    said = "not measured" if spread is None else f"{spread:.1%}"
    print(f"median error of time {result['median_time_error']:.1%} (goal {result['time_goal']:.1%}; spread of equal runs {said})", file=out)
    print(f"P80 interval covers {result['share_inside_p80']:.0%} (goal 80 %)", file=out)
    stale = result["largest_staleness_error"]
    print(f"staleness off by at most {'-' if stale is None else format(stale, '.2f')} updates (goal 0.3)", file=out)
    print(f"occupancy off by at most {100 * result['largest_occupancy_error']:.1f} points (goal 5)", file=out)
    for row in result["long_runs"]:
        error = "-" if row["error"] is None else f"{row['error']:+.1%}"
        what = "tasks are solved on the way" if row["learning"] == 1 else "rewards stay as they are"
        print(f"{row['recipe']}, simulated, {what}: {row['num_updates']} updates in {row['seconds']:.0f} s, said after a tenth {error} (goal 10 %)", file=out)


if __name__ == "__main__":
    raise SystemExit(main())
