"""The unlucky case: tasks a hundred times as long as the others arrive in bursts until they could fill every slot.

    python benchmarks/unlucky.py --pairs 5

Arms in turn, each the same number of updates on the same tasks: synchronous; asynchronous without the means against long tasks (long
rollouts may hold every slot, whole groups only; in order, or what is ready first); with one of them, or both.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.cli.main import main as headrace
from headrace.event_log import read_events
from headrace.report.summary import summarize

RECIPE = Path(__file__).parent / "unlucky"
DEVICES = 2
ARMS: Mapping[str, tuple[str, ...]] = {
    "sync": ("run.mode=sync", "run.placement=colocated", f"run.num_samplers={DEVICES}", f"run.num_learner_ranks={DEVICES}"),
    "async, plain": ("sampler.long_share=1", "pool.selection=oldest_first", "pool.on_expiry=wait"),
    "async, ready_first": ("sampler.long_share=1",),
    "async, quorum 3 of 4": ("sampler.long_share=1", "pool.quorum=3"),
    "async, long_share 0.25": ("sampler.long_share=0.25",),
    "async, both": ("sampler.long_share=0.25", "pool.quorum=3"),
}


def run(arm: str, directory: Path, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Runs it unless it is there already; the summary with longest_gap, the longest time between two updates."""
    if not is_done(directory):
        settings = [f"run.num_updates={arguments.updates}", f"run.seed={seed}", *ARMS[arm], *arguments.overrides]
        if code := headrace(["run", str(RECIPE), *settings, "--run-dir", str(directory)]):
            sys.exit(code)
    lines = list(read_events(directory / "events.jsonl"))
    start = next(line["time"] for line in lines if line["event"] == "timed_window" and line["phase"] == "start")
    times = [start, *(line["time"] for line in lines if line["event"] == "updated")]
    summary = summarize(lines)
    return {**summary, "longest_gap": max(later - earlier for earlier, later in itertools.pairwise(times))}


def is_done(directory: Path) -> bool:
    path = directory / "events.jsonl"
    return path.is_file() and any(line["event"] == "run_finished" and line["status"] == "done" for line in read_events(path))


def occupancy(summary: Mapping[str, Any], learner: bool) -> float:
    """Of the samplers, or of the learner; colocated devices are both."""
    devices = [device for device in summary["utilization"]["devices"] if learner == (device["role"] == "learner") or device["role"] == "colocated"]
    return statistics.fmean(device["occupancy"] or 0.0 for device in devices)


def trained_shares(summary: Mapping[str, Any]) -> tuple[float, float]:
    """(share of long tasks among offered trajectories, among trained ones)."""
    kinds = summary["ledger"]["kinds"]
    offered = sum(kind["offered"] for kind in kinds.values())
    trained = sum(kind["trained"] for kind in kinds.values())
    return kinds["long"]["offered"] / offered, kinds["long"]["trained"] / trained


def cells(summaries: Sequence[Mapping[str, Any]], sync: Sequence[Mapping[str, Any]], updates: int) -> list[str]:
    """Medians over the runs of an arm."""
    uses = [summary["utilization"] for summary in summaries]
    shares = [trained_shares(summary) for summary in summaries]
    return [
        f"{statistics.median(3600 * updates / summary['wall_seconds'] for summary in summaries):.0f}",
        f"{statistics.median(base['wall_seconds'] / own['wall_seconds'] for own, base in zip(summaries, sync, strict=True)):.2f}",
        f"{statistics.median(summary['ledger']['tokens']['generated'] / summary['wall_seconds'] for summary in summaries):,.0f}",
        f"{statistics.median(summary['longest_gap'] for summary in summaries):.1f} s",
        f"{statistics.median(occupancy(summary, False) for summary in summaries):.0%}",
        f"{statistics.median(occupancy(summary, True) for summary in summaries):.0%}",
        f"{statistics.median(use['occupancy'] for use in uses):.0%} of {statistics.median(use['attainable_occupancy'] for use in uses):.0%}",
        f"{statistics.median(offered for offered, _ in shares):.1%} offered, {statistics.median(trained for _, trained in shares):.1%} trained",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="sync is always there")
    parser.add_argument("--out", type=Path, default=Path("runs/unlucky"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every arm")
    arguments = parser.parse_intermixed_args()
    arms = ["sync", *(arm for arm in arguments.arms if arm != "sync")]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}", flush=True)
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for pair in range(arguments.pairs):
        for arm in arms if pair % 2 == 0 else reversed(arms):
            name = arm.replace(",", "").replace(" ", "-")
            results[arm].append(run(arm, arguments.out / f"{name}-{pair}", arguments, pair))
    print("| arm | updates an hour | of sync | tokens/s | longest time without an update | sampler occupancy | learner occupancy | run | long tasks |")
    print("|---|---|---|---|---|---|---|---|---|")
    for arm, summaries in results.items():
        print(f"| {arm} | {' | '.join(cells(summaries, results['sync'], arguments.updates))} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
