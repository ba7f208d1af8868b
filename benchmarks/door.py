"""Asynchronous against synchronous on one recipe: time and updates to a target, final score, occupancy, over several seeds.

    python benchmarks/door.py --seeds 3 --arms async sync-colocated --updates 100

Scores are the exact evaluation of the recipe (samples_per_task = 0), made inside the run on a pinned version. Arms run one
after another, their order alternating by seed, so that machine noise hits all alike. The timed window leaves out start-up and
the evaluations before and after. Resumable: a finished run in --out is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.config_loading import load_settings
from headrace.events import read_events
from headrace.report.summary import summarize
from headrace.runtime.local import run_local
from headrace.runtime.processes import end_forkserver

ARMS = {
    "async": ["run.mode=async", "run.num_samplers=1", "run.num_learner_ranks=1"],
    "sync-colocated": ["run.mode=sync", "run.placement=colocated", "run.num_samplers=2", "run.num_learner_ranks=2"],
    "sync-split": ["run.mode=sync", "run.placement=split", "run.num_samplers=1", "run.num_learner_ranks=1"],
    "async-bound-0": ["run.mode=async", "pool.max_staleness=0", "run.num_samplers=1", "run.num_learner_ranks=1"],
}


def run_arm(recipe: str, arm: str, seed: int, directory: Path, overrides: list[str]) -> list[dict[str, Any]]:
    events = directory / "events.jsonl"
    if events.exists() and any(event["event"] == "run_finished" and event["status"] == "done" for event in read_events(events)):
        return list(read_events(events))
    if directory.exists():
        directory.rename(directory.with_name(f"{directory.name}.cut-{datetime.now(UTC):%H%M%S}"))
    asyncio.run(run_local(load_settings(recipe, [*ARMS[arm], f"run.seed={seed}", *overrides]), directory))
    return list(read_events(events))


def measure(events: list[dict[str, Any]], target: float) -> dict[str, Any]:
    summary = summarize(events)
    start = next(event["time"] for event in events if event["event"] == "timed_window" and event["phase"] == "start")
    curve = [(event["version"], event["mean"], event["time"] - start) for event in events if event["event"] == "evaluated"]
    reached = next(((version, seconds) for version, mean, seconds in curve if mean >= target), (None, None))
    published = {event["version"]: event["time"] - start for event in events if event["event"] == "weights_published"}
    return {
        "before": curve[0][1],
        "after": curve[-1][1],
        "updates_to_target": reached[0],
        "seconds_to_target": None if reached[0] is None else published[reached[0]],
        "wall_seconds": summary["wall_seconds"],
        "seconds_an_update": summary["wall_seconds"] / summary["num_updates"],
        "tokens_per_second": summary["tokens_per_second"],
        "staleness_mean": summary["staleness"]["mean"],
        "staleness_max": summary["staleness"]["max"],
        "occupancy": summary["utilization"]["occupancy"],
        "busy_fraction": summary["utilization"]["busy_fraction"],
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="door")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["async", "sync-colocated"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--target", type=float, default=0.90)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-door"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}")
    overrides = [f"run.num_updates={arguments.updates}", "evaluation.every_updates=5", "evaluation.samples_per_task=0", *arguments.overrides]
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arguments.arms}
    for seed in range(arguments.seeds):
        for arm in arguments.arms if seed % 2 == 0 else reversed(arguments.arms):
            one = measure(run_arm(arguments.recipe, arm, seed, arguments.out / f"{arm}-{seed}", overrides), arguments.target)
            results[arm].append(one)
            print(f"  {arm} seed {seed}: {json.dumps({key: value for key, value in one.items() if key != 'curve'})}", flush=True)
    end_forkserver()
    for arm, runs in results.items():
        print(f"{arm}: " + ", ".join(f"{key} {_median(runs, key)}" for key in runs[0] if key != "curve"))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


def _median(runs: list[dict[str, Any]], key: str) -> str:
    values = [run[key] for run in runs if run[key] is not None]
    missing = len(runs) - len(values)
    return f"{statistics.median(values):.4g}" + (f" ({missing} never)" if missing else "") if values else "never"


if __name__ == "__main__":
    main()
