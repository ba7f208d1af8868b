"""What goes wrong again and again: failed rollouts, batches without signal. Too many in a row end the run. (Refused updates: governor.py.)"""

from __future__ import annotations

from headrace.config import Settings
from headrace.errors import NoProgressError
from headrace.types import TrajectorySummary

_FAILED_GROUPS = 4
"""Failures in a row end a run only when they come from so many groups: one bad task with a large group must not (case 4)."""


class Setbacks:
    """Counts each kind; a success of that kind begins anew."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._failed_in_a_row = 0
        self._failed_groups: set[int] = set()
        self._empty_in_a_row = 0

    def came_back(self, summary: TrajectorySummary) -> None:
        """Raises NoProgressError after run.max_failed_rollouts_in_a_row."""
        if not summary.failed:
            self._failed_in_a_row = 0
            self._failed_groups.clear()
            return
        self._failed_in_a_row += 1
        self._failed_groups.add(summary.key.group_id)
        if self._failed_in_a_row >= self._settings.run.max_failed_rollouts_in_a_row and len(self._failed_groups) >= _FAILED_GROUPS:
            raise NoProgressError(
                f"{self._failed_in_a_row} rollouts in a row failed; the last was task '{summary.task_id}': {summary.end_reason}: {summary.error}.",
                remedy="Mend the environment or reward, or raise run.max_failed_rollouts_in_a_row.",
            )

    def empty(self, reward_mean: float) -> None:
        """A batch without signal. Raises NoProgressError after run.max_empty_batches."""
        self._empty_in_a_row += 1
        if self._empty_in_a_row >= self._settings.run.max_empty_batches:
            raise NoProgressError(
                f"{self._empty_in_a_row} batches in a row held no group with different rewards (mean of the last: {reward_mean:.3g}).",
                remedy="The policy has solved the tasks or never solves one: change the tasks, rollout.temperature or rollout.group_size.",
            )

    def updated(self) -> None:
        """A batch had signal."""
        self._empty_in_a_row = 0
