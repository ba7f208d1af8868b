"""How long a run is without a sampler whose process is killed: kill -9 at chosen updates, then until it is up and at full speed again.

    python benchmarks/survival.py                       # door, one sampler, 5 kills
    python benchmarks/survival.py --samplers 2          # the other one goes on meanwhile

found     from the kill until the conductor knows
up        from the kill until the successor samples under the newest weights: back-off (0.5 s: each loss counts as the first), process, model, weights
full      from the kill until the first report (about one a second) in which it draws 0.9 of the median tokens/s of its reports
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.config_loading import load_settings
from headrace.events import read_events
from headrace.runtime.local import run_local
from headrace.runtime.processes import end_forkserver

VICTIM = "sampler-0"
FULL = 0.9


def killed_run(recipe: str, kills: int, every: int, overrides: list[str], directory: Path) -> list[float]:
    """When each kill was, seconds of the event log."""
    moments: list[float] = []

    def kill(event: dict[str, Any]) -> None:
        if event["event"] == "updated" and event["version"] % every == 0 and event["version"] <= kills * every:
            next(process for process in multiprocessing.active_children() if process.name == VICTIM).kill()
            moments.append(event["time"])

    own = [f"run.num_updates={(kills + 1) * every}", "limits.max_restarts=1000", "limits.restart_window_seconds=2", "evaluation.every_updates=0", *overrides]
    asyncio.run(run_local(load_settings(recipe, own), directory, subscribers=[kill], evaluate=False))
    return moments


def delays(events: list[dict[str, Any]], moment: float, usual: float) -> dict[str, float]:
    """Seconds from a kill until each of `found`, `up`, `full`; `usual`: tokens/s."""
    own = [event for event in events if event["role"] == VICTIM and event["time"] >= moment]
    found = next(event["time"] for event in own if event["event"] == "role_lost")
    up = next(event["time"] for event in own if event["event"] == "role_restarted")
    full = next(
        (
            event["time"] - event["activity"]["seconds"]
            for event in own
            if event["event"] == "worker_active" and event["time"] > up and speed(event) >= FULL * usual
        ),
        float("nan"),
    )
    return {"found": found - moment, "up": up - moment, "full": max(full, up) - moment}


def speed(event: dict[str, Any]) -> float:
    return float(event["activity"]["sampled_tokens"] / max(event["activity"]["seconds"], 1e-6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="door")
    parser.add_argument("--samplers", type=int, default=1)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=int, default=12, help="updates between two kills")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}")
    with tempfile.TemporaryDirectory(prefix="headrace-survival-") as folder:
        directory = Path(folder) / "run"
        overrides = [f"run.num_samplers={arguments.samplers}", *arguments.overrides]
        moments = killed_run(arguments.recipe, arguments.kills, arguments.every, overrides, directory)
        events = list(read_events(directory / "events.jsonl"))
    end_forkserver()
    usual = statistics.median(speed(event) for event in events if event["event"] == "worker_active" and event["role"] == VICTIM)
    rows = [delays(events, moment, usual) for moment in moments]
    for name in ("found", "up", "full"):
        values = [row[name] for row in rows]
        print(
            f"{name:6} median {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f}); each {' '.join(f'{value:.2f}' for value in values)}"
        )
    ledger = [event["ledger"] for event in events if event["event"] == "ledger"][-1]
    lost, generated = ledger["tokens"]["failed"].get("worker_lost", 0), ledger["tokens"]["generated"]
    print(f"tokens lost with their worker: {lost:,} of {generated:,} ({lost / generated:.1%}); {usual:,.0f} tokens/s as a rule")


if __name__ == "__main__":
    main()
