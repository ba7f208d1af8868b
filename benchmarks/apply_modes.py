"""What each way of taking up new weights costs (sampler.apply, sampler.update_mode, sampler.recompute_kv), in the real asynchronous system.

    python benchmarks/apply_modes.py --pairs 5

Two kinds of work: `door` (walks of one-token actions with tools of 100 ms between them, 512 in flight, key steps marked by the environment),
and `arithmetic` (one long action a rollout, where waiting for running actions or drawing them again costs most). The arms of each run in turn,
forwards and backwards by turns; figures are medians over the rounds. No evaluation. Goes on where it was cut, with the same --out.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from headrace.cli.main import main as headrace
from headrace.event_log import read_events
from headrace.report.summary import summarize


@dataclass(frozen=True, slots=True)
class Work:
    """A recipe, how many updates of it, and its arms; the first one is what the others are compared with."""

    recipe: str
    num_updates: int
    arms: Mapping[str, Sequence[str]]
    settings: Sequence[str] = ()
    """Of all arms."""


WORKS = (
    Work(
        "door",
        40,
        {
            "every_step, keep": (),
            "every_step, keep, recompute_kv": ("sampler.recompute_kv=true",),
            "key_steps": ("sampler.apply=key_steps",),
            "rollout_start": ("sampler.apply=rollout_start",),
            "every_step, wait": ("sampler.update_mode=wait",),
            "every_step, abort": ("sampler.update_mode=abort",),
        },
        settings=("task.options.tool_seconds=0.1", "sampler.max_in_flight=512"),
    ),
    Work(
        "arithmetic",
        8,
        {
            "every_step, keep": (),
            "every_step, keep, recompute_kv": ("sampler.recompute_kv=true",),
            "every_step, wait": ("sampler.update_mode=wait",),
            "every_step, abort": ("sampler.update_mode=abort",),
            "rollout_start": ("sampler.apply=rollout_start",),
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. Per update means per update of the learner."""

    seconds_an_update: float
    updates_per_hour: float
    load_seconds: float
    """Copying weights into the samplers' models, per update that a sampler took up."""
    pause_seconds: float
    """Samplers idle for weights, copying included, per update."""
    weights_share: float
    """The same, of the samplers' time."""
    drained_share: float
    """Decode slots that stayed empty for weights while somebody waited, of all slots x seconds."""
    delay_seconds: float
    """From seeing an update to taking it up, mean."""
    recomputed_tokens: float
    """Whose keys and values had been computed before, per update."""
    discarded_tokens: float
    """Drawn and thrown away (abort), per update."""
    staleness: float
    key_staleness: float | None


def run(work: Work, number: int, directory: Path, seed: int, arguments: argparse.Namespace) -> Figures:
    """Runs it unless it is there already."""
    if not is_done(directory):
        updates = arguments.updates or work.num_updates
        settings = [f"run.num_updates={updates}", f"run.seed={seed}", "run.record_trajectories=none", "evaluation.samples_per_task=0"]
        settings += work.settings
        if code := headrace(["run", work.recipe, *settings, *list(work.arms.values())[number], "--run-dir", str(directory)]):
            sys.exit(code)
    return figures(directory / "events.jsonl")


def is_done(directory: Path) -> bool:
    path = directory / "events.jsonl"
    return path.is_file() and any(line["event"] == "run_finished" and line["status"] == "done" for line in read_events(path))


def figures(path: Path) -> Figures:
    lines = list(read_events(path))
    summary = summarize(lines)
    updates = sum(line["event"] == "updated" for line in lines)
    active = [line["activity"] for line in lines if line["event"] == "worker_active"]
    slot_seconds = sum(activity["seconds"] for activity in active) * slots(path.parent)
    staleness, tokens = summary["staleness"], summary["ledger"]["tokens"]
    return Figures(
        seconds_an_update=summary["wall_seconds"] / updates,
        updates_per_hour=3600 * updates / summary["wall_seconds"],
        load_seconds=sum(activity["apply_seconds"] for activity in active) / max(1, sum(activity["applied_updates"] for activity in active)),
        pause_seconds=sum(activity["idle_seconds"].get("weights", 0.0) for activity in active) / updates,
        weights_share=sum(activity["idle_seconds"].get("weights", 0.0) for activity in active) / sum(activity["seconds"] for activity in active),
        drained_share=sum(activity["drained_slot_seconds"] for activity in active) / slot_seconds,
        delay_seconds=summary["apply_delay_seconds"] or 0.0,
        recomputed_tokens=sum(activity.get("recomputed_tokens", 0) for activity in active) / updates,
        discarded_tokens=tokens["failed"].get("aborted", 0) / updates,
        staleness=staleness["mean"],
        key_staleness=staleness["key_mean"],
    )


def slots(directory: Path) -> int:
    """Decode slots of the run's sampler."""
    return int(tomllib.loads((directory / "config.toml").read_text(encoding="utf-8"))["sampler"]["max_running"])


def print_table(work: Work, results: Mapping[str, Sequence[Figures]]) -> None:
    print(f"\n{work.recipe}:\n")
    print(
        "| arm | s an update | updates an hour | of the first | load, ms an update | idle for weights, ms an update | share | slots drained | taken up after "
        "| recomputed tokens an update | discarded | staleness | of key steps |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    first = next(iter(results.values()))

    def median(arm: Sequence[Figures], name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in arm))

    for name, arm in results.items():
        ratios = [one.updates_per_hour / base.updates_per_hour for one, base in zip(arm, first, strict=True)]
        keys = [one.key_staleness for one in arm if one.key_staleness is not None]
        print(
            f"| {name} | {median(arm, 'seconds_an_update'):.3f} "
            f"| {median(arm, 'updates_per_hour'):,.0f} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {1000 * median(arm, 'load_seconds'):.1f} | {1000 * median(arm, 'pause_seconds'):.1f} | {median(arm, 'weights_share'):.1%} "
            f"| {median(arm, 'drained_share'):.1%} "
            f"| {median(arm, 'delay_seconds'):.3f} s | {median(arm, 'recomputed_tokens'):,.0f} | {median(arm, 'discarded_tokens'):,.0f} "
            f"| {median(arm, 'staleness'):.2f} | {f'{statistics.median(keys):.2f}' if keys else '-'} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="rounds: every arm once each")
    parser.add_argument("--updates", type=int, default=0, help="of every run; 0: " + ", ".join(f"{work.num_updates} of {work.recipe}" for work in WORKS))
    parser.add_argument("--recipes", nargs="+", choices=[work.recipe for work in WORKS], default=[work.recipe for work in WORKS])
    parser.add_argument("--out", type=Path, default=Path("runs/apply-modes"))
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}", flush=True)
    for work in (work for work in WORKS if work.recipe in arguments.recipes):
        results: dict[str, list[Figures]] = {name: [] for name in work.arms}
        for pair in range(arguments.pairs):
            order: list[tuple[int, str]] = list(enumerate(work.arms))
            for number, name in order if pair % 2 == 0 else reversed(order):
                results[name].append(run(work, number, arguments.out / f"{work.recipe}-{number}-{pair}", pair, arguments))
        print_table(work, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
