"""A learner that only takes time: roles.Learner under the virtual clock. It weighs tokens by the staleness rules of the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from headrace import clock
from headrace.config import Settings
from headrace.errors import HeadraceError
from headrace.runtime.simulated_cores import Seat, work
from headrace.runtime.time_model import TimeModel
from headrace.types import PolicyVersion
from headrace.updates import MemberOutcome, SelectedMember, Selection, UpdateResult, UpdateStatistics, WeightUpdate


class SimulatedLearner:
    """Minibatches hold whole groups, as equal in number as can be, like learner/batch's; each update raises the version by 1."""

    def __init__(self, settings: Settings, model: TimeModel, seats: Sequence[Seat] = ()) -> None:
        """`seats`: of its ranks, where devices share cores."""
        self._settings, self._model, self._seats = settings, model, seats
        self._version = PolicyVersion(0, 0)

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def learn(self, selection: Selection) -> UpdateResult:
        ranks, epochs = self._settings.run.num_learner_ranks, self._settings.learner.num_epochs
        parts = split_groups(selection.members, self._settings.learner.num_minibatches)
        seconds = epochs * sum(self._model.learn_seconds(float(sum(member.summary.num_tokens for member in part)), ranks) for part in parts)
        if self._seats:
            began = clock.now()
            await work(self._seats, seconds)
            seconds = clock.now() - began
            await asyncio.sleep(self._model.handover_seconds)
        else:
            await asyncio.sleep(seconds + self._model.handover_seconds)
        before = self._version
        tally = _Tally(selection)
        outcomes = tuple(tally.outcome(member, before.number + index) for index, part in enumerate(parts) for member in part)
        self._version = PolicyVersion(before.lineage, before.number + epochs * len(parts))
        return UpdateResult(
            selection_id=selection.id,
            version_before=before,
            version_after=self._version,
            outcomes=outcomes,
            statistics=tally.statistics(self._settings.learner.learning_rate),
            refused=None,
            seconds=seconds,
            busy_seconds=seconds * self._model.learn_busy_fraction,
        )

    async def publish(self) -> WeightUpdate:
        if self._model.publish_seconds > 0:
            await asyncio.sleep(self._model.publish_seconds)
        return WeightUpdate(version=self._version, num_bytes=self._model.update_bytes, publish_seconds=self._model.publish_seconds)

    async def save(self, directory: Path) -> None:
        raise HeadraceError(f"{directory}: a simulated learner has no weights to save.")

    async def copy(self) -> int:
        raise HeadraceError("a simulated learner has no state to copy.")

    async def stop(self) -> None:
        """There is no process."""


def split_groups(members: Sequence[SelectedMember], num_parts: int) -> list[list[SelectedMember]]:
    """Whole groups in order, the first parts one group longer where they are not equal; no part is empty."""
    groups: list[list[SelectedMember]] = []
    for member in members:
        if not groups or groups[-1][0].summary.key.group_id != member.summary.key.group_id:
            groups.append([])
        groups[-1].append(member)
    count = max(1, min(num_parts, len(groups)))
    each, more = divmod(len(groups), count)
    parts, start = [], 0
    for index in range(count):
        end = start + each + (index < more)
        parts.append([member for group in groups[start:end] for member in group])
        start = end
    return parts


class _Tally:
    """What one batch's updates do with its tokens. Later epochs train the same ones, a little older."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._histogram: dict[int, int] = {}
        self._key_histogram: dict[int, int] = {}
        self._trajectories = self._forward_tokens = 0

    def outcome(self, member: SelectedMember, version: int) -> MemberOutcome:
        """`version`: of the learner when it updates on this member."""
        summary, stale, trained, key, over = member.summary, 0, 0, 0, 0
        for count in summary.versions:
            age = version - count.version.number
            if age > self._selection.max_staleness:
                stale += count.unmarked
            else:
                trained += count.unmarked
                self._histogram[age] = self._histogram.get(age, 0) + count.unmarked
            if count.key:  # trained however old they are
                key, over = key + count.key, over + count.key * (age > self._selection.max_key_staleness)
                self._histogram[age] = self._histogram.get(age, 0) + count.key
                self._key_histogram[age] = self._key_histogram.get(age, 0) + count.key
        trained += key
        key_steps = member.num_key_steps
        self._trajectories += trained > 0
        self._forward_tokens += summary.num_tokens
        # tokens of a key step have one age, or nearly: the share of tokens is that of steps
        over_steps = round(key_steps * over / key) if key else 0
        skipped = {"stale": stale} if stale else {}
        return MemberOutcome(key=summary.key, trained_tokens=trained, skipped_tokens=skipped, trained_key_steps=key_steps, over_bound_key_steps=over_steps)

    def statistics(self, learning_rate: float) -> UpdateStatistics:
        """Of staleness and tokens; a simulated policy does not change, so every ratio is 1."""
        trained = sum(self._histogram.values())
        total = sum(age * count for age, count in self._histogram.items())
        keys = sum(self._key_histogram.values())
        key_mean = sum(age * count for age, count in self._key_histogram.items()) / keys if keys else None
        return UpdateStatistics(
            loss=0.0, gradient_norm=0.0, learning_rate=learning_rate, entropy=0.0, kl_sampler_learner=0.0, ratio_mean=1.0, ratio_variance=0.0,
            ratio_max=1.0, effective_sample_size=1.0, clipped_fraction=0.0, masked_fraction=0.0, staleness_mean=total / trained if trained else 0.0,
            staleness_max=max(self._histogram, default=0), staleness_histogram=dict(sorted(self._histogram.items())), key_staleness_mean=key_mean,
            key_staleness_max=max(self._key_histogram, default=None), key_staleness_histogram=dict(sorted(self._key_histogram.items())),
            trained_tokens=trained, trained_trajectories=self._trajectories, padded_tokens=self._forward_tokens,
        )  # fmt: skip
