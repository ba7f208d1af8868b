"""The control of verification (pool.verify_rule = "random_cuts"): equally many cuts, elsewhere.

A rollout is cut exactly where some checked token of it would be rejected by the acceptance rule, with the same random numbers; but the place of
the cut is drawn uniformly from all its checked tokens, and the token there is a fresh draw of the new weights. So in every round as many of the
rollouts checked are cut as by the rule. What stands is not distributed as new draws: tokens that should have been rejected stay.

The forward goes on behind the token that the rule rejects, as far as the place: the check costs more than the rule's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.sampler.sampling import stream_key, uniforms
from headrace.types import VerifyRequest, VersionSpan

PLACE, FRESH = 3, 4
"""Purposes of random streams, beside those of verification.py."""


@dataclass(slots=True, kw_only=True)
class RandomCut:
    """Where one rollout is cut if it is cut."""

    num_before: int
    """Checked tokens before the place."""
    step: int
    offset: int
    """Of the place in the action of `step`."""
    index: int
    """Of the place in the trajectory."""
    uniform: float
    """For the fresh draw."""
    token: int = -1
    """The fresh draw; -1 until the place was computed."""
    logprob: float = 0.0
    rejects: bool = False
    """The rule rejects some token."""

    @classmethod
    def of(cls, request: VerifyRequest) -> RandomCut:
        checked = [(step, index - start, index) for step, start, end in request.checked for index in range(start, end)]
        place, fresh = (uniforms([stream_key(request.seed, request.key, request.checked[0][0], request.round, purpose)], [0])[0] for purpose in (PLACE, FRESH))
        num_before = min(int(place * len(checked)), len(checked) - 1)
        step, offset, index = checked[num_before]
        return cls(num_before=num_before, step=step, offset=offset, index=index, uniform=float(fresh))

    @property
    def is_due(self) -> bool:
        """Some token is rejected and the place is known."""
        return self.rejects and self.token >= 0

    def judged(self, places: Sequence[tuple[int, int]], new_CV: torch.Tensor, *, rejected: bool) -> None:
        """The rule has judged these (step, offset); new_CV: log-probabilities under the new weights."""
        self.rejects |= rejected
        place = (self.step, self.offset)
        if place in places:
            new_V = new_CV[list(places).index(place)]
            cumulative_V = new_V.exp().cumsum(-1)
            target = torch.tensor([self.uniform], dtype=cumulative_V.dtype, device=cumulative_V.device) * cumulative_V[-1:]
            self.token = min(int(torch.searchsorted(cumulative_V, target, right=True)), len(new_V) - 1)
            self.logprob = min(0.0, float(new_V[self.token]))

    def before(self, accepted: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
        """The part of these spans that stands when the rollout is cut."""
        return tuple(VersionSpan(version=span.version, start=span.start, end=min(span.end, self.index)) for span in accepted if span.start < self.index)
