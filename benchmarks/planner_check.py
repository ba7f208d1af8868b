"""A finished run against its own simulation: profile it, simulate the same settings, compare.

    python benchmarks/planner_check.py RUN [RUN ...] [--profile PROFILE] [--seeds 3] [--json]

What is predicted comes from the profile alone (decode steps, updates, lengths, waits, what lies between them); how long the run took, how
stale its tokens were and how full its devices were do not enter. With --profile it is another run's: only the setup is RUN's. Evaluations
share the machine with a real run and are not simulated; the time in which the learner of a synchronous run wrote checkpoints is taken off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

from headrace.config_loading import make_settings
from headrace.event_log import read_events
from headrace.planner.measure import measure
from headrace.planner.profile import Profile, load_profile
from headrace.planner.simulation import SteadyMeter, merged, settings_tree, simulated_tree
from headrace.planner.time_model import time_model
from headrace.runtime.simulated import simulate

ROWS = ("update_seconds", "tokens_per_second", "staleness_mean", "sampler_occupancy", "sampler_busy", "learner_busy")


def figures(meter: SteadyMeter) -> dict[str, float]:
    """Of the steady state: updates after the first quarter."""
    devices = meter.utilization()["devices"]
    samplers = [device for device in devices if device["role"] != "learner"]
    learners = [device for device in devices if device["role"] != "sampler"]
    return {
        "update_seconds": meter.step_seconds,
        "tokens_per_second": meter.tokens_per_second,
        "staleness_mean": meter.staleness().mean,
        "sampler_occupancy": statistics.fmean(device["occupancy"] for device in samplers),
        "sampler_busy": statistics.fmean(device["busy_fraction"] for device in samplers),
        "learner_busy": statistics.fmean(device["busy_fraction"] for device in learners),
    }


def measured_figures(run: Path) -> dict[str, float]:
    meter = SteadyMeter(num_updates=0)
    lines = list(read_events(run / "events.jsonl"))
    for line in lines:
        meter.add(line)
    start, end = meter.window
    in_turn = lines[0]["mode"] == "sync"  # else samplers go on meanwhile
    saving = sum(line["seconds"] for line in lines if in_turn and line["event"] == "checkpoint_saved" and start < line["time"] <= end)
    found = figures(meter)
    return found | {"update_seconds": found["update_seconds"] - saving / len(meter.kept)}


def check(run: Path, seeds: int, other: Profile | None) -> list[dict[str, Any]]:
    profile = measure(run) if other is None else other
    setup = settings_tree(tomllib.loads((run / "config.toml").read_text(encoding="utf-8")), profile)
    settings = make_settings(merged(simulated_tree(profile), setup), file=str(run))
    predictions = []
    for seed in range(seeds):
        meter = SteadyMeter(num_updates=settings.run.num_updates)
        seeded = settings.model_copy(update={"run": settings.run.model_copy(update={"seed": seed})})
        simulate(seeded, time_model(profile, seeded), subscribers=[meter.add])
        predictions.append(figures(meter))
    actual = measured_figures(run)
    rows = []
    for name in ROWS:
        predicted = statistics.fmean(each[name] for each in predictions)
        error = predicted / actual[name] - 1 if actual[name] else None
        rows.append({"run": run.name, "figure": name, "measured": actual[name], "predicted": predicted, "error": error})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path)
    parser.add_argument("--profile", type=Path, help="of another run (default: of RUN itself)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    other = None if arguments.profile is None else load_profile(arguments.profile)
    rows = [row for run in arguments.runs for row in check(run, arguments.seeds, other)]
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{'run':24}{'figure':20}{'measured':>10}{'predicted':>11}{'error':>8}", file=out)
    for row in rows:
        error = "" if row["error"] is None else f"{row['error']:+.1%}"
        print(f"{row['run'][:23]:24}{row['figure']:20}{row['measured']:10.4g}{row['predicted']:11.4g}{error:>8}", file=out)
    if arguments.json:
        print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
