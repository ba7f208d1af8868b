"""Key steps and verification against synchronous training, in the real asynchronous system: the figures of docs/key_steps.md.

    python benchmarks/key_steps.py --length 8 --seeds 8
    python benchmarks/key_steps.py --length 16 --variant harder --arms unmarked marks verify-key --seeds 3

`door` with tools so slow, and so many rollouts in flight, that a rollout lasts about --length updates. Every arm makes the same updates on
the same tasks; scores are the exact success probability on 1,024 held-out walks, of saved checkpoints, outside the timed windows.

What synchronous training learns does not depend on how long the tools take, only its time does: the arm `sync` runs without tool waits,
and its seconds an update are measured apart, on --timed-updates updates with the tools of this length (`sync, timed`).

Goes on where it was cut, with the same --out; more seeds or arms can be added later.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.cli.main import main as headrace
from headrace.event_log import read_events
from headrace.report.summary import summarize

EVALUATE_EVERY = 5
DEVICES = 2
SLOT_BYTES = 65536  # one sequence's keys and values in door's model

TOOL_SECONDS = {8: 0.1, 16: 0.2, 32: 0.4}
"""About what makes a rollout last so many updates on two cores; what it came to is in the table (staleness of unmarked tokens)."""

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "door": (),
    "harder": ("task.options.corridor_signs=vwxyz", "model.characters=.1234ABCDEFvwxyz"),
}

UNMARKED = ("marks.environment=false",)
VERIFY_KEYS = ("pool.verify=key_steps",)
ARMS: Mapping[str, tuple[str, ...]] = {
    "unmarked-start": (*UNMARKED, "sampler.apply=rollout_start"),
    "unmarked": UNMARKED,
    "marks": ("sampler.apply=key_steps",),
    "marks-paced": ("sampler.apply=key_steps", "pool.pace_key_steps=true"),
    "verify-key": VERIFY_KEYS,
    "verify-key-lenient": (*VERIFY_KEYS, "pool.verify_lenience=4.0"),
    "verify-key-quorum": (*VERIFY_KEYS, "pool.quorum=6"),
    "verify-all": ("pool.verify=all",),
    "verify-key-unclipped": (*VERIFY_KEYS, "learner.clip_low=0.999", "learner.clip_high=1000.0"),
    "verify-random": (*VERIFY_KEYS, *UNMARKED, "marks.function=task:random_marks"),
    "verify-entropy": (*VERIFY_KEYS, *UNMARKED, "marks.entropy_fraction=0.3"),
    "verify-equal-cuts": (*VERIFY_KEYS, "pool.verify_rule=random_cuts"),
    "verify-mirror": (*VERIFY_KEYS, *UNMARKED, "marks.rules=['observation:[^1-4]']"),
}
"""Environment marks unless an arm says otherwise; every step's weights are the newest unless an arm says otherwise."""
DECIDING = ("unmarked", "marks", "verify-key", "verify-all")


@dataclass(frozen=True, slots=True)
class Row:
    """One arm in the table; means over seeds."""

    name: str
    final: float
    difference: float | None
    interval: Sequence[float] | None
    jitter: float
    seconds_an_update: float
    occupancy: float
    staleness_mean: float
    staleness_max: int
    key_staleness_mean: float | None
    key_staleness_max: int | None
    over_bound: float | None
    """Share of trained key steps over max_key_staleness."""
    refreshed: float
    """Share of the drawn tokens that verification cut off."""
    checked: float
    """Tokens of the checks' prefills, an update."""
    check_seconds: float
    """Of these prefills, an update."""
    tail: Mapping[str, float] | None
    """Seconds from a rejection until the rollout is back: median, p95, max."""
    tail_share: Mapping[str, float] | None
    """The same of a whole rollout's time."""
    num_seeds: int


def common(arguments: argparse.Namespace) -> list[str]:
    """Settings of all asynchronous arms: `length` batches in flight, admission twice as wide."""
    length = arguments.length
    in_flight = length * 128
    return [
        f"task.options.tool_seconds={TOOL_SECONDS[length]}",
        f"sampler.max_in_flight={in_flight}",
        f"sampler.kv_memory_bytes={in_flight * SLOT_BYTES}",
        f"pool.max_staleness={2 * length}",
    ]


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    options = ["--seeds", arguments.seeds, "--evaluate-every", EVALUATE_EVERY, "--run-dir", arguments.out]
    words = ["compare", "door", f"run.num_updates={arguments.updates}", *VARIANTS[arguments.variant], *arguments.settings, *map(str, options)]
    words += ["--arm", "sync", "task.options.tool_seconds=0"]
    words += ["--arm", "async", *common(arguments), *UNMARKED]  # compare has an arm of this name: the unmarked one
    for name in arguments.arms:
        if name != "unmarked":
            words += ["--arm", name, *common(arguments), *ARMS[name]]
    if code := headrace(words):
        sys.exit(code)
    result: dict[str, Any] = json.loads((arguments.out / "result.json").read_text(encoding="utf-8"))
    return result


def sync_seconds_an_update(arguments: argparse.Namespace) -> float:
    """Measured on few updates with the tools of this length."""
    directory = arguments.out / "sync-timed"
    if not is_done(directory):
        settings = ["run.mode=sync", "run.placement=colocated", f"run.num_samplers={DEVICES}", f"run.num_learner_ranks={DEVICES}"]
        settings += [f"run.num_updates={arguments.timed_updates}", f"task.options.tool_seconds={TOOL_SECONDS[arguments.length]}"]
        settings += ["evaluation.samples_per_task=0", *VARIANTS[arguments.variant], *arguments.settings]
        if code := headrace(["run", "door", *settings, "--run-dir", str(directory)]):
            sys.exit(code)
    return float(summarize(read_events(directory / "events.jsonl"))["wall_seconds"]) / arguments.timed_updates


