"""What the governor does for a run that a learning rate ruins, and what it leaves alone. The door recipe, the same seeds in every arm.

    python benchmarks/governor.py                     # 3 seeds, 3 arms: about 10 minutes on 2 quiet cores
    python benchmarks/governor.py --seeds 5           # what is there is kept, the rest is run

ruined      the learning rate rises to 0.02 over 25 updates, 33 times the recipe's; nothing is refused, nothing gone back to
governed    the same, governor.on_failure = roll_back, reward_drop = 0.5, learning_rate_factor = 0.3, a checkpoint every 3 updates
healthy     the recipe's own learning rate with the whole governor on (roll_back, reward_drop, adapt_staleness): it must do nothing

A run is started again unless it ended. `success` is the evaluation at the end ("-": the run gave up before); `reward` the mean of the last 10
batches with signal; `undone` updates made and taken back; `back` seconds in which the run stood still to go back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import shutil
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.config_loading import load_settings
from headrace.errors import HeadraceError
from headrace.event_log import read_events
from headrace.runtime.local import run_local
from headrace.runtime.processes import end_forkserver

TOO_HIGH = ["learner.learning_rate=0.02", "learner.warmup_updates=25"]
GOES_BACK = ["governor.on_failure=roll_back", "governor.reward_drop=0.5", "governor.learning_rate_factor=0.3"]
ARMS = {
    "ruined": [*TOO_HIGH, "governor.explosion_factor=0", "governor.on_failure=skip"],
    "governed": [*TOO_HIGH, *GOES_BACK],
    "healthy": [*GOES_BACK, "governor.adapt_staleness=true"],
}


def events_of(directory: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """Of a run that has ended, which is made first where it is not there."""
    path = directory / "events.jsonl"
    events = list(read_events(path)) if path.exists() else []
    if not events or events[-1]["event"] != "run_finished" or events[-1]["status"] == "interrupted":
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(HeadraceError):  # the event log says how it ended
            asyncio.run(run_local(load_settings("door", overrides), directory))
        events = list(read_events(path))
    return events


def row(events: list[dict[str, Any]]) -> dict[str, Any]:
    updates = [event for event in events if event["event"] == "updated"]
    returns = [event for event in events if event["event"] == "run_resumed"]
    governed = [event["action"] for event in events if event["event"] == "governed"]
    end = events[-1]
    evaluations = [event["mean"] for event in events if event["event"] == "evaluated"]
    return {
        "success": evaluations[-1] if end["status"] == "done" else None,
        "reward": statistics.fmean(event["reward_mean"] for event in updates[-10:]),
        "updates": end["version"],
        "undone": sum(event["undone_updates"] for event in returns),
        "returns": len(returns),
        "back": sum(event["seconds"] for event in returns),
        "seconds": end["time"],
        "actions": ", ".join(f"{governed.count(action)} {action}" for action in sorted(set(governed))) or "none",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=45)
    parser.add_argument("--directory", type=Path, default=Path("governor-runs"), help="where the runs are kept")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}")
    print("| arm | seed | success | reward | updates | undone | returns | back, s | seconds | what the governor did |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    common = [f"run.num_updates={arguments.updates}", "evaluation.num_tasks=256", "checkpoint.every_updates=3", "run.pin_devices=false"]
    for seed in range(1, arguments.seeds + 1):
        for arm, overrides in ARMS.items():
            found = row(events_of(arguments.directory / f"{arm}-{seed}", [*common, f"run.seed={seed}", *overrides]))
            success = "-" if found["success"] is None else f"{found['success']:.2f}"
            numbers = f"{found['updates']} | {found['undone']} | {found['returns']} | {found['back']:.1f} | {found['seconds']:.0f}"
            print(f"| {arm} | {seed} | {success} | {found['reward']:.2f} | {numbers} | {found['actions']} |", flush=True)
    end_forkserver()


if __name__ == "__main__":
    main()
