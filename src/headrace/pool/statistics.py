"""What people see of the pool: levels, staleness of what is pooled, why take waits. Reads groups, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import OnExpiry
from headrace.pool.group import Group
from headrace.pool.selection import Chooser


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """Levels at one moment."""

    max_groups: int
    """Admission: groups that may be started and not retired."""
    outstanding_groups: int
    waiting_groups: int
    """Some members are out."""
    ready_groups: int
    """Complete, not taken."""
    taken_groups: int
    """With the learner."""
    rollouts_in_flight: int
    pooled_trajectories: int
    """Back and not retired, those with the learner and those being verified included."""
    pooled_tokens: int
    """Action tokens of those not taken."""
    staleness_mean: float
    """Updates, over the pooled tokens, against the version the next batch is trained from; 0 without tokens."""
    staleness_max: int
    delivered_per_second: float
    """Good trajectories, mean since the first reservation; 0 before any time has passed."""
    retired_per_second: float
    """The same, of those that came back and have left."""


def measure(groups: Sequence[Group], *, max_groups: int, version: int, num_delivered: int, seconds: float) -> PoolStatistics:
    """`num_delivered` good trajectories came back within `seconds`."""
    open_groups = [group for group in groups if group.waiting]
    ages: Counter[int] = Counter()
    for group in open_groups:
        for finished in group.finished.values():
            for count in finished.summary.versions:
                ages[max(0, version - count.version.number)] += count.unmarked + count.key
    tokens = ages.total()
    ready = sum(group.ready for group in open_groups)
    pooled = sum(len(group.finished) + len(group.verifying) + len(group.taken) for group in groups)
    return PoolStatistics(
        max_groups=max_groups,
        outstanding_groups=len(groups),
        waiting_groups=len(open_groups) - ready,
        ready_groups=ready,
        taken_groups=sum(bool(group.taken) for group in groups),
        rollouts_in_flight=sum(len(group.in_flight) + len(group.verifying) for group in groups),
        pooled_trajectories=pooled,
        pooled_tokens=tokens,
        staleness_mean=sum(age * count for age, count in ages.items()) / tokens if tokens else 0.0,
        staleness_max=max(ages, default=0),
        delivered_per_second=num_delivered / seconds if seconds > 0 else 0.0,
        retired_per_second=(num_delivered - pooled) / seconds if seconds > 0 else 0.0,
    )


def describe_wait(groups: Sequence[Group], chooser: Chooser, *, slots: int, group_size: int, version: int, time: float) -> str:
    """For people: how much of a batch of `slots` is there, in groups, who is missing and for how long."""
    ready_slots = sum(group.ready_slots for group in groups if group.ready and not chooser.verification.due(group, version))
    count = -(-slots // group_size)
    ready = count if ready_slots >= slots else ready_slots // group_size  # some groups are there in part
    text = f"{ready} of {count} groups ready"
    if verifying := sum(len(group.verifying) for group in groups):
        text += f", {verifying} rollout{'s' if verifying > 1 else ''} being verified"
    issued = [seconds for group in groups for seconds in group.issued_seconds.values()]
    if ready >= count and issued and chooser.on_expiry is OnExpiry.WAIT:
        late = sum(not group.ready and chooser.deadline(group) <= version for group in groups)
        text += f", but {late or 'other'} groups would expire if it did not wait for them"
    elif ready >= count and issued:
        text += ", but older ones are still out (pool.selection = oldest_first)"
    if issued:
        return f"{text}; the oldest rollout has been out for {time - min(issued):.0f} s"
    return f"{text}; no rollout is out"
