"""When published weights are taken up (DESIGN section 6, `sampler.apply`). Pure: it is told the time and what runs.

every_step     at once
key_steps      before the first token of the next key step of any running rollout, at the latest `max_delay_seconds` after the update was
               first seen. Fewer pauses; what a key step's first token is drawn from is the newest there was.
rollout_start  when no rollout is in flight: those that have begun go on to their end, new ones wait. No trajectory has two versions.

In every mode an update is taken up at once when nothing runs, so that nobody who waits for it waits for ever. How long updates had to wait is counted.
"""

from __future__ import annotations

from headrace.config import Apply
from headrace.types import RolloutKey


class ApplyGate:
    """Asked between any two decode steps. Rollouts begin with their first request and end with `released`."""

    def __init__(self, apply: Apply, *, max_delay_seconds: float) -> None:
        self.apply = apply
        self.counts_rollouts = apply is Apply.ROLLOUT_START
        """Whether `begin` has to be told."""
        self.num_applied = 0
        self.delay_seconds = 0.0
        """Sum over the updates taken up of the time since each (or the first of those it replaced) was seen."""
        self._max_delay_seconds = max_delay_seconds
        self._first_seen: float | None = None
        self._begun: set[RolloutKey] = set()

    @property
    def pending(self) -> bool:
        """An update waits."""
        return self._first_seen is not None

    @property
    def draining(self) -> bool:
        """New rollouts wait for an update that waits for those in flight."""
        return self.counts_rollouts and self._first_seen is not None

    @property
    def num_in_flight(self) -> int:
        """Rollouts that have begun; counted under rollout_start."""
        return len(self._begun)

    def allows(self, *, now: float, at_rest: bool, key_step_due: bool) -> bool:
        """There is a newer update: may it be taken up now? `at_rest`: no action is being drawn. `key_step_due`: one of the next step's
        rows draws the first token of a key step, or something asks for the newest weights there are (a verification)."""
        if self._first_seen is None:
            self._first_seen = now
        match self.apply:
            case Apply.EVERY_STEP:
                return True
            case Apply.KEY_STEPS:
                return at_rest or key_step_due or now - self._first_seen >= self._max_delay_seconds
            case Apply.ROLLOUT_START:
                return not self._begun

    def applied(self, now: float) -> None:
        if self._first_seen is not None:
            self.delay_seconds += max(0.0, now - self._first_seen)
        self.num_applied += 1
        self._first_seen = None

    def withdraw(self) -> None:
        """No update waits any more: the weights in use are pinned, or there is none that is newer."""
        self._first_seen = None

    def admits(self, key: RolloutKey) -> bool:
        """Whether the rollout's request may be served now."""
        return not self.draining or key in self._begun

    def begin(self, key: RolloutKey) -> None:
        """A request of the rollout is served."""
        if self.counts_rollouts:
            self._begun.add(key)

    def released(self, key: RolloutKey) -> None:
        self._begun.discard(key)


class DrainedSlots:
    """Decode slots that stay empty, while somebody waits for one, because new weights have to come first: integrated over time."""

    def __init__(self) -> None:
        self.slot_seconds = 0.0
        self._since: float | None = None
        self._empty = 0

    def note(self, now: float, empty: int) -> None:
        """From now on so many."""
        if self._since is not None:
            self.slot_seconds += self._empty * max(0.0, now - self._since)
        self._since, self._empty = now, empty
