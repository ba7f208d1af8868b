"""One run in numbers: the keys of `run --json` (CONTRACTS), read from its events by the definitions of DESIGN section 2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.report.spread import Spread
from headrace.report.utilization import UtilizationMeter, WindowMeter

Line = Mapping[str, Any]

_MAX_FAILURES = 20


class RunSummary:
    """Fed with a run's events in order; says at any moment what they amount to. Its size does not grow with the run."""

    def __init__(self, directory: Path | None = None) -> None:
        """`directory` of the run: its checkpoint is told where it lies now, also when the run was moved."""
        self._directory = directory
        self.started: Line = {}
        self.windows = WindowMeter()
        self._utilization = UtilizationMeter([])
        self._newest: dict[str, Line] = {}
        self._lineage = 0
        self._useful_tokens = 0.0
        self._staleness = _Staleness()
        self._upkeep = _Upkeep()
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
            case "run_resumed":
                self.started = {**self.started, "num_updates": line["num_updates"]}
                self._newest["updated"] = {"version": line["resumed_from_update"]}
                self._upkeep.out.all_lost()
            case "worker_active":
                self._upkeep.add_activity(line["activity"], in_flight=line["in_flight"])
            case "updated":
                self._newest["updated"] = line
                if line["statistics"] is not None:
                    self._staleness.add(line["statistics"])
                    self._useful_tokens += line["statistics"]["trained_tokens"] * windows.share(line["time"], 0.0)
            case "evaluated":
                self._add_evaluation(line)
            case "rollout_failed" if not line["retried"] and line["reason"] != "cancelled":
                self._add_failure(line)
            case "verification_asked":
                self._upkeep.add_asked(line)
            case "rollout_verified":
                self._upkeep.add_verified(line)
            case "role_lost":
                self._upkeep.out.lost(line["role"])
            case "ledger" | "checkpoint_saved" | "timed_window" | "paced" as event:
                self._newest[event] = line

    def result(self) -> dict[str, Any]:
        """Everything of `run --json` but `run_dir`. Values that the events do not (yet) hold are None, so any phase of a run has one."""
        windows = self.windows.windows
        updated, ledger, checkpoint, paced = (self._newest.get(name) for name in ("updated", "ledger", "checkpoint_saved", "paced"))
        sampled = self._utilization.sampled_tokens(windows)
        saturated = [device["saturated_tokens_per_second"] for device in self.started.get("devices", []) if device.get("saturated_tokens_per_second")]
        return {
            **{key: self.started.get(key) for key in ("recipe", "runtime", "mode", "placement", "seed")},
            "num_updates": updated["version"] if updated else 0,
            "planned_updates": self.started.get("num_updates"),
            "lineage": self._lineage,
            "startup_seconds": self.started.get("startup_seconds"),
            "wall_seconds": windows.seconds,
            "tokens_per_second": sampled / windows.seconds if sampled is not None and windows.seconds > 0 else None,
            "useful_tokens_per_second": self._useful_tokens / windows.seconds if windows.seconds > 0 else None,
            "saturated_tokens_per_second": sum(saturated) if saturated else None,
            "evaluation": dict(self._evaluation),
            "staleness": self._staleness.result(),
            **self._upkeep.result(),
            "pace": {key: paced[key] for key in ("limit_groups", "max_groups", "over_share", "wait_seconds")} if paced else None,
            "utilization": self._utilization.result(windows),
            "ledger": ledger["ledger"] if ledger else None,
            "checkpoint": self._place(checkpoint["path"]) if checkpoint else None,
            "failures": sorted(self._failures.values(), key=lambda one: -one["rollouts"])[:_MAX_FAILURES],
        }

    def _place(self, path: str) -> str:
        return path if self._directory is None else str(self._directory / "checkpoints" / Path(path).name)

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
    """Of trained tokens, in updates; every token weighs alike. Logs without the ages of key tokens: `key_mean` weighs every batch alike."""

    def __init__(self) -> None:
        self._tokens = self._total = 0
        self._key_tokens = self._known_key_total = 0
        self._largest: int | None = None
        self._largest_other: int | None = None
        self._num_key_batches, self._key_total = 0, 0.0
        self._key_largest: int | None = None

    def add(self, statistics: Mapping[str, Any]) -> None:
        key_counts = statistics.get("key_staleness_histogram") or {}
        for age, count in statistics["staleness_histogram"].items():
            self._tokens += count
            self._total += int(age) * count
            if count > key_counts.get(age, 0):
                self._largest_other = max(self._largest_other or 0, int(age))
        for age, count in key_counts.items():
            self._key_tokens += count
            self._known_key_total += int(age) * count
        if statistics["trained_tokens"]:
            self._largest = max(self._largest or 0, statistics["staleness_max"])
        if statistics["key_staleness_mean"] is not None:
            self._num_key_batches += 1
            self._key_total += statistics["key_staleness_mean"]
            self._key_largest = max(self._key_largest or 0, statistics["key_staleness_max"] or 0)

    def result(self) -> dict[str, Any]:
        """`other_mean` and `other_max` are of the tokens outside key steps; None without key steps, and where the log does not tell them apart."""
        key_tokens, other_tokens = self._key_tokens, self._tokens - self._key_tokens
        key_mean = self._key_total / self._num_key_batches if self._num_key_batches else None
        return {
            "mean": self._total / self._tokens if self._tokens else None,
            "max": self._largest,
            "key_mean": self._known_key_total / key_tokens if key_tokens else key_mean,
            "key_max": self._key_largest,
            "other_mean": (self._total - self._known_key_total) / other_tokens if key_tokens and other_tokens else None,
            "other_max": self._largest_other if key_tokens else None,
        }


