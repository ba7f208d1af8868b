"""Memory and time of an update stay flat (I15): one long real run, resident memory of every process at every update.

    python benchmarks/flat.py [--recipe door] [--rollouts 20000] [--json FILE] [section.key=value ...]

Batches are small (32 rollouts), so that there are many updates, and the policy stays as it is, so that the work does. Printed for each
process and for the time of an update: the median of each quarter of the run, the last by the first, and the slope of a straight
line through all updates. The first 5 % are left out: caches and allocators fill up there. An update that stood beside an
evaluation is left out of the times, not of the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config_loading import load_settings
from headrace.event_log import read_events
from headrace.runtime.local import run_local
from headrace.runtime.processes import end_forkserver

PAGE = os.sysconf("SC_PAGE_SIZE")
FAST = {"door": ["task.options.tool_seconds=0"]}
"""What makes a recipe fast."""
STEADY = ["rollout.group_size=8", "pool.groups_per_batch=4", "learner.learning_rate=1e-9", "pool.no_signal=train"]
"""Many small batches of the same work to the end: the policy stays as it is, and groups of equal rewards are trained too."""
WARM_UP_FRACTION = 0.05


def resident_bytes(pid: int) -> int:
    """Of a process and everything it started; 0 when it has just gone."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
        children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return 0
    return own + sum(resident_bytes(child) for child in children)


class Probe:
    """A subscriber of the run's events: one sample at each update."""

    def __init__(self) -> None:
        self.samples: list[dict[str, int]] = []
        self.rollouts: list[int] = []
        self._finished = 0

    def __call__(self, line: dict[str, Any]) -> None:
        if line["event"] == "rollout_finished":
            self._finished += 1
        elif line["event"] == "updated":
            own = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
            roles = {child.name: resident_bytes(child.pid or 0) for child in multiprocessing.active_children()}
            self.samples.append({"conductor": own, **roles})
            self.rollouts.append(self._finished)


def trend(rollouts: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    """Median of each quarter, last / first, slope by 1,000 rollouts."""
    start = int(len(values) * WARM_UP_FRACTION)
    rollouts, values = rollouts[start:], values[start:]
    quarters = [float(np.median(part)) for part in np.array_split(values, 4)]
    slope = float(np.polyfit(rollouts / 1000, values, 1)[0])
    return {"quarters": quarters, "ratio": quarters[-1] / quarters[0], "slope_per_1000_rollouts": slope}


def measure(events: list[dict[str, Any]], probe: Probe) -> dict[str, Any]:
    times = np.array([event["time"] for event in events if event["event"] == "updated"])
    beside = [(event["time"] - event["seconds"], event["time"]) for event in events if event["event"] == "evaluated"]
    seconds, rollouts = np.diff(times), np.array(probe.rollouts[1:])
    alone = np.array([not any(begin < time and time - taken < end for begin, end in beside) for time, taken in zip(times[1:], seconds, strict=True)])
    names = sorted(probe.samples[-1])
    memory = {name: np.array([sample.get(name, 0) for sample in probe.samples]) / 2**20 for name in names}
    return {
        "rollouts": probe.rollouts[-1],
        "updates": len(times),
        "seconds_an_update": trend(rollouts[alone], seconds[alone]),
        "learner_seconds_an_update": trend(np.array(probe.rollouts), np.array([event["busy_seconds"] for event in events if event["event"] == "updated"])),
        "memory_mebibytes": {name: trend(np.array(probe.rollouts), values) for name, values in memory.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="door")
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    base = [*FAST.get(arguments.recipe, []), *STEADY, "evaluation.num_tasks=64", *arguments.overrides]
    batch = load_settings(arguments.recipe, base).settings.batch_trajectories
    updates = -(-arguments.rollouts // batch)
    every = max(1, updates // 8)
    resolved = load_settings(arguments.recipe, [*base, f"run.num_updates={updates}", f"evaluation.every_updates={every}", f"checkpoint.every_updates={every}"])
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}", flush=True)
    probe = Probe()
    with tempfile.TemporaryDirectory(prefix="headrace-flat-") as directory:
        outcome = asyncio.run(run_local(resolved, Path(directory) / "run", subscribers=[probe]))
        result = measure(list(read_events(outcome.run_directory / "events.jsonl")), probe)
    end_forkserver()
    show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))


def show(result: dict[str, Any]) -> None:
    print(f"{result['rollouts']:,} rollouts, {result['updates']} updates, load at the end {os.getloadavg()[0]:.1f}")
    print(f"{'median of each quarter':<24}{'1':>10}{'2':>10}{'3':>10}{'4':>10}{'4 / 1':>8}{'slope by 1,000 rollouts':>26}")
    rows = [("update, ms", result["seconds_an_update"], 1000.0), ("learner busy, ms", result["learner_seconds_an_update"], 1000.0)]
    rows += [(f"{name}, MiB", values, 1.0) for name, values in result["memory_mebibytes"].items()]
    for name, values, scale in rows:
        quarters = "".join(f"{quarter * scale:>10.2f}" for quarter in values["quarters"])
        print(f"{name:<24}{quarters}{values['ratio']:>8.3f}{values['slope_per_1000_rollouts'] * scale:>26.4f}")
    totals = [sum(parts) for parts in zip(*(values["quarters"] for values in result["memory_mebibytes"].values()), strict=True)]
    print(f"{'all processes, MiB':<24}{''.join(f'{total:>10.2f}' for total in totals)}{totals[-1] / totals[0]:>8.3f}")


if __name__ == "__main__":
    main()
