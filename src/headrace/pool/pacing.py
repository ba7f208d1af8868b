"""Pace: fewer batches outstanding while key steps are trained too old (pool.pace_key_steps, DESIGN section 6).

A key step that is trained has waited for every batch that was outstanding before its own, so the number of outstanding batches is what
its age follows. The controller halves that number's room above its least, max_key_staleness + 1 updates' worth, while more than
MAX_OVER_SHARE of the key steps are over their bound, and gives a quarter of a batch back while less than half of that are. After each
change it judges nothing until what was outstanding then has left: that was made under the old limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_OVER_SHARE = 0.05
"""Of the trained key steps."""
JUDGED_BATCHES = 2
"""Batches with key steps that one judgement looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """One judgement."""

    limit_groups: int
    """May be outstanding from now on."""
    max_groups: int
    """Without pace."""
    over_share: float
    """Of the key steps judged, those trained over max_key_staleness."""
    reason: str
    """For people."""


class Pace:
    def __init__(self, *, max_groups: int, groups_per_batch: int, updates_per_batch: int, max_key_staleness: int) -> None:
        """Begins without any restraint."""
        batches = max(1, (max_key_staleness + 1) // updates_per_batch)
        self.least_groups = min(max_groups, batches * groups_per_batch)
        self.max_groups = self.limit_groups = max_groups
        self._groups_per_batch = groups_per_batch
        self._settling = self._judged = self._trained = self._over = 0

    def retired(self, *, trained: int, over: int) -> Paced | None:
        """A batch left, with so many key steps trained, `over` of them over their bound. Returns a judgement when one is due."""
        if self._settling:
            self._settling -= 1
            return None
        if not trained:
            return None
        self._judged, self._trained, self._over = self._judged + 1, self._trained + trained, self._over + over
        if self._judged < JUDGED_BATCHES:
            return None
        share = self._over / self._trained
        self._judged = self._trained = self._over = 0
        before, says = self.limit_groups, f"{share:.0%} of the key steps were over max_key_staleness"
        if share > MAX_OVER_SHARE:
            self.limit_groups = max(self.least_groups, before - max(1, (before - self.least_groups + 1) // 2))
            does = "fewer groups outstanding" if self.limit_groups < before else "already at the fewest groups"
        elif share < MAX_OVER_SHARE / 2:
            self.limit_groups = min(self.max_groups, before + max(1, self._groups_per_batch // 4))
            does = "more groups outstanding" if self.limit_groups > before else "no restraint"
        else:
            does = "unchanged"
        if self.limit_groups != before:
            self._settling = math.ceil(max(before, self.limit_groups) / self._groups_per_batch)
        return Paced(limit_groups=self.limit_groups, max_groups=self.max_groups, over_share=share, reason=f"{says}: {does}")
