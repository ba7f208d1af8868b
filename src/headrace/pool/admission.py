"""How much may be in flight: the admission bound, deadlines, and the feasibility test of `on_expiry = wait`. Pure functions.

With k updates a batch, a batch taken at learner version v is trained at v .. v + k - 1, so a token of version o meets its bound
max_staleness = S in every minibatch exactly when v - o <= S - (k - 1) at take: the *take bound*. A group reserved while B batches
are outstanding (itself included, the one being learned included) is taken at most (B - 1) * k updates later. So

    (B - 1) * k <= S - (k - 1)    <=>    B = floor((S + 1) / k)

batches may be started and not retired. For k = 1 that is DESIGN section 5's (max_staleness + 1) x batch_trajectories; in sync,
where S = k - 1, it is exactly one batch. (One more batch, floor(S / k) + 1, would meet the bound in its first minibatch only and
lose the later ones to expiry, batch after batch.)

Under `ready_first`, groups whose every member that is out is parked or late do not count (DESIGN sections 5 and 7): otherwise long
rollouts would fill the admission, and samplers would run dry beside them. Everything together, they included, stays within
MAX_OUTSTANDING bounds. They count as soon as they can be served, and always where one batch is all that may be out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

from headrace.config import SelectionRule, Settings
from headrace.pool.group import Group
from headrace.types import RolloutKey

MAX_OUTSTANDING = 4
"""Times the admission bound, parked and late members included: what bounds the memory."""


def take_bound(settings: Settings, max_staleness: int) -> int:
    """Updates: how old an unmarked token may be at take so that no minibatch of the batch finds it over the bound in effect."""
    return max(0, max_staleness - (settings.updates_per_batch - 1))


def max_outstanding_groups(settings: Settings, max_staleness: int) -> int:
    """Groups that may be started and not retired."""
    return max(1, (max_staleness + 1) // settings.updates_per_batch) * settings.pool.groups_per_batch


def spares_long_ones(settings: Settings, max_staleness: int) -> bool:
    """Whether parked and late members do not count. Not where one batch is all that may be out: it is needed whole."""
    return settings.pool.selection is SelectionRule.READY_FIRST and max_outstanding_groups(settings, max_staleness) > settings.pool.groups_per_batch


def counted_slots(group: Group, parked: Collection[RolloutKey]) -> int:
    """Trajectories of the group that count, where parked and late ones do not."""
    out = group.in_flight
    if not out or not (group.released or all(RolloutKey(group.group_id, member, attempt) in parked for member, attempt in out.items())):
        return group.taken_slots + group.waiting_slots
    return group.taken_slots + (group.waiting_slots - len(out) if group.prepared else 0)


def deadline(oldest_version: int | None, bound: int) -> float:
    """The last learner version at which a group may be taken; infinite without unmarked tokens."""
    return math.inf if oldest_version is None else oldest_version + bound


def feasible(due: Iterable[tuple[float, int]], *, next_version: int, updates_per_batch: int, slots_per_batch: int) -> bool:
    """True when slots with these (deadline, number) can all be taken in time, whatever happens, one batch every `updates_per_batch` updates.

    Earliest deadline first is optimal for such unit jobs (Jackson 1955, as in Liu and Layland 1973): a schedule exists if and
    only if for every deadline d at most floor((d - next_version) / k) + 1 batches' worth of slots are due by d.
    """
    by_deadline: Counter[float] = Counter()
    for limit, slots in due:
        by_deadline[limit] += slots
    total = 0
    for limit, slots in sorted(by_deadline.items()):
        total += slots
        if math.isinf(limit):
            return True
        takes = math.floor((limit - next_version) / updates_per_batch) + 1
        if total > takes * slots_per_batch:
            return False
    return True
