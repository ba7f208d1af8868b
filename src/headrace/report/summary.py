"""One run in numbers: the keys of `run --json` (CONTRACTS), read from its events by the definitions of DESIGN section 2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.report.utilization import timed_windows, utilization

Line = Mapping[str, Any]

_MAX_FAILURES = 20


def summarize(events: Iterable[Line]) -> dict[str, Any]:
    """Everything but `run_dir`. Values that the events do not (yet) hold are None, so a run of any phase can be summarized."""
    lines = list(events)
    started = next((line for line in lines if line["event"] == "run_started"), {})
    windows = timed_windows(lines)
    updated = [line for line in lines if line["event"] == "updated"]
    ledger = _last(lines, "ledger")
    checkpoint = _last(lines, "checkpoint_saved")
    sampled = sum(
        line["activity"]["sampled_tokens"] * windows.share(line["time"], line["activity"]["seconds"]) for line in lines if line["event"] == "worker_active"
    )
    return {
        "recipe": started.get("recipe"),
        "runtime": started.get("runtime"),
        "mode": started.get("mode"),
        "placement": started.get("placement"),
        "seed": started.get("seed"),
        "num_updates": updated[-1]["version"] if updated else 0,
        "planned_updates": started.get("num_updates"),
        "lineage": max((line["lineage"] for line in lines if "lineage" in line), default=0),
        "startup_seconds": started.get("startup_seconds"),
        "wall_seconds": windows.seconds,
        "tokens_per_second": sampled / windows.seconds if windows.seconds > 0 else None,
        "evaluation": evaluation(lines),
        "staleness": staleness(updated),
        "utilization": utilization(lines, windows),
        "ledger": None if ledger is None else ledger["ledger"],
        "checkpoint": None if checkpoint is None else checkpoint["path"],
        "failures": failures(lines),
    }


def failures(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Tasks whose rollouts failed for good, most failures first: {task, reason, rollouts, error}, with the newest error of each."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        if line["event"] == "rollout_failed" and not line["retried"] and line["reason"] != "cancelled":
            one = found.setdefault((line["task_id"], line["reason"]), {"task": line["task_id"], "reason": line["reason"], "rollouts": 0})
            one["rollouts"] += 1
            one["error"] = line["error"]
    return sorted(found.values(), key=lambda one: -one["rollouts"])[:_MAX_FAILURES]


def staleness(updated: Iterable[Line]) -> dict[str, Any]:
    """Of trained tokens, in updates. `mean` weighs every token alike; `key_mean` every batch alike that has key tokens."""
    tokens, total, largest = 0, 0, None
    key_means, key_largest = [], None
    for line in updated:
        statistics = line["statistics"]
        if statistics is None:
            continue
        for age, count in statistics["staleness_histogram"].items():
            tokens += count
            total += int(age) * count
        if statistics["trained_tokens"]:
            largest = max(largest or 0, statistics["staleness_max"])
        if statistics["key_staleness_mean"] is not None:
            key_means.append(statistics["key_staleness_mean"])
            key_largest = max(key_largest or 0, statistics["key_staleness_max"] or 0)
    return {
        "mean": total / tokens if tokens else None,
        "max": largest,
        "key_mean": sum(key_means) / len(key_means) if key_means else None,
        "key_max": key_largest,
    }


def evaluation(lines: Iterable[Line]) -> dict[str, Any]:
    """The evaluation of the version that training started from, and the newest one made after training began."""
    before, after, training = None, None, False
    for line in lines:
        if line["event"] == "timed_window":
            training = True
        elif line["event"] == "evaluated":
            numbers = {key: line[key] for key in ("version", "mean", "interval95", "num_rollouts", "metrics")}
            if training:
                after = numbers
            else:
                before = before or numbers
    return {"before": before, "after": after}


def _last(lines: list[Line], event: str) -> Line | None:
    return next((line for line in reversed(lines) if line["event"] == event), None)
