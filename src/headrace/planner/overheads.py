"""What a run takes beside decoding and learning, from its events: the conductor's work and the wires to the roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.planner.measure import Recording

Line = Mapping[str, Any]

REPORT_SECONDS = 0.01
"""Between two reports of a worker at least, as in the local runtime: a rollout that ends waits half of it on average."""
_SETTLED = 0.999
"""Share of the rollouts, those that failed for good apart, that have finished where nearly all have."""


def handover_seconds(recording: Recording) -> float:
    """From taking a batch to the line of its update, mean, without learning, publishing, and waiting for samplers.

    It is what the learner waits for besides: the batch and the result on the wire, the journal, the ledger.
    """
    published, acknowledged = _by_version(recording.published, "seconds"), _by_version(recording.acknowledged, "wait_seconds")
    taken = {line["selection"]: float(line["time"]) for line in recording.taken}
    found = []
    for line in recording.updated[1:] or recording.updated:
        away = float(line["time"]) - taken.get(line["selection"], float(line["time"]))
        known = float(line["seconds"]) + published.get(line["version"], 0.0) + acknowledged.get(line["version"], 0.0)
        found.append(max(away - known, float(line.get("transfer_seconds", 0.0))))
    return sum(found) / len(found)


def dispatch_seconds(recording: Recording) -> float:
    """From reserving a rollout to its start, and from its end to the pool, mean, beyond the wait for a report that is due."""
    found = []
    for line in recording.rollouts:
        reserved = recording.reserved.get(line["group"])
        if reserved is not None and line["seconds"] and not line.get("attempt"):
            found.append(float(line["time"]) - reserved - float(line["seconds"]))
    found.sort()  # groups that waited for room between two members, and rollouts that were tried again, are the largest
    kept = found[: round(0.9 * len(found))]
    return max(0.0, sum(kept) / len(kept) - REPORT_SECONDS / 2) if kept else 0.0


def settled(rollouts: Sequence[Line]) -> Sequence[Line]:
    """Of the groups that began first, as many as have nearly all finished, and at least half of the rollouts.

    Of those that began last only the short ones are there at the end: with them lengths would seem too short, and to shrink.
    """
    ordered = sorted(rollouts, key=lambda line: line["group"])
    size = max(line["member"] for line in ordered) + 1
    first_groups = ordered[-1]["group"] // 4 + 1
    kept_share = sum(line["group"] < first_groups for line in ordered) / (size * first_groups)
    for count in range(len(ordered), len(ordered) // 2, -1):
        group = ordered[count - 1]["group"]
        is_whole = count == len(ordered) or ordered[count]["group"] != group
        if is_whole and count >= _SETTLED * min(1.0, kept_share) * size * (group + 1):
            return ordered[:count]
    return ordered[: len(ordered) // 2 + 1]


def step_seconds(activity: Mapping[str, Any]) -> float:
    """Of whole steps. Events from before this field counted them as busy."""
    return float(activity.get("step_seconds") or activity["busy_seconds"])


def gap_seconds(activity: Mapping[str, Any]) -> float:
    """Between two steps while somebody could be served."""
    return float(activity["gap_seconds"] if "step_seconds" in activity else activity["idle_seconds"].get("gather", 0.0))


def environment_seconds(activity: Mapping[str, Any]) -> float:
    """While all rollouts in flight were with their environments; what their Python took of it included."""
    return float(activity["environment_seconds"] if "step_seconds" in activity else activity["idle_seconds"].get("environment", 0.0))


def work_share(active: Sequence[Line]) -> float:
    """Of the steps' seconds, the model's work."""
    whole = sum(step_seconds(line["activity"]) for line in active)
    return min(1.0, sum(line["activity"]["busy_seconds"] for line in active) / whole) if whole > 0 else 1.0


def _by_version(lines: Sequence[Line], key: str) -> dict[int, float]:
    return {line["version"]: float(line[key]) for line in lines}
