"""Verification in simulated time: what a check takes, which token it rejects, and what stands (rollout/refresh.py of the real one). Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.config import Settings, Verify
from headrace.runtime.time_model import PlannedStep
from headrace.types import PolicyVersion, RolloutKey

Drawn = dict[PolicyVersion, int]
"""Tokens of one action by the version that drew, or accepted, them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The first rejected token."""

    step: int
    kept_tokens: int
    """Of that step's action, before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRule:
    """What a run checks, and how often."""

    key_steps_only: bool
    max_rounds: int
    seed: int
    rejects: Callable[[int, int], float]
    """(tokens, updates since they were drawn) -> chance that one of them is rejected."""

    @classmethod
    def of(cls, settings: Settings, rejects: Callable[[int, int], float] | None) -> CheckRule | None:
        """None: nothing is verified."""
        if settings.pool.verify is Verify.OFF or rejects is None:
            return None
        return cls(
            key_steps_only=settings.pool.verify is Verify.KEY_STEPS, max_rounds=settings.pool.verify_rounds, seed=settings.run.seed, rejects=rejects
        )  # fmt: skip

    def checks(self, step: PlannedStep) -> bool:
        return step.key or not self.key_steps_only

    def accept(
        self, drawn: Sequence[Drawn], steps: Sequence[PlannedStep], newest: PolicyVersion, key: RolloutKey, round: int
    ) -> tuple[list[Drawn], Cut | None]:
        """(tokens by version that stand, where the first rejection is): what is accepted counts for `newest`."""
        stream = random.Random(f"{self.seed} {key.group_id} {key.member} {key.attempt} {round}")
        stands: list[Drawn] = []
        for index, counts in enumerate(drawn):
            total = sum(counts.values())
            if not self.checks(steps[index]) or not total:
                stands.append(counts)
                continue
            for version, count in sorted(counts.items()):
                if stream.random() < self.rejects(count, newest.number - version.number):
                    before = sum(other for earlier, other in counts.items() if earlier < version)
                    kept = before + stream.randrange(count)
                    return [*stands, {newest: kept} if kept else {}], Cut(step=index, kept_tokens=kept)
            stands.append({newest: total})
        return stands, None