class _Upkeep:
    """What keeping data fresh has cost: verification, updates that waited, long rollouts that gave way."""

    def __init__(self) -> None:
        self.out = OutForVerification()
        self._asked = self._returned = self._cut = self._refreshed_tokens = self._refreshed_key_steps = 0
        self._verify_seconds, self._verify_tokens, self._unkept = 0.0, 0, 0
        self._tails, self._tail_shares = Spread(), Spread()
        self._applied, self._delay_seconds, self._parked = 0, 0.0, 0
        self._prefill = self._recomputed = self._evicted = self._slots = self._most_in_flight = 0

    def add_asked(self, line: Line) -> None:
        self._asked += line["rollouts"]
        self.out.asked(line["role"], line["rollouts"])

    def add_verified(self, line: Line) -> None:
        self.out.returned(line["role"])
        self._returned += 1
        self._cut += line["refreshed"] > 0
        self._refreshed_tokens += line["refreshed"]
        self._refreshed_key_steps += line["refreshed_keys"]
        if seconds := line.get("refresh_seconds"):
            self._tails.add(seconds)
            if line["seconds"]:
                self._tail_shares.add(seconds / line["seconds"])

    def add_activity(self, activity: Mapping[str, Any], *, in_flight: int) -> None:
        """Logs from before these counters have none of them."""
        self._verify_seconds += activity.get("verify_seconds", 0.0)
        self._verify_tokens += activity.get("verify_tokens", 0)
        self._unkept += activity.get("num_unkept", 0)
        self._applied += activity.get("applied_updates", 0)
        self._delay_seconds += activity.get("apply_delay_seconds", 0.0)
        self._parked += activity.get("num_parked", 0)
        self._prefill += activity.get("prefill_tokens", 0)
        self._recomputed += activity.get("recomputed_tokens", 0)
        self._evicted += activity.get("evicted_tokens", 0)
        self._slots = activity.get("kv_slots", 0) or self._slots
        self._most_in_flight = max(self._most_in_flight, in_flight)

    def result(self) -> dict[str, Any]:
        return {
            "verification": {
                "asked": self._asked, "out": self.out.number, "rollouts": self._returned, "cut": self._cut, "refreshed_tokens": self._refreshed_tokens,
                "refreshed_key_steps": self._refreshed_key_steps, "seconds": self._verify_seconds, "tokens": self._verify_tokens, "unkept": self._unkept,
                "tail_seconds": self._tails.result(), "tail_share": self._tail_shares.result(),
            },
            "apply_delay_seconds": self._delay_seconds / self._applied if self._applied else None,
            "parked": self._parked,
            "cache": {
                "prefill_tokens": self._prefill, "recomputed_tokens": self._recomputed, "evicted_tokens": self._evicted,
                "slots": self._slots or None, "most_in_flight": self._most_in_flight,
            },
        }  # fmt: skip


class OutForVerification:
    """How many finished rollouts are with a worker to be verified. What a lost worker had stays as it was delivered."""

    def __init__(self) -> None:
        self._by_worker: dict[str, int] = {}

    @property
    def number(self) -> int:
        return sum(self._by_worker.values())

    def asked(self, worker: str, rollouts: int) -> None:
        self._by_worker[worker] = self._by_worker.get(worker, 0) + rollouts

    def returned(self, worker: str) -> None:
        self._by_worker[worker] = max(0, self._by_worker.get(worker, 0) - 1)

    def lost(self, worker: str) -> None:
        self._by_worker.pop(worker, None)

    def all_lost(self) -> None:
        self._by_worker.clear()


def over_bound_fraction(ledger: Mapping[str, Any] | None) -> float | None:
    """Of the trained key steps, those older than max_key_staleness; None where no key step was trained."""
    steps = (ledger or {}).get("key_steps") or {}
    return steps["over_bound"] / steps["trained"] if steps.get("trained") else None


def summarize(events: Iterable[Line], directory: Path | None = None) -> dict[str, Any]:
    """RunSummary.result of all these events."""
    summary = RunSummary(directory)
    for line in events:
        summary.add(line)
    return summary.result()
