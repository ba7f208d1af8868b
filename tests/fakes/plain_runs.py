"""Whole scripted runs without marks, quorum, verification or pace, whose events are on record (tests/golden/plain_events.json).

python -m fakes.plain_runs > golden/plain_events.json     (in tests/; only when events are meant to change)
"""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace.clock import run_virtual
from headrace.types import Task

SCENARIOS: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync", "num_samplers": 2},
    "ready_first": {"max_staleness": 3, "num_samplers": 2, "num_updates": 12},
    "oldest_first": {"max_staleness": 2, "pool": {"selection": "oldest_first"}},
    "drop_group": {"max_staleness": 1, "pool": {"on_expiry": "drop_group"}, "num_updates": 10},
    "wait": {"max_staleness": 2, "pool": {"on_expiry": "wait", "no_signal": "filter"}, "num_updates": 10},
    "refill": {"max_staleness": 3, "pool": {"no_signal": "refill"}, "learner": {"num_minibatches": 2}, "num_updates": 6},
}


def plain_run(name: str) -> ScriptedRun:
    draw = random.Random(name)
    tasks: list[Task] = [
        scripted_task(
            f"task-{index}",
            answers=draw.randint(1, 5),
            wait_seconds=draw.choice([0.0, 0.1, 2.0, 9.0]) * (1 + index * 0.00137),  # no ties that turns of the loop would decide
            reward=draw.choice([0.0, 1.0]),
            action_tokens=[draw.randint(1, 6)],
            fail_at=0 if index == 3 else None,
        )
        for index in range(9)
    ]
    scenario = dict(SCENARIOS[name])
    if scenario.get("pool", {}).get("no_signal") in ("filter", "refill"):  # a scripted reward is its task's: groups are alike
        scenario["learner"] = {**scenario.get("learner", {}), "advantage": "none"}
    return ScriptedRun(settings=run_settings(**scenario), tasks=tasks, learn_seconds=1.5071, publish_seconds=0.1013, apply_seconds=0.2017, max_running=6)


# what workers say of themselves, and text for people
_NOT_COMPARED = {"worker_active": {"activity", "longest_wait"}, "rollout_failed": {"error"}, "waiting": {"waits"}, "pool": {"waits"}}


def fields_of(lines: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Event -> its keys, in order; keys may be added later (CONTRACTS), never renamed or removed."""
    return {line["event"]: [name for name in line if name not in _NOT_COMPARED.get(line["event"], ())] for line in lines}


_GAINED = frozenset({"key_staleness_histogram"})


def fingerprints(lines: list[dict[str, Any]], fields: dict[str, list[str]]) -> list[str]:
    """One event a line: its name and the checksum of what it says, time included."""
    return [f"{line['event']} {zlib.crc32(repr([_then(line[name]) for name in fields[line['event']]]).encode()):08x}" for line in lines]


def _then(value: Any) -> Any:
    """Without what statistics of updates have gained since."""
    return {name: one for name, one in value.items() if name not in _GAINED} if isinstance(value, dict) else value


def lines_of(name: str) -> list[dict[str, Any]]:
    run = plain_run(name)
    run_virtual(run.run())
    return run.log.lines


if __name__ == "__main__":
    runs = {name: lines_of(name) for name in SCENARIOS}
    all_fields = fields_of([line for lines in runs.values() for line in lines])
    print(json.dumps({"fields": all_fields, "events": {name: fingerprints(lines, all_fields) for name, lines in runs.items()}}, indent=0))
