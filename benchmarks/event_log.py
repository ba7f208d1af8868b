"""What the event log and the recorded trajectories cost, as a share of an update's time (less than 1 % is claimed).

    python benchmarks/event_log.py RUN          # a finished run directory of a real run

Emits the run's own events again, one by one, into a new file, and times that against the run's wall time. Then hands the run's own
trajectories to a store as often as the run did and measures the CPU seconds of its thread. Prints both shares, bytes a trajectory
and a role and second, and the time to read the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from headrace import events as ev
from headrace.event_log import EventLog, read_events
from headrace.report.summary import summarize

KINDS = {value.name: value for value in vars(ev).values() if isinstance(value, type) and issubclass(value, ev.Event) and value is not ev.Event}
REPEATS = 5


def as_event(line: dict[str, Any]) -> ev.Event:
    """An event of the same class and size; what was a record inside it is a mapping now, which costs a little less than the record."""
    return KINDS[line["event"]](**{key: value for key, value in line.items() if key not in ("event", "time")})


def emit_seconds(lines: list[dict[str, Any]]) -> float:
    """Least of several, in all: building the events is left out, it is what the conductor would do anyway."""
    events = [as_event(line) for line in lines]
    best = float("inf")
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as directory:
            log = EventLog(Path(directory) / "events.jsonl", time.monotonic)
            started = time.process_time()
            for event in events:
                log.emit(event)
            best = min(best, time.process_time() - started)
            log.close()
    return best


def recording_seconds(run: Path) -> tuple[float, int]:
    """(CPU seconds of taking apart and writing the run's trajectories, how many)."""
    import pyarrow.parquet as parquet

    from headrace.runtime.trajectory_store import TrajectoryStore
    from headrace.types import FinishedRollout, RetireReason

    rollouts = [
        FinishedRollout(summary=trajectory.summary(), payload=trajectory.to_bytes())
        for path in sorted((run / "trajectories").glob("*.parquet"))
        for trajectory in map(as_trajectory, parquet.read_table(path).to_pylist())
    ]
    with tempfile.TemporaryDirectory() as directory:
        store = TrajectoryStore(Path(directory) / "trajectories")
        started = time.process_time()
        for rollout in rollouts:
            store.finished(rollout)
            store.retired(rollout.summary.key, RetireReason.TRAINED)
        store.close()
        return time.process_time() - started, len(rollouts)


def as_trajectory(row: dict[str, Any]) -> Any:
    from headrace.types import EndReason, PolicyVersion, RolloutKey, StepRecord, StopReason, Trajectory, VersionSpan

    steps, taken = [], 0
    for index, (start, end) in enumerate(zip(row["action_starts"], row["action_ends"], strict=True)):
        spans: list[VersionSpan] = []
        for position in range(start, end):
            version = PolicyVersion(0, row["versions"][taken + position - start])
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=position + 1)
            else:
                spans.append(VersionSpan(version=version, start=position, end=position + 1))
        taken += end - start
        key_weight = float(index in row["key_steps"])
        steps.append(StepRecord(action_start=start, action_end=end, version_spans=tuple(spans), key_weight=key_weight, reward=0.0, stop_reason=StopReason.STOP))
    return Trajectory(
        key=RolloutKey(row["group"], row["member"], row["attempt"]),
        task_id=row["task_id"],
        task_kind=row["kind"],
        tokens=tuple(row["tokens"]),
        sampler_logprobs=tuple(row["logprobs"]),
        steps=tuple(steps),
        reward=row["reward"],
        end_reason=EndReason(row["end"]),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory of a real run that has ended")
    parser.add_argument("--json", action="store_true", help="print one object")
    arguments = parser.parse_args()
    path = arguments.run / "events.jsonl"
    lines = list(read_events(path))
    summary = summarize(lines)
    wall, updates = summary["wall_seconds"], summary["num_updates"]
    timed = [line for line in lines if line["event"] in KINDS]
    emitting = emit_seconds(timed)
    recording, recorded = recording_seconds(arguments.run)
    started = time.process_time()
    summarize(read_events(path))
    reading = time.process_time() - started
    trajectories = sum(line["event"] == "rollout_finished" for line in lines)
    roles = len(summary["utilization"]["devices"]) + 1
    size = path.stat().st_size
    result = {
        "run": str(arguments.run),
        "updates": updates,
        "seconds_an_update": wall / updates,
        "events": len(timed),
        "emit_microseconds_an_event": emitting / len(timed) * 1e6,
        "emit_share_of_run": emitting / wall,
        "recorded": recorded,
        "record_microseconds_a_trajectory": recording / max(1, recorded) * 1e6,
        "record_share_of_run": recording / wall,
        "bytes": size,
        "bytes_allowed": 300 * trajectories + 2000 * roles * lines[-1]["time"],
        "read_and_summarize_seconds": reading,
        "events_by_kind": dict(Counter(line["event"] for line in lines)),
    }
    if arguments.json:
        print(json.dumps(result))
        return 0
    for key, value in result.items():
        print(f"{key:<34} {value:.6g}" if isinstance(value, float) else f"{key:<34} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
