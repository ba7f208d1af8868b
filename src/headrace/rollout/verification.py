"""Verification of finished rollouts, the records' side (DESIGN section 6): which tokens are checked, and what the answer means.

Aged rollouts become rollouts of the newest weights: token after token is accepted with probability min(1, new / old), and the first
rejected one is redrawn from the normalised max(0, new - old): the rule of speculative sampling (arXiv 2211.17192, theorem 1), used
on earlier rollouts by SPEC-RL (arXiv 2509.23232). The sampler does the checking; rollout/refresh.py goes on from the rejection.

Spans and indices count the trajectory's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import ContextRule, CutRule, Settings, Verify
from headrace.rollout.marking import marks_afterwards
from headrace.types import PolicyVersion, RolloutRequest, Trajectory, VerifyRequest, VerifyResult, VersionSpan

_LOWEST_LOGPROB = -3.0e38  # trajectories store float32


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRule:
    """What is checked, and how often."""

    key_steps_only: bool
    marked_afterwards: bool
    """A step may become a key step after its action was drawn (rules on actions, tools, rewards, entropy, a function)."""
    max_rounds: int
    """A trajectory of that round is not verified again, and one that cannot be verified gets it at once."""
    lenience: float
    context: ContextRule
    random_cuts: bool = False
    """The control of pool.verify_rule."""

    @classmethod
    def of(cls, settings: Settings) -> VerifyRule | None:
        """None: nothing is verified."""
        pool = settings.pool
        if pool.verify is Verify.OFF:
            return None
        return cls(
            key_steps_only=pool.verify is Verify.KEY_STEPS,
            marked_afterwards=marks_afterwards(settings.marks),
            max_rounds=pool.verify_rounds,
            lenience=pool.verify_lenience,
            context=settings.rollout.context,
            random_cuts=pool.verify_rule is CutRule.RANDOM_CUTS,
        )

    def may_check(self, key_weight: float) -> bool:
        """Before an action is drawn: whether its distribution must be kept."""
        return not self.key_steps_only or self.marked_afterwards or key_weight > 0

    def checked(self, trajectory: Trajectory) -> tuple[tuple[int, int, int], ...]:
        """(step, start, end) of the actions to check, in order."""
        return tuple(
            (index, step.action_start, step.action_end) for index, step in enumerate(trajectory.steps) if not self.key_steps_only or step.key_weight > 0
        )


def verify_request(rule: VerifyRule, trajectory: Trajectory, request: RolloutRequest) -> VerifyRequest:
    """Checks each action in the context that the sampler drew it in (I4)."""
    checked = rule.checked(trajectory)
    begins = [0, *(step.action_end for step in trajectory.steps)]
    return VerifyRequest(
        key=trajectory.key,
        round=trajectory.round + 1,
        seed=request.seed,
        tokens=trajectory.tokens,
        checked=checked,
        context_starts=tuple(begins[step] for step, _, _ in checked) if rule.context is ContextRule.OBSERVATION else (),
        sampling=request.sampling,
        lenience=rule.lenience,
        random_cuts=rule.random_cuts,
    )


def verified_by(rule: VerifyRule, result: VerifyResult, delivered: Trajectory) -> Verified:
    """What stands. Accepted tokens are draws of the newest weights; those that random cuts leave are not, and keep the log-probability they were drawn with."""
    if not rule.random_cuts:
        return Verified(result.accepted, result.logprobs)
    drawn_from = dict(zip((index for step in delivered.steps for index in range(step.action_start, step.action_end)), delivered.sampler_logprobs, strict=True))
    return Verified(result.accepted, tuple(drawn_from[index] for span in result.accepted for index in range(span.start, span.end)))


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens and what newer weights said of them: Trajectory.verified_spans and verified_logprobs while they are put together."""

    spans: tuple[VersionSpan, ...] = ()
    logprobs: tuple[float, ...] = ()

    def until(self, token: int) -> Verified:
        """Without this token and what comes after it."""
        return self._rebuilt({index: said for index, said in self._by_token().items() if index < token})

    def overlaid(self, newer: Verified) -> Verified:
        """A newer verification of a token replaces an older one."""
        return self._rebuilt(self._by_token() | newer._by_token())

    def _by_token(self) -> dict[int, tuple[PolicyVersion, float]]:
        tokens = [(index, span.version) for span in self.spans for index in range(span.start, span.end)]
        return {index: (version, logprob) for (index, version), logprob in zip(tokens, self.logprobs, strict=True)}

    @staticmethod
    def _rebuilt(said: dict[int, tuple[PolicyVersion, float]]) -> Verified:
        spans: list[VersionSpan] = []
        for index in sorted(said):
            version = said[index][0]
            start = index
            if spans and spans[-1].end == index and spans[-1].version == version:
                start = spans.pop().start
            spans.append(VersionSpan(version=version, start=start, end=index + 1))
        return Verified(tuple(spans), tuple(said[index][1] for index in sorted(said)))


def wrong_result(request: VerifyRequest, result: VerifyResult) -> str | None:
    """What is wrong with a sampler's answer; None: it accepts the checked tokens in order, up to its rejection."""
    checked = [index for _, start, end in request.checked for index in range(start, end)]
    accepted = [index for span in result.accepted for index in range(span.start, span.end)]
    expected = checked if result.rejected is None else checked[: checked.index(result.rejected)] if result.rejected in checked else None
    if expected is None:
        return f"it rejects token {result.rejected}, which was not to be checked"
    if accepted != expected:
        return f"it accepts {len(accepted)} tokens, not the {len(expected)} checked ones before its rejection"
    logprobs = (*result.logprobs, *(() if result.rejected is None else (result.redrawn_logprob,)))
    if len(result.logprobs) != len(accepted) or not all(_LOWEST_LOGPROB < value <= 0.0 for value in logprobs):
        return "its log-probabilities are not one a token, finite and at most 0"
    if result.rejected is not None and result.redrawn_token < 0:
        return f"it rejects token {result.rejected} and redraws none"
    return None
