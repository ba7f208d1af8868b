"""One run in numbers: the keys of `run --json` (CONTRACTS), read from its events by the definitions of DESIGN section 2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.report.utilization import UtilizationMeter, WindowMeter

Line = Mapping[str, Any]

_MAX_FAILURES = 20


class RunSummary:
    """Fed with a run's events in order; says at any moment what they amount to. Its size does not grow with the run."""

    def __init__(self) -> None:
        self.started: Line = {}
        self.windows = WindowMeter()
        self._utilization = UtilizationMeter([])
        self._newest: dict[str, Line] = {}
        self._lineage = 0
        self._has_activity = False
        self._sampled_tokens = 0.0
        self._useful_tokens = 0.0
        self._staleness = _Staleness()
        self._evaluation: dict[str, dict[str, Any] | None] = {"before": None, "after": None}
        self._failures: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, line: Line) -> None:
        self.windows.add(line)
        windows = self.windows.windows
        self._utilization.add(line, windows)
        self._lineage = max(self._lineage, line.get("lineage", 0))
        match line["event"]:
            case "run_started":
                self.started = line
                self._utilization = UtilizationMeter(line["devices"])
            case "worker_active":
                self._has_activity = True
                self._sampled_tokens += line["activity"]["sampled_tokens"] * windows.share(line["time"], line["activity"]["seconds"])
            case "updated":
                self._newest["updated"] = line
                if line["statistics"] is not None:
                    self._staleness.add(line["statistics"])
                    self._useful_tokens += line["statistics"]["trained_tokens"] * windows.share(line["time"], 0.0)
            case "evaluated":
                self._add_evaluation(line)
            case "rollout_failed" if not line["retried"] and line["reason"] != "cancelled":
                self._add_failure(line)
            case "ledger" | "checkpoint_saved" | "timed_window" as event:
                self._newest[event] = line

    def result(self) -> dict[str, Any]:
        """Everything of `run --json` but `run_dir`. Values that the events do not (yet) hold are None, so any phase of a run has one."""
        windows = self.windows.windows
        updated, ledger, checkpoint = (self._newest.get(name) for name in ("updated", "ledger", "checkpoint_saved"))
        saturated = [device["saturated_tokens_per_second"] for device in self.started.get("devices", []) if device.get("saturated_tokens_per_second")]
        return {
            **{key: self.started.get(key) for key in ("recipe", "runtime", "mode", "placement", "seed")},
            "num_updates": updated["version"] if updated else 0,
            "planned_updates": self.started.get("num_updates"),
            "lineage": self._lineage,
            "startup_seconds": self.started.get("startup_seconds"),
            "wall_seconds": windows.seconds,
            "tokens_per_second": self._sampled_tokens / windows.seconds if self._has_activity and windows.seconds > 0 else None,
            "useful_tokens_per_second": self._useful_tokens / windows.seconds if windows.seconds > 0 else None,
            "saturated_tokens_per_second": sum(saturated) if saturated else None,
            "evaluation": dict(self._evaluation),
            "staleness": self._staleness.result(),
            "utilization": self._utilization.result(windows),
            "ledger": ledger["ledger"] if ledger else None,
            "checkpoint": checkpoint["path"] if checkpoint else None,
            "failures": sorted(self._failures.values(), key=lambda one: -one["rollouts"])[:_MAX_FAILURES],
        }

    def _add_evaluation(self, line: Line) -> None:
        """`before` is of the version that training started from, whenever it was made; `after` the newest one of a later version."""
        numbers = {key: line[key] for key in ("version", "mean", "interval95", "num_rollouts", "metrics")}
        if "timed_window" not in self._newest or line["version"] == 0:
            self._evaluation["before"] = self._evaluation["before"] or numbers
        else:
            self._evaluation["after"] = numbers

    def _add_failure(self, line: Line) -> None:
        """Tasks whose rollouts failed for good: {task, reason, rollouts, error}, with the newest error of each."""
        new = {"task": line["task_id"], "reason": line["reason"], "rollouts": 0}
        one = self._failures.setdefault((line["task_id"], line["reason"]), new)
        one["rollouts"] += 1
        one["error"] = line["error"]


class _Staleness:
    """Of trained tokens, in updates. `mean` weighs every token alike; `key_mean` every batch alike that has key tokens."""

    def __init__(self) -> None:
        self._tokens = self._total = 0
        self._largest: int | None = None
        self._num_key_batches, self._key_total = 0, 0.0
        self._key_largest: int | None = None

    def add(self, statistics: Mapping[str, Any]) -> None:
        for age, count in statistics["staleness_histogram"].items():
            self._tokens += count
            self._total += int(age) * count
        if statistics["trained_tokens"]:
            self._largest = max(self._largest or 0, statistics["staleness_max"])
        if statistics["key_staleness_mean"] is not None:
            self._num_key_batches += 1
            self._key_total += statistics["key_staleness_mean"]
            self._key_largest = max(self._key_largest or 0, statistics["key_staleness_max"] or 0)

    def result(self) -> dict[str, Any]:
        return {
            "mean": self._total / self._tokens if self._tokens else None,
            "max": self._largest,
            "key_mean": self._key_total / self._num_key_batches if self._num_key_batches else None,
            "key_max": self._key_largest,
        }


def summarize(events: Iterable[Line]) -> dict[str, Any]:
    """RunSummary.result of all these events."""
    summary = RunSummary()
    for line in events:
        summary.add(line)
    return summary.result()
