"""A learner that only takes time, and checks everything it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.config import Settings
from headrace.types import PolicyVersion, RolloutKey
from headrace.updates import MemberOutcome, Selection, UpdateResult, UpdateStatistics, WeightUpdate

START = PolicyVersion(0, 0)


class ScriptedLearner:
    """roles.Learner under the virtual clock: `learn_seconds` an update; weighs tokens by the staleness rules like the real one.

    `on_publish(version)` is where the test's samplers learn of new weights.
    """

    def __init__(
        self,
        settings: Settings,
        on_publish: Callable[[PolicyVersion], None],
        *,
        learn_seconds: float = 1.0,
        publish_seconds: float = 0.0,
        refuse: Callable[[int], bool] = lambda selection_id: False,
        version: PolicyVersion = START,
        measured: Callable[[Selection], Mapping[str, Any]] = lambda selection: {},
    ) -> None:
        """`measured`: statistics of an update, those that are not as of healthy ones."""
        self.measured = measured
        self.settings, self.on_publish, self.refuse = settings, on_publish, refuse
        self.learn_seconds, self.publish_seconds = learn_seconds, publish_seconds
        self.selections: list[Selection] = []
        self.published: list[PolicyVersion] = []
        self.saved: list[Path] = []
        self.copied: list[PolicyVersion] = []
        self.calls = 0
        self._version = version
        self._seen: set[RolloutKey] = set()

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def learn(self, selection: Selection) -> UpdateResult:
        assert selection.members, "the learner was given an empty batch"
        assert selection.learner_version == self._version
        keys = [member.summary.key for member in selection.members]
        assert keys == sorted(keys), "a batch must not depend on the order of arrival"
        assert not self._seen & {*keys, *selection.filtered}, "a trajectory was given twice"
        self._seen |= {*keys, *selection.filtered}
        self.selections.append(selection)
        await asyncio.sleep(self.learn_seconds)
        before, refused = self._version, "scripted" if self.refuse(selection.id) else None
        outcomes = tuple(self._outcome(selection, index) for index in range(len(keys)))
        if refused is None:
            self._version = PolicyVersion(before.lineage, before.number + self.settings.updates_per_batch)
        return UpdateResult(
            selection_id=selection.id,
            version_before=before,
            version_after=self._version,
            outcomes=outcomes,
            statistics=None if refused else self._statistics(selection),
            refused=refused,
            seconds=self.learn_seconds,
            busy_seconds=self.learn_seconds,
        )

    async def publish(self) -> WeightUpdate:
        await asyncio.sleep(self.publish_seconds)
        assert not self.published or self._version > self.published[-1], "published versions must rise strictly (I1)"
        self.published.append(self._version)
        self.on_publish(self._version)
        return WeightUpdate(version=self._version, num_bytes=8, publish_seconds=self.publish_seconds)

    async def save(self, directory: Path) -> None:
        self.saved.append(directory)

    async def copy(self) -> int:
        self.copied.append(self._version)
        return 8

    async def stop(self) -> None:
        pass

    def _outcome(self, selection: Selection, index: int) -> MemberOutcome:
        member = selection.members[index]
        summary = member.summary
        trained = stale = over = 0
        for count in summary.versions:
            staleness = self._version.number - count.version.number
            assert staleness >= 0, "a token is newer than the learner"
            key, unmarked = (count.key + count.unmarked, 0) if member.marked else (count.key, count.unmarked)
            trained += key
            over += key > 0 and staleness > selection.max_key_staleness
            if staleness > selection.max_staleness:
                stale += unmarked
            else:
                trained += unmarked
        num_key_steps = summary.num_steps if member.marked else summary.num_key_steps
        return MemberOutcome(
            key=summary.key,
            trained_tokens=trained,
            skipped_tokens={"stale": stale} if stale else {},
            trained_key_steps=num_key_steps,
            over_bound_key_steps=min(over, num_key_steps),
        )

    def _statistics(self, selection: Selection) -> UpdateStatistics:
        ages = [selection.learner_version.number - count.version.number for member in selection.members for count in member.summary.versions]
        healthy = UpdateStatistics(
            loss=0.0, gradient_norm=0.0, learning_rate=0.0, entropy=0.0, kl_sampler_learner=0.0, ratio_mean=1.0, ratio_variance=0.0, ratio_max=1.0,
            effective_sample_size=1.0, clipped_fraction=0.0, masked_fraction=0.0, staleness_mean=sum(ages) / max(1, len(ages)),
            staleness_max=max(ages, default=0), staleness_histogram={age: ages.count(age) for age in sorted(set(ages))}, key_staleness_mean=None,
            key_staleness_max=None, trained_tokens=len(ages), trained_trajectories=len(selection.members), padded_tokens=len(ages),
        )  # fmt: skip
        return replace(healthy, **self.measured(selection))
