"""How long a run is without a process that is killed: kill -9 at chosen updates, then until it is up and at full speed again.

    python benchmarks/survival.py                       # door, one sampler, 5 kills
    python benchmarks/survival.py --samplers 2          # the other one goes on meanwhile
    python benchmarks/survival.py --victim learner-0    # the run goes back to its newest checkpoint (one every 6 updates)
    python benchmarks/survival.py --victim learner-0 checkpoint.memory_copy=true    # or to the copy, where that is newer
    python benchmarks/survival.py --victim conductor    # nobody is left who could end its children

found     from the kill until the conductor knows
up        from the kill until the successor samples under the newest weights: back-off (0.5 s: each loss counts as the first), process, model, weights;
          of the learner: until the run goes on from the checkpoint, every process of it new
full      from the kill until the first report (about one a second) in which it draws 0.9 of the median tokens/s of its reports; of the learner:
          until sampler-0 does, and an update has been made
gone      of the conductor: from the kill until the last process that it had started has ended. Each run is killed once, a random while after its
          first update, and `headrace resume` takes it to its end
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.config_loading import load_settings
from headrace.event_log import read_events
from headrace.runtime.local import run_local
from headrace.runtime.processes import end_forkserver

SAMPLER = "sampler-0"
FULL = 0.9


def killed_run(recipe: str, victim: str, kills: int, every: int, overrides: list[str], directory: Path) -> list[float]:
    """When each kill was, seconds of the event log."""
    moments: list[float] = []

    def kill(event: dict[str, Any]) -> None:
        if event["event"] == "updated" and len(moments) < kills and event["version"] == (len(moments) + 1) * every:
            next(process for process in multiprocessing.active_children() if process.name == victim).kill()
            moments.append(event["time"])

    own = [f"run.num_updates={(kills + 1) * every}", "limits.max_restarts=1000", "limits.restart_window_seconds=2", "evaluation.every_updates=0"]
    own += ["checkpoint.every_updates=6", *overrides] if victim.startswith("learner") else overrides
    asyncio.run(run_local(load_settings(recipe, own), directory, subscribers=[kill], evaluate=False))
    return moments


def delays(events: list[dict[str, Any]], victim: str, moment: float, usual: float) -> dict[str, float]:
    """Seconds from a kill until each of `found`, `up`, `full`; `usual`: tokens/s of the sampler."""
    after = [event for event in events if event["time"] >= moment]
    is_learner = victim.startswith("learner")
    lost, back = ("learner", "run_resumed") if is_learner else (victim, "role_restarted")
    found = next(event["time"] for event in after if event["event"] == "role_lost" and event["role"] == lost)
    up = next(event["time"] for event in after if event["event"] == back and event["role"] in (victim, "conductor"))
    again = [event for event in after if event["time"] > up]
    full = next(
        (
            event["time"] - event["activity"]["seconds"]
            for event in again
            if event["event"] == "worker_active" and event["role"] == SAMPLER and speed(event) >= FULL * usual
        ),
        float("nan"),
    )
    learned = next((event["time"] for event in again if event["event"] == "updated"), float("nan")) if is_learner else up
    return {"found": found - moment, "up": up - moment, "full": max(full, up, learned) - moment}


def children(pid: int) -> set[int]:
    """All processes that a process has started, and theirs. By what the kernel knows of each: a child whose parent has ended is nobody's."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, left = set(), [pid]
    while left:
        new = parents.get(left.pop(), [])
        found |= set(new)
        left += new
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_seconds(recipe: str, overrides: list[str], directory: Path, delay: float) -> float:
    """From the kill of a run's conductor until its last process has ended; the run is then taken to its end."""
    own = ["run.num_updates=1000000", "evaluation.every_updates=0", "evaluation.samples_per_task=0", "checkpoint.every_updates=6", *overrides]
    command = [sys.executable, "-m", "headrace.cli"]
    with subprocess.Popen([*command, "run", recipe, *own, "--run-dir", str(directory)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as conductor:
        events = directory / "events.jsonl"
        while not (events.exists() and b'"event":"updated"' in events.read_bytes()):
            if conductor.poll() is not None:
                raise SystemExit(f"the run ended by itself with exit code {conductor.returncode}")
            time.sleep(0.05)
        time.sleep(delay)
        left = children(conductor.pid)
        conductor.kill()
        killed = time.monotonic()
        while any(map(lives, left)):
            time.sleep(0.002)
        seconds = time.monotonic() - killed
    reached = max(event["version"] for event in read_events(events) if event["event"] == "updated")
    subprocess.run([*command, "resume", str(directory), f"run.num_updates={reached + 5}"], check=True, capture_output=True)
    return seconds


def kill_conductors(arguments: argparse.Namespace, overrides: list[str]) -> None:
    delays, values = random.Random(0), []
    for _ in range(arguments.kills):
        with tempfile.TemporaryDirectory(prefix="headrace-survival-") as folder:
            values.append(gone_seconds(arguments.recipe, overrides, Path(folder) / "run", delays.uniform(0.0, 5.0)))
    print_row("gone", values)


def print_row(name: str, values: list[float]) -> None:
    print(f"{name:6} median {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f}); each {' '.join(f'{value:.2f}' for value in values)}")


def speed(event: dict[str, Any]) -> float:
    return float(event["activity"]["sampled_tokens"] / max(event["activity"]["seconds"], 1e-6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="door")
    parser.add_argument("--victim", default=SAMPLER, help="sampler-0, a rank of the learner (learner-0), or conductor")
    parser.add_argument("--samplers", type=int, default=1)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=int, default=12, help="updates between two kills")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}")
    overrides = [f"run.num_samplers={arguments.samplers}", *arguments.overrides]
    if arguments.victim == "conductor":
        kill_conductors(arguments, overrides)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-survival-") as folder:
        directory = Path(folder) / "run"
        moments = killed_run(arguments.recipe, arguments.victim, arguments.kills, arguments.every, overrides, directory)
        events = list(read_events(directory / "events.jsonl"))
    end_forkserver()
    usual = statistics.median(speed(event) for event in events if event["event"] == "worker_active" and event["role"] == SAMPLER)
    rows = [delays(events, arguments.victim, moment, usual) for moment in moments]
    for name in ("found", "up", "full"):
        print_row(name, [row[name] for row in rows])
    ledger = [event["ledger"] for event in events if event["event"] == "ledger"][-1]
    lost, generated = ledger["tokens"]["failed"].get("worker_lost", 0), ledger["tokens"]["generated"]
    undone = [event["undone_updates"] for event in events if event["event"] == "run_resumed"]
    if undone:
        print(f"updates made again: {sum(undone)} ({' '.join(map(str, undone))})")
    print(f"tokens lost with their worker: {lost:,} of {generated:,} ({lost / generated:.1%}); {usual:,.0f} tokens/s as a rule")


if __name__ == "__main__":
    main()
