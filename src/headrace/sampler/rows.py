"""Requests as the engine holds them: one row an action in progress, and the storage slots with what idle rollouts keep in them."""

from __future__ import annotations

from asyncio import Future
from collections import OrderedDict
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.sampler.distributions import is_kept
from headrace.types import Completion, PolicyVersion, RolloutKey, SampleRequest, StopReason, VersionSpan


class PromptTooLongError(HeadraceError):
    """One request's context leaves no room for a token; only that request fails."""


class Row:
    """One action being drawn. `tokens[:cached]` have their keys and values in `slot`; the last drawn token never has."""

    __slots__ = (
        "begun",
        "cached",
        "computed",
        "discarded",
        "entropies",
        "evicted",
        "future",
        "keep",
        "keeps_distribution",
        "logprobs",
        "most_tokens",
        "num_context",
        "order",
        "parked",
        "recomputing",
        "request",
        "slot",
        "spans",
        "stream",
        "tokens",
        "tokens_before",
    )

    def __init__(self, request: SampleRequest, stream: int, future: Future[Completion]) -> None:
        self.request = request
        self.stream = stream
        self.future = future
        self.keep = request.keep_cache
        self.tokens = list(request.tokens)
        self.num_context = len(self.tokens)
        self.begun = request.drawn_tokens
        """Tokens of the action that the context holds already."""
        self.most_tokens = request.sampling.max_action_tokens - self.begun
        self.keeps_distribution = request.keep_distribution and is_kept(request)
        self.order = 0
        """Rows that came earlier have smaller numbers."""
        self.tokens_before = 0
        """Of the rollout's trajectory, left out of the context."""
        self.parked = False
        """Long, and waits so that short work can run."""
        self.entropies: list[float] | None = None
        """Of the drawn tokens' distributions, nats; None while none was measured."""
        self.cached = 0
        self.computed = 0
        """Leading tokens that were computed for this rollout before `cached` last shrank: what of them is computed now is computed again."""
        self.evicted = 0
        """Those of them whose cache gave way for want of memory."""
        self.slot = -1
        self.logprobs: list[float] = []
        self.spans: list[tuple[PolicyVersion, int]] = []
        """(version, first token of the action drawn by it)"""
        self.discarded = 0
        self.recomputing = False
        """Its KV cache is being computed again under new weights."""

    @property
    def num_tokens(self) -> int:
        """Of the rollout's trajectory so far."""
        return self.tokens_before + len(self.tokens)

    def record(self, token: int, logprob: float, version: PolicyVersion) -> None:
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.logprobs)))
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def invalidate(self) -> None:
        """Its cache is of older weights."""
        self.computed = max(self.computed, self.cached)
        self.cached = self.evicted = 0

    def discard(self) -> None:
        """Throws the drawn tokens away. They are drawn again from the same random numbers: whether an action is discarded depends
        on how long it runs, and fresh numbers would therefore favour short actions."""
        self.discarded += len(self.logprobs)
        del self.tokens[self.num_context :]
        self.computed = min(self.computed, self.num_context)  # other tokens may come in their place
        self.logprobs.clear()
        self.spans.clear()
        self.entropies = None

    def completion(self, reason: StopReason) -> Completion:
        spans, end = [], len(self.logprobs)
        for version, start in reversed(self.spans):
            spans.append(VersionSpan(version=version, start=start, end=end))
            end = start
        return Completion(
            tokens=tuple(self.tokens[self.num_context :]),
            logprobs=tuple(self.logprobs),
            version_spans=tuple(reversed(spans)),
            stop_reason=reason,
            discarded_tokens=self.discarded,
            entropies=None if self.entropies is None else tuple(self.entropies),
        )


@dataclass(slots=True)
class Kept:
    """The cache of a rollout that waits for its environment."""

    slot: int
    tokens: list[int]
    cached: int
    computed: int
    """At least `cached`: of weights before as well."""


@dataclass(slots=True)
class _Evicted:
    """What is known of a rollout whose cache gave way: enough to tell later what is computed again for that."""

    cached: int
    computed: int
    num_tokens: int
    digest: int
    """Of the tokens, which are not kept."""


class SlotTable:
    """Storage slots: free, held by a row, or kept for an idle rollout. Kept ones are given up, least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._kept: OrderedDict[RolloutKey, Kept] = OrderedDict()
        self._evicted: dict[RolloutKey, _Evicted] = {}
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def take(self) -> int | None:
        """A slot for a new sequence; None when rows hold them all."""
        if self._free:
            return self._free.pop()
        if not self._kept:
            return None
        key, kept = self._kept.popitem(last=False)
        self.num_evicted += 1
        self._evicted[key] = _Evicted(kept.cached, kept.computed, len(kept.tokens), hash(tuple(kept.tokens)))
        return kept.slot

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def keep(self, row: Row, tokens: list[int]) -> None:
        """The slot of the row's rollout with what it holds of `tokens`."""
        self.forget(row.request.key)
        self._kept[row.request.key] = Kept(row.slot, tokens, row.cached, max(row.computed, row.cached))

    def resume(self, row: Row) -> None:
        """Hands the row the slot that its rollout kept, and as much of the cache as its context continues."""
        kept = self._kept.pop(row.request.key, None)
        if kept is None:
            self._recall(row)
            return
        row.slot = kept.slot
        # The last token's logits are wanted, so at least one token is computed.
        if _begins_with(row.tokens, kept.tokens):
            row.cached = min(kept.cached, len(row.tokens) - 1)
            row.computed = kept.computed

    def _recall(self, row: Row) -> None:
        evicted = self._evicted.pop(row.request.key, None)
        if evicted is not None and hash(tuple(row.tokens[: evicted.num_tokens])) == evicted.digest:
            row.computed, row.evicted = evicted.computed, evicted.cached

    def num_known(self, row: Row) -> int:
        """Leading tokens of the row's context that its rollout's cache was kept with: they were served before."""
        kept = self._kept.get(row.request.key)
        return len(kept.tokens) if kept is not None and _begins_with(row.tokens, kept.tokens) else 0

    def forget(self, key: RolloutKey) -> None:
        self._evicted.pop(key, None)
        if (kept := self._kept.pop(key, None)) is not None:
            self._free.append(kept.slot)

    def invalidate_kept(self) -> None:
        """Idle rollouts' keys and values are of older weights and must not be read again."""
        for kept in self._kept.values():
            kept.cached = 0
        for evicted in self._evicted.values():
            evicted.cached = 0


def _begins_with(tokens: list[int], first: list[int]) -> bool:
    return tokens[: len(first)] == first
