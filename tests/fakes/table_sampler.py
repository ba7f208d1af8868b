"""A sampler whose policies are tables, so that the distribution of whole rollouts is known exactly; it verifies by the exact rule.

    policy(number, context) -> {token: probability}

Everything is drawn at once: no virtual time passes. What it keeps and how it redraws is written from DESIGN section 6, apart from the
real sampler.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache

from headrace.roles import WaitingFor
from headrace.types import (
    Completion,
    PolicyVersion,
    RolloutKey,
    SampleRequest,
    StopReason,
    VerifyRequest,
    VerifyResult,
    VersionSpan,
    WorkerActivity,
)

Distribution = dict[int, float]


@lru_cache(100_000)
def table_policy(number: int, context: tuple[int, ...]) -> Distribution:
    """Differs from version to version, mostly a little, sometimes a lot."""
    base, own = random.Random(repr(context)), random.Random(repr((number, context)))
    weights = [base.uniform(0.2, 1.0) * own.choice([0.05, 0.6, 1.0, 1.5]) for _ in TOKENS]
    return {token: weight / sum(weights) for token, weight in zip(TOKENS, weights, strict=True)}


TOKENS = (0, ord("a"), ord("b"))
"""The end of an action, and two letters."""


class TableSampler:
    """Implements roles.Sampler. `number(request, index)` is the version that draws that token of an action."""

    def __init__(self, *, number: Callable[[SampleRequest, int], int], seed: int = 0, max_running: int = 64) -> None:
        self.max_running = self.most_long = max_running
        self.max_context_tokens = 1000
        self.number = number
        self.verifying_number = 0
        self.num_rejected = 0
        self.generated_tokens = 0
        self._random = random.Random(seed)
        self._kept: dict[RolloutKey, dict[tuple[int, int], Distribution]] = {}

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(0, self.verifying_number)

    @property
    def num_running(self) -> int:
        return 0

    @property
    def long_rollouts(self) -> frozenset[RolloutKey]:
        return frozenset()

    @property
    def parked(self) -> tuple[RolloutKey, ...]:
        return ()

    async def sample(self, request: SampleRequest) -> Completion:
        context, stops = list(request.tokens), request.sampling.stop_tokens
        tokens: list[int] = []
        logprobs: list[float] = []
        spans: list[VersionSpan] = []
        while not tokens or (tokens[-1] not in stops and request.drawn_tokens + len(tokens) < request.sampling.max_action_tokens):
            index = request.drawn_tokens + len(tokens)
            version = PolicyVersion(0, self.number(request, index))
            distribution = table_policy(version.number, tuple(context))
            token = self._draw(distribution)
            if request.keep_distribution:
                self._kept.setdefault(request.key, {})[request.step, index] = distribution
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=len(tokens) + 1)
            else:
                spans.append(VersionSpan(version=version, start=len(tokens), end=len(tokens) + 1))
            tokens.append(token)
            logprobs.append(math.log(distribution[token]))
            context.append(token)
        self.generated_tokens += len(tokens)
        reason = StopReason.STOP if tokens[-1] in stops else StopReason.MAX_TOKENS
        return Completion(tokens=tuple(tokens), logprobs=tuple(logprobs), version_spans=tuple(spans), stop_reason=reason)

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        kept = self._kept[request.key]
        accepted: list[int] = []
        logprobs: list[float] = []
        starts = request.context_starts or (0,) * len(request.checked)
        for context_start, (step, start, end) in zip(starts, request.checked, strict=True):
            for position in range(start, end):
                token, old = request.tokens[position], kept[step, position - start]
                new = kept[step, position - start] = table_policy(self.verifying_number, tuple(request.tokens[context_start:position]))
                if self._random.random() < min(1.0, request.lenience * new[token] / old[token]):
                    accepted.append(position)
                    logprobs.append(math.log(new[token]))
                    continue
                for later in [place for place in kept if place > (step, position - start)]:
                    del kept[later]
                self.num_rejected += 1
                self.generated_tokens += 1
                rest = {each: max(0.0, new[each] - old[each]) for each in new}
                redrawn = self._draw({each: value / sum(rest.values()) for each, value in rest.items()})
                return self._result(accepted, logprobs, rejected=position, redrawn_token=redrawn, redrawn_logprob=math.log(new[redrawn]))
        return self._result(accepted, logprobs)

    def _result(self, accepted: list[int], logprobs: list[float], **rejection: float) -> VerifyResult:
        spans = tuple(VersionSpan(version=self.version, start=position, end=position + 1) for position in accepted)
        return VerifyResult(version=self.version, accepted=spans, logprobs=tuple(logprobs), **rejection)  # type: ignore[arg-type]

    def _draw(self, distribution: Distribution) -> int:
        return self._random.choices(list(distribution), list(distribution.values()))[0]

    def can_verify(self, key: RolloutKey) -> bool:
        return key in self._kept

    def forget(self, key: RolloutKey) -> None:
        self._kept.pop(key, None)

    def release(self, key: RolloutKey) -> int:
        return 0

    async def applied(self, version: PolicyVersion) -> None:
        """Its versions are scripted."""

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        raise NotImplementedError

    def wake(self) -> None:
        """Nothing waits."""

    def hold_weights(self, held: bool) -> None:
        """Its versions are scripted."""

    def take_activity(self) -> WorkerActivity:
        return WorkerActivity(
            seconds=0.0,
            busy_seconds=0.0,
            running_seconds={},
            idle_seconds={},
            decode_steps=0,
            prefill_tokens=0,
            sampled_tokens=0,
            apply_seconds=0.0,
            applied_updates=0,
        )

    async def run(self, waiting_for: WaitingFor) -> None:
        await asyncio.Event().wait()
