"""The figures of recipes/door/README.md, from `headrace compare door`: asynchronous against synchronous, over several seeds.

    python benchmarks/door.py --seeds 5 --updates 90
    python benchmarks/door.py --seeds 3 --updates 90 --model large task.options.tool_seconds=0.1 --out runs/benchmark-door-large
    python benchmarks/door.py --tune-sync

--model large: the model has 18 times the parameters, so that its work outweighs the Python around it; its warm start takes minutes, once.
--tune-sync: no training to an end, but how long a synchronous update takes under other settings of the synchronous arm, in turn: the arm of the
comparison is the fastest of them, or level with it.
Scores are the exact evaluation of the recipe, of saved checkpoints, outside the timed windows. Goes on where it was cut, with the same --out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.cli.main import main as headrace
from headrace.event_log import read_events
from headrace.report.summary import summarize

EVALUATE_EVERY = 5
MODELS = {
    "tiny": (),
    "large": (
        "model.architecture.hidden_size=192",
        "model.architecture.num_hidden_layers=4",
        "model.architecture.intermediate_size=576",
        "model.architecture.num_attention_heads=6",
        "warm_start.learning_rate=2e-3",
    ),
}

SYNC = ("run.mode=sync", "run.placement=colocated", "run.num_samplers=2", "run.num_learner_ranks=2")
SYNC_ARMS = {
    "as compared: colocated on both devices, 64 slots each": SYNC,
    "16 slots each": (*SYNC, "sampler.max_running=16"),
    "32 slots each": (*SYNC, "sampler.max_running=32"),
    "128 slots each": (*SYNC, "sampler.max_running=128"),
    "never waits for a fuller step": (*SYNC, "sampler.gather_seconds=0"),
    "waits up to 10 ms for a fuller step": (*SYNC, "sampler.gather_seconds=0.01"),
    "split: one samples, one learns": ("run.mode=sync", "run.placement=split"),
}
TUNED_UPDATES, TUNING_ROUNDS = 6, 3


def first_at(curve: list[dict[str, Any]], target: float, key: str) -> float | None:
    return next((point[key] for point in curve if point["mean"] >= target), None)


def median(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    missing = len(values) - len(known)
    return "never" if not known else f"{statistics.median(known):.4g}" + (f" ({missing} never)" if missing else "")


def print_arm(arm: dict[str, Any], target: float) -> None:
    runs = arm["runs"]
    summaries = [summarize(read_events(Path(run["run_dir"]) / "events.jsonl")) for run in runs]
    print(f"{arm['name']}:")
    print(f"  at the start                {median([run['curve'][0]['mean'] for run in runs])}")
    print(f"  after the last update       {', '.join(format(run['curve'][-1]['mean'], '.3f') for run in runs)}")
    print(f"  {target:g} first at update     {median([first_at(run['curve'], target, 'version') for run in runs])}")
    print(f"  {target:g} first after seconds {median([first_at(run['curve'], target, 'seconds') for run in runs])}")
    print(f"  seconds an update           {median([run['wall_seconds'] / run['num_updates'] for run in runs])}")
    print(f"  sampled tokens/s            {median([summary['tokens_per_second'] for summary in summaries])}")
    print(f"  staleness mean (max)        {median([run['staleness_mean'] for run in runs])} ({max(run['staleness_max'] for run in runs)})")
    uses = [summary["utilization"] for summary in summaries]
    print(f"  occupancy of attainable     {median([use['occupancy'] for use in uses])} of {median([use['attainable_occupancy'] for use in uses])}")
    for devices in zip(*(use["devices"] for use in uses), strict=True):
        busy, occupancy = (median([device[key] for device in devices]) for key in ("busy_fraction", "occupancy"))
        print(f"  {devices[0]['name'] + ' occupancy, busy':<27} {occupancy}, {busy}")


def tune_sync(out: Path, overrides: list[str]) -> None:
    """Prints seconds a synchronous update of every arm of SYNC_ARMS, medians of runs in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in SYNC_ARMS}
    plain = [f"run.num_updates={TUNED_UPDATES}", "evaluation.num_tasks=16", "evaluation.samples_per_task=0", *overrides]
    for index in range(TUNING_ROUNDS):
        for number, (name, settings) in enumerate(SYNC_ARMS.items()):
            directory = out / f"sync-{number}-{index}"
            if not directory.exists() and (code := headrace(["run", "door", *plain, *settings, f"run.seed={index}", "--run-dir", str(directory)])):
                sys.exit(code)
            summary = summarize(read_events(directory / "events.jsonl"))
            seconds[name].append(summary["wall_seconds"] / TUNED_UPDATES)
    print("| synchronous arm | seconds an update | of the first |\n|---|---|---|")
    base = next(iter(seconds.values()))
    for name, own in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(own, base, strict=True))
        print(f"| {name} | {statistics.median(own):.2f} ({min(own):.2f} to {max(own):.2f}) | {ratio:.2f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--target", type=float, default=0.90)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--tune-sync", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-door"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for both arms")
    arguments = parser.parse_intermixed_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}")
    if arguments.tune_sync:
        tune_sync(arguments.out.with_name(arguments.out.name + "-sync"), [*MODELS[arguments.model], *arguments.overrides])
        return 0
    options = ["--seeds", arguments.seeds, "--target", arguments.target, "--evaluate-every", EVALUATE_EVERY, "--run-dir", arguments.out]
    settings = [f"run.num_updates={arguments.updates}", *MODELS[arguments.model], *arguments.overrides]
    code = headrace(["compare", "door", *settings, *map(str, options)])
    if code == 0:
        for arm in json.loads((arguments.out / "result.json").read_text(encoding="utf-8"))["arms"]:
            print_arm(arm, arguments.target)
    return code


if __name__ == "__main__":
    sys.exit(main())
