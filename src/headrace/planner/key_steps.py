"""How many steps are marked, and what verifications found, from a run's events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

Line = Mapping[str, Any]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Verifications of finished rollouts under newer weights (DESIGN section 6)."""

    verify: Literal["key_steps", "all"]
    """What was checked; the other kind cannot be foretold from it."""
    count: Annotated[int, Field(ge=0)]
    accepted_share: Annotated[float, Field(ge=0, le=1)]
    """Of the rollouts checked, those of which every token stood."""
    rejections_per_token_update: NotNegative
    """Chance for each checked token and each update since it was drawn: policies drift apart evenly, to first order, so
    a token of age a stands with exp(-this x a)."""
    seconds_per_token: NotNegative
    """Of a sampler, for each token of a trajectory that is checked."""

    def rejects(self, tokens: int, updates: int) -> float:
        """Chance that one of so many checked tokens is rejected."""
        return -math.expm1(-self.rejections_per_token_update * tokens * max(0, updates))


def key_step_share(rollouts: Sequence[Line]) -> float:
    """Of the steps."""
    steps = sum(int(line["steps"]) for line in rollouts)
    return min(1.0, sum(int(line["keys"]) for line in rollouts) / steps) if steps else 0.0


def measure_checks(verify: str, deliveries: Iterable[Line], active: Sequence[Line]) -> Checks | None:
    """Of rollout_finished and rollout_verified lines in order, and worker_active lines. None where nothing was verified.

    All that is known of one check is whether it cut: with exposure e, the checked tokens' ages added up, it stands with exp(-h e). h is the most likely
    one: sum over the cut ones of e / (exp(h e) - 1) = sum over the others of e.
    """
    if verify not in ("key_steps", "all"):
        return None
    last: dict[tuple[int, int, int], Line] = {}
    stood: list[float] = []
    cut: list[float] = []
    for line in deliveries:
        key = (line["group"], line["member"], line["attempt"])
        before = last.get(key)
        if line["event"] == "rollout_verified" and before is not None and before["versions"] and line["versions"]:
            share = 1.0 if verify == "all" else before["keys"] / max(1, before["steps"])
            age = line["versions"][-1] - sum(before["versions"]) / 2
            exposure = max(1e-9, share * before["tokens"] * max(0.0, age))
            (cut if line["refreshed"] else stood).append(exposure)
        last[key] = line
    count = len(stood) + len(cut)
    if not count:
        return None
    seconds = sum(float(line["activity"].get("verify_seconds", 0.0)) for line in active)
    tokens = sum(int(line["activity"].get("verify_tokens", 0)) for line in active)
    kind: Any = verify
    return Checks(
        verify=kind,
        count=count,
        accepted_share=len(stood) / count,
        rejections_per_token_update=_hazard(stood, cut),
        seconds_per_token=seconds / tokens if tokens else 0.0,
    )


def _hazard(stood: Sequence[float], cut: Sequence[float]) -> float:
    if not cut:
        return 0.0
    low, high, total = 0.0, 1.0, sum(stood)
    for _ in range(60):
        middle = (low + high) / 2
        more = sum(each / math.expm1(min(700.0, middle * each)) for each in cut if middle * each > 0) > total
        low, high = (middle, high) if more else (low, middle)
    return high
