"""The trajectory while it is written: observations and actions are appended, a verification cuts it, its end makes it a Trajectory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace import clock
from headrace.rollout.verification import Verified
from headrace.types import Completion, EndReason, RolloutRequest, StepRecord, StopReason, Trajectory, VerifyResult, VersionSpan


@dataclass(slots=True)
class StepDraft:
    """A StepRecord while its action waits for its reward."""

    action_start: int
    action_end: int
    version_spans: tuple[VersionSpan, ...]
    key_weight: float
    stop_reason: StopReason
    entropies: tuple[float, ...] | None = None
    """See Completion.entropies. At a redrawn token that of the distribution that it replaces: the checking one was not measured."""
    reward: float = 0.0
    wait_seconds: float = 0.0

    def record(self) -> StepRecord:
        return StepRecord(
            action_start=self.action_start,
            action_end=self.action_end,
            version_spans=self.version_spans,
            key_weight=self.key_weight,
            reward=self.reward,
            stop_reason=self.stop_reason,
            wait_seconds=self.wait_seconds,
        )


class Draft:
    """Tokens, log-probabilities and steps so far. Between two steps `tokens` ends with an action or with an observation to be answered."""

    __slots__ = (
        "_request",
        "discarded_tokens",
        "graded",
        "logprobs",
        "refreshed_key_steps",
        "refreshed_tokens",
        "rejected_seconds",
        "round",
        "started_seconds",
        "steps",
        "tokens",
        "verified",
    )

    def __init__(self, request: RolloutRequest) -> None:
        self._request = request
        self.started_seconds = clock.now()
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.steps: list[StepDraft] = []
        self.graded = 0.0
        """What the recipe's reward function said."""
        self.discarded_tokens = 0
        self.verified = Verified()
        self.round = 0
        self.refreshed_tokens = 0
        self.refreshed_key_steps = 0
        self.rejected_seconds = 0.0
        """When the last verification rejected a token."""

    def step_of(self, token: int) -> int:
        """The step to whose action the token belongs."""
        return next(index for index, step in enumerate(self.steps) if step.action_start <= token < step.action_end)

    def append_action(self, completion: Completion, key_weight: float) -> None:
        start = len(self.tokens)
        self.steps.append(
            StepDraft(
                action_start=start,
                action_end=start + len(completion.tokens),
                version_spans=_shifted(completion, start),
                key_weight=key_weight,
                stop_reason=completion.stop_reason,
                entropies=completion.entropies,
            )
        )
        self._append(completion)

    def continue_action(self, completion: Completion) -> None:
        """What was drawn after the redrawn token of the last action."""
        step = self.steps[-1]
        step.version_spans = _joined((*step.version_spans, *_shifted(completion, step.action_end)))
        step.action_end += len(completion.tokens)
        step.stop_reason = completion.stop_reason
        step.entropies = None if step.entropies is None or completion.entropies is None else step.entropies + completion.entropies
        self._append(completion)

    def last_action(self) -> Completion:
        """The whole last action, as if it had been drawn at once."""
        step = self.steps[-1]
        return Completion(
            tokens=tuple(self.tokens[step.action_start : step.action_end]),
            logprobs=tuple(self.logprobs[step.action_start - step.action_end :]),
            version_spans=tuple(
                VersionSpan(version=span.version, start=span.start - step.action_start, end=span.end - step.action_start) for span in step.version_spans
            ),
            stop_reason=step.stop_reason,
            entropies=step.entropies,
        )

    def cut(self, result: VerifyResult, delivered: Trajectory, key_weight: float) -> None:
        """Everything from the rejected token on is gone; the redrawn one stands in its place, in an action that has just begun again.

        `key_weight` is what was known of it before it was drawn.
        """
        token = result.rejected
        assert token is not None
        index = self.step_of(token)
        step = self.steps[index]
        kept = sum(before.action_end - before.action_start for before in self.steps[:index]) + token - step.action_start
        self.refreshed_tokens = len(self.logprobs) - kept
        self.refreshed_key_steps = sum(each.key_weight > 0 and each.action_end > token for each in delivered.steps)
        spans = [VersionSpan(version=span.version, start=span.start, end=min(span.end, token)) for span in step.version_spans if span.start < token]
        self.steps[index:] = [
            StepDraft(
                action_start=step.action_start,
                action_end=token + 1,
                version_spans=_joined((*spans, VersionSpan(version=result.version, start=token, end=token + 1))),
                key_weight=key_weight,
                stop_reason=StopReason.MAX_TOKENS,
                entropies=None if step.entropies is None else step.entropies[: token + 1 - step.action_start],
            )
        ]
        self.tokens[token:] = [result.redrawn_token]
        self.logprobs[kept:] = [result.redrawn_logprob]
        self.verified = self.verified.until(token)
        self.graded = 0.0

    @property
    def reward(self) -> float:
        return sum(step.reward for step in self.steps) + self.graded

    def trajectory(self, end_reason: EndReason, error: str | None) -> Trajectory:
        reward, request = self.reward, self._request
        return Trajectory(
            key=request.key,
            task_id=request.task.id,
            task_kind=request.task.kind,
            tokens=tuple(self.tokens[: self.steps[-1].action_end] if self.steps else ()),  # no observation that nobody answered
            sampler_logprobs=tuple(self.logprobs),
            steps=tuple(step.record() for step in self.steps),
            reward=reward if math.isfinite(reward) else 0.0,
            end_reason=end_reason,
            error=error,
            started_seconds=self.started_seconds,
            finished_seconds=clock.now(),
            wait_seconds=sum(step.wait_seconds for step in self.steps),
            discarded_tokens=self.discarded_tokens,
            temperature=request.sampling.temperature,
            verified_spans=self.verified.spans,
            verified_logprobs=self.verified.logprobs,
            round=self.round,
            refreshed_tokens=self.refreshed_tokens,
            refreshed_key_steps=self.refreshed_key_steps,
            refresh_seconds=clock.now() - self.rejected_seconds if self.refreshed_tokens else 0.0,
        )

    def _append(self, completion: Completion) -> None:
        self.tokens.extend(completion.tokens)
        self.logprobs.extend(completion.logprobs)


def _shifted(completion: Completion, start: int) -> tuple[VersionSpan, ...]:
    return tuple([VersionSpan(version=span.version, start=start + span.start, end=start + span.end) for span in completion.version_spans])


def _joined(spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version as one span."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version:
            joined[-1] = VersionSpan(version=span.version, start=joined[-1].start, end=span.end)
        else:
            joined.append(span)
    return tuple(joined)