def is_done(directory: Path) -> bool:
    path = directory / "events.jsonl"
    return path.is_file() and any(line["event"] == "run_finished" and line["status"] == "done" for line in read_events(path))


def rows(result: Mapping[str, Any]) -> Iterator[Row]:
    differences = {one["arm"]: one for one in result["comparisons"]}
    for arm in result["arms"]:
        runs = arm["runs"]
        summaries = [summarize(read_events(Path(run["run_dir"]) / "events.jsonl")) for run in runs]
        ledgers = [summary["ledger"] for summary in summaries]
        keys = [ledger["key_steps"] for ledger in ledgers]
        marked = sum(key["trained"] for key in keys) > 0
        against = differences.get(arm["name"], {})
        yield Row(
            name="unmarked" if arm["name"] == "async" else arm["name"],
            final=statistics.fmean(run["final_mean"] for run in runs),
            difference=against.get("final_difference"),
            interval=against.get("difference_interval95"),
            jitter=statistics.fmean(run["jitter"] or 0.0 for run in runs),
            seconds_an_update=statistics.fmean(run["wall_seconds"] / run["num_updates"] for run in runs),
            occupancy=statistics.fmean(sampler_occupancy(summary) for summary in summaries),
            staleness_mean=statistics.fmean(run["staleness_mean"] for run in runs),
            staleness_max=max(run["staleness_max"] for run in runs),
            key_staleness_mean=statistics.fmean(summary["staleness"]["key_mean"] for summary in summaries) if marked else None,
            key_staleness_max=max(summary["staleness"]["key_max"] for summary in summaries) if marked else None,
            over_bound=sum(key["over_bound"] for key in keys) / sum(key["trained"] for key in keys) if marked else None,
            refreshed=statistics.fmean(ledger["tokens"]["skipped"].get("refreshed", 0) / ledger["tokens"]["generated"] for ledger in ledgers),
            checked=statistics.fmean(summary["verification"]["tokens"] / summary["num_updates"] for summary in summaries),
            check_seconds=statistics.fmean(summary["verification"]["seconds"] / summary["num_updates"] for summary in summaries),
            tail=over_runs([summary["verification"]["tail_seconds"] for summary in summaries]),
            tail_share=over_runs([summary["verification"]["tail_share"] for summary in summaries]),
            num_seeds=len(runs),
        )


def over_runs(spreads: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    """Means of medians and 95th percentiles, the largest maximum."""
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return None
    return {"median": statistics.fmean(s["median"] for s in known), "p95": statistics.fmean(s["p95"] for s in known), "max": max(s["max"] for s in known)}


def sampler_occupancy(summary: Mapping[str, Any]) -> float:
    devices = [device for device in summary["utilization"]["devices"] if device["role"] != "learner"]
    return statistics.fmean(device["occupancy"] or 0.0 for device in devices)


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def tail_text(row: Row) -> str:
    if row.tail is None:
        return "-"
    share = "" if row.tail_share is None else f" ({row.tail_share['median']:.0%} / {row.tail_share['p95']:.0%} / {row.tail_share['max']:.0%})"
    return f"{row.tail['median']:.2f} / {row.tail['p95']:.2f} / {row.tail['max']:.2f}{share}"


def print_table(table: Sequence[Row], timed: float) -> None:
    print(f"sync, timed: {timed:.2f} s an update with these tools")
    print(
        "| arm | final | difference to sync (95 %) | jitter | s/update | of sync | occupancy | staleness mean/max | key mean/max | over bound | cut "
        "| checked tokens/update | check s/update | rejected until back: median/p95/max s (of a rollout) | seeds |"
    )
    print("|" + 15 * "---|")
    for row in table:
        seconds = timed if row.name == "sync" else row.seconds_an_update
        interval = "" if row.interval is None else f" ({100 * row.interval[0]:+.1f} to {100 * row.interval[1]:+.1f})"
        difference = "-" if row.difference is None else f"{100 * row.difference:+.1f}{interval}"
        keys = "-" if row.key_staleness_mean is None else f"{row.key_staleness_mean:.1f} / {row.key_staleness_max}"
        print(
            f"| {row.name} | {row.final:.3f} | {difference} | {row.jitter:.3f} | {seconds:.2f} | {seconds / timed:.2f} | {row.occupancy:.0%} "
            f"| {row.staleness_mean:.1f} / {row.staleness_max} | {keys} | {shown(row.over_bound, '.0%')} | {row.refreshed:.1%} "
            f"| {row.checked:,.0f} | {row.check_seconds:.3f} | {tail_text(row)} | {row.num_seeds} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, choices=sorted(TOOL_SECONDS), default=8, help="updates that a rollout lasts, about")
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="door")
    parser.add_argument("--arms", nargs="+", choices=sorted(ARMS), default=list(DECIDING))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=70)
    parser.add_argument("--settings", nargs="*", default=[], metavar="section.key=value", help="of all arms; another --out, please")
    parser.add_argument("--timed-updates", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="default: runs/key-steps-VARIANT-LENGTH")
    arguments = parser.parse_args()
    arguments.out = arguments.out or Path(f"runs/key-steps-{arguments.variant}-{arguments.length}")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}", flush=True)
    result = compare(arguments)
    print_table(list(rows(result)), sync_seconds_an_update(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
