"""SIGKILL at random moments over samplers, learner and conductor of runs in real processes; what was killed when, and what came of it.

    python benchmarks/chaos.py                          # 200 kills, scripted roles that cost nothing; processes, journal and files are real
    python benchmarks/chaos.py --real --kills 24        # the tiny model of tests/end_to_end/letters, which learns; and undisturbed runs beside it

A run that a kill ends is resumed. After the last kill each run goes on to its end and is looked at: the ledger closes, every rollout ever
reserved is, in the surviving lineage, trained once, retired with a reason, or in the pool (I12), the surviving updates are 1, 2, 3, ...
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fakes.chaos import CONDUCTOR, Kill, Story, check

ROLES = ("sampler-0", "sampler-1", "learner-0", CONDUCTOR)
PER_STORY = {"scripted": 20, "real": 8}
SCRIPTED = ("run.num_updates=1000000", "checkpoint.every_updates=10", "evaluation.every_updates=0", "evaluation.metric=logprob_of_a")
REAL = ("run.num_updates=400", "checkpoint.every_updates=10", "evaluation.every_updates=0", "evaluation.num_tasks=64")
MODES = (("run.mode=async", "pool.max_staleness=3"), ("run.mode=sync", "pool.max_staleness=0"))


def scripted_story(directory: Path, seed: int, kills: int, delay_seconds: float, training_fraction: float) -> Story:
    story = Story(kind="scripted", directory=directory, seed=seed, overrides=(*SCRIPTED, *MODES[seed % len(MODES)]))
    try:
        story.tell(kills, roles=ROLES, delay_seconds=delay_seconds, training_fraction=training_fraction)
        story.interrupt()
        story.finish(f"run.num_updates={story.reached() + 5}")
        check(story)
    finally:
        story.end()
    return story


def real_story(directory: Path, seed: int, kills: int, delay_seconds: float, training_fraction: float) -> Story:
    story = Story(kind="real", directory=directory, seed=seed, overrides=(*REAL, *MODES[0]))
    try:
        story.tell(kills, roles=ROLES, delay_seconds=delay_seconds, training_fraction=training_fraction)
        story.finish()
        check(story)
    finally:
        story.end()
    return story


def final(story: Story) -> dict[str, Any]:
    return [line for line in story.events() if line["event"] == "evaluated"][-1]


def table(kills: list[Kill]) -> str:
    rows: dict[tuple[str, str], list[Kill]] = defaultdict(list)
    for kill in kills:
        rows[kill.role.partition("-")[0], kill.phase].append(kill)
    lines = ["| killed | while the run was | kills | what came of it | next update after, s: median (max) |", "|---|---|---|---|---|"]
    for (role, phase), some in sorted(rows.items()):
        outcomes = Counter(kill.outcome or "the next kill came first" for kill in some)
        times = [kill.next_update_seconds for kill in some if kill.next_update_seconds is not None]
        what = "; ".join(f"{count} x {outcome}" for outcome, count in outcomes.most_common())
        seconds = f"{statistics.median(times):.2f} ({max(times):.2f})" if times else "-"
        lines.append(f"| {role} | {phase} | {len(some)} | {what} | {seconds} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--delay", type=float, default=2.0, help="longest time between two kills, seconds")
    parser.add_argument("--training", type=float, default=0.7, help="fraction of the kills that wait until the run makes updates again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {datetime.now(UTC):%Y-%m-%d}: {sys.argv}")
    kind, started = "real" if arguments.real else "scripted", time.monotonic()
    stories: list[Story] = []
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as folder:
        while (left := arguments.kills - sum(len(story.kills) for story in stories)) > 0:
            seed = arguments.seed + len(stories)
            tell = real_story if arguments.real else scripted_story
            story = tell(Path(folder) / f"run{seed}", seed, min(left, PER_STORY[kind]), arguments.delay, arguments.training)
            stories.append(story)
            if arguments.real:
                calm = real_story(Path(folder) / f"calm{seed}", seed, 0, 0.0, 0.0)
                pairs.append((final(story), final(calm)))
            print(f"seed {seed}: {len(story.kills)} kills, {story.num_resumed} resumes, all accounted for; {time.monotonic() - started:.0f} s", flush=True)
    kills = [kill for story in stories for kill in story.kills]
    print(f"\n{len(kills)} kills in {len(stories)} runs\n{table(kills)}")
    gone = [kill.gone_seconds for kill in kills if kill.gone_seconds is not None]
    if gone:
        print(f"\nchildren of a killed conductor gone after: median {statistics.median(gone):.2f} s, at most {max(gone):.2f} s")
    for hit, calm_end in pairs:
        print(f"final evaluation: killed {hit['mean']:.3f} {hit['interval95']}, undisturbed {calm_end['mean']:.3f} {calm_end['interval95']}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([[kill.role, kill.phase, kill.outcome, kill.next_update_seconds, kill.gone_seconds] for kill in kills]))


if __name__ == "__main__":
    main()
