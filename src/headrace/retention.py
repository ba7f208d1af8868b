"""Which checkpoints stay: the newest `checkpoint.keep`, and the best one besides.

A checkpoint is as good as the evaluation of its version, or the newest one before that. Where nothing is evaluated in between
(evaluation.every_updates = 0) it is as good as the mean reward of the batches since the checkpoint before. Of equal ones the older is best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from headrace.config import Settings


class Retention:
    def __init__(self, settings: Settings, kept: Sequence[Path] = (), state: Mapping[str, Any] | None = None) -> None:
        """`kept`: checkpoints that are there, oldest first; `state`: as it was at the one that the run goes on from."""
        self._keep, self._evaluates = settings.checkpoint.keep, settings.evaluation.every_updates > 0
        self.kept = list(kept)
        state = {"evaluations": [], "rewards": [], "since": [], **(state or {})}
        self._evaluations: dict[int, float] = dict(state["evaluations"])
        self._rewards: dict[int, float] = dict(state["rewards"])
        """By checkpoint."""
        self._since: list[float] = list(state["since"])
        """Mean rewards of the batches since the newest checkpoint."""

    def evaluated(self, number: int, mean: float) -> None:
        """The weights of that many updates scored so much."""
        self._evaluations[number] = mean

    def updated(self, reward_mean: float) -> None:
        self._since.append(reward_mean)

    def between(self) -> dict[str, Any]:
        """JSON values for a run that goes on from where it is now, without a checkpoint."""
        return {"evaluations": list(self._evaluations.items()), "rewards": list(self._rewards.items()), "since": list(self._since)}

    def state(self, number: int) -> dict[str, Any]:
        """JSON values for the checkpoint that is being saved: what holds when the run goes on from it. Forgets what no longer matters."""
        if self._since:
            self._rewards[number] = fmean(self._since)
        self._since.clear()
        numbers = [*map(_number, self.kept), number]
        self._rewards = {one: mean for one, mean in self._rewards.items() if one in numbers}
        first = max((one for one in self._evaluations if one <= min(numbers)), default=0)
        self._evaluations = {one: mean for one, mean in sorted(self._evaluations.items()) if one >= first}
        return {"evaluations": [one for one in self._evaluations.items() if one[0] <= number], "rewards": list(self._rewards.items())}

    def saved(self, path: Path) -> list[Path]:
        """The newest checkpoint is there: those that go, oldest first."""
        self.kept = [*(other for other in self.kept if other != path), path]
        stay = {self.best, *self.kept[-self._keep :]}
        gone = [other for other in self.kept if other not in stay]
        self.kept = [other for other in self.kept if other in stay]
        return gone

    @property
    def newest(self) -> int:
        """Updates of the newest checkpoint; 0: none."""
        return _number(self.kept[-1]) if self.kept else 0

    @property
    def best(self) -> Path | None:
        """None while nothing is known of any."""
        scores = [(score, path) for path in self.kept if (score := self._score(_number(path))) is not None]
        return max(scores, key=lambda one: one[0])[1] if scores else None

    def _score(self, number: int) -> float | None:
        if not self._evaluates:
            return self._rewards.get(number)
        before = [one for one in self._evaluations if one <= number]
        return self._evaluations[max(before)] if before else None


def _number(path: Path) -> int:
    """Of updates, from the directory's name."""
    return int(path.name.rpartition("_")[2])
