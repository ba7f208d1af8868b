"""A long run in real processes with roles that cost nothing: does what the run itself keeps stay flat over 100,000 rollouts (I15)?

    python benchmarks/soak.py [--rollouts 100000] [--json FILE] [section.key=value ...]

Conductor, pool, journal, event log, trajectory store, processes and wires are the real ones; sampler and learner are scripted
(tests/fakes/hosts.py), so that the hundred thousand take minutes. Printed, as by flat.py, for each process and quantity: the median of each
quarter of the run, the last by the first, and the slope by 1,000 rollouts: resident memory, open descriptors, threads, the size of the journal,
event log bytes a rollout, seconds an update. In the end: how long it takes, and how much memory, to read the log as the command's end does.
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
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from flat import PAGE, resident_bytes, trend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fakes.hosts import install_scripted_roles
from headrace.config_loading import load_settings
from headrace.event_log import read_events
from headrace.report.summary import summarize
from headrace.runtime.local import run_local
from headrace.runtime.processes import end_forkserver

LETTERS = Path(__file__).parents[1] / "tests/end_to_end/letters"
SETTINGS = ["rollout.group_size=8", "pool.groups_per_batch=4", "pool.no_signal=train", "run.num_samplers=2", "run.pin_devices=false"]
SETTINGS += ["checkpoint.every_updates=50", "evaluation.every_updates=200", "evaluation.metric=logprob_of_a", "task.options.wait_seconds=0"]
EVERY = 10
"""Updates between two samples."""


class Probe:
    """A subscriber of the run's events."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rollouts = self._updates = 0
        self.rows: list[dict[str, float]] = []
        self._last = (0.0, 0, 0)

    def __call__(self, line: dict[str, Any]) -> None:
        if line["event"] == "rollout_finished":
            self._rollouts += 1
        elif line["event"] == "updated":
            self._updates += 1
            if self._updates % EVERY == 0:
                self._sample()

    def _sample(self) -> None:
        now, size = time.monotonic(), (self._directory / "events.jsonl").stat().st_size
        before, rollouts, bytes_before = self._last
        self._last = (now, self._rollouts, size)
        own = Path("/proc/self/statm").read_text().split()[1]
        row = {"conductor, MiB": int(own) * PAGE / 2**20}
        row |= {f"{child.name}, MiB": resident_bytes(child.pid or 0) / 2**20 for child in multiprocessing.active_children()}
        row["conductor descriptors"] = len(os.listdir("/proc/self/fd"))
        row["conductor threads"] = len(os.listdir("/proc/self/task"))
        for child in multiprocessing.active_children():
            row[f"{child.name} descriptors"] = len(os.listdir(f"/proc/{child.pid}/fd"))
        row["journal, MiB"] = sum(path.stat().st_size for path in self._directory.glob("pool.sqlite*")) / 2**20
        row["checkpoints and the like, files"] = sum(1 for path in self._directory.rglob("*") if path.is_file() and path.suffix != ".parquet")
        if before:
            row["log bytes a rollout"] = (size - bytes_before) / max(1, self._rollouts - rollouts)
            row["update, ms"] = (now - before) / EVERY * 1000
            self.rows.append({"rollouts": self._rollouts, **row})


def main() -> None:
    # the forkserver loads the scripted roles by itself
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], *filter(None, [os.environ.get("PYTHONPATH")])])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}", flush=True
    )
    install_scripted_roles()
    resolved = load_settings(LETTERS, [*SETTINGS, f"run.num_updates={-(-arguments.rollouts // 32)}", *arguments.overrides])
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder:
        directory, started = Path(folder) / "run", time.monotonic()
        probe = Probe(directory)
        asyncio.run(run_local(resolved, directory, subscribers=[probe]))
        end_forkserver()
        seconds, log = time.monotonic() - started, directory / "events.jsonl"
        trajectories = sum(path.stat().st_size for path in (directory / "trajectories").rglob("*") if path.is_file())
        print(f"{probe.rows[-1]['rollouts']:,.0f} rollouts, {len(probe.rows) * EVERY:,} updates in {seconds:.0f} s; load at the end {os.getloadavg()[0]:.1f}")
        show(probe.rows)
        print(f"events.jsonl {log.stat().st_size / 2**20:.1f} MiB, trajectories {trajectories / 2**20:.1f} MiB")
        read(log)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(probe.rows))


def show(rows: list[dict[str, float]]) -> None:
    rollouts = np.array([row["rollouts"] for row in rows])
    print(f"{'median of each quarter':<34}{'1':>10}{'2':>10}{'3':>10}{'4':>10}{'4 / 1':>8}{'slope by 1,000 rollouts':>26}")
    for name in [name for name in rows[-1] if name != "rollouts"]:
        found = trend(rollouts, np.array([row.get(name, 0.0) for row in rows]))
        quarters = "".join(f"{quarter:>10.2f}" for quarter in found["quarters"])
        print(f"{name:<34}{quarters}{found['ratio'] if found['quarters'][0] else 1.0:>8.3f}{found['slope_per_1000_rollouts']:>26.4f}")


def read(log: Path) -> None:
    """As the end of `headrace run` does."""
    tracemalloc.start()
    started = time.process_time()
    summarize(read_events(log))
    seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"read and summarized in {seconds:.1f} s of CPU time (traced), at most {peak / 2**20:.1f} MiB of objects")


if __name__ == "__main__":
    main()
