"""What a scripted sampler keeps of its actions to verify them, and the rules of using it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from headrace.errors import HeadraceError
from headrace.types import PolicyVersion, RolloutKey, SampleRequest, VerifyRequest, VersionSpan


class ContractViolation(BaseException):
    """A role was used in a way its protocol forbids. Not an Exception: nothing may take it for a failed rollout."""


class KeptActions:
    """By rollout and step the tokens whose distributions are kept; what does not fit is as if it had never been kept.

    Raises ContractViolation for a verification of tokens that were not drawn here with keep_distribution, that are not what was
    drawn, whose round is not the next one, or that were forgotten.
    """

    def __init__(self, can_keep: Callable[[RolloutKey], bool]) -> None:
        self._can_keep = can_keep
        self._actions: dict[RolloutKey, dict[int, tuple[int, ...]]] = {}
        self._rounds: dict[RolloutKey, int] = {}
        self._forgotten: set[RolloutKey] = set()

    def __contains__(self, key: RolloutKey) -> bool:
        return key in self._actions

    @property
    def keys(self) -> frozenset[RolloutKey]:
        """Not forgotten yet."""
        return frozenset(self._actions)

    def round_of(self, key: RolloutKey) -> int:
        """Verifications so far."""
        return self._rounds.get(key, 0)

    def add(self, request: SampleRequest, drawn: Sequence[int]) -> None:
        if request.key in self._forgotten:
            raise ContractViolation(f"{request.key} keeps distributions after it was forgotten")
        begun = tuple(request.tokens[len(request.tokens) - request.drawn_tokens :])
        self._actions.setdefault(request.key, {})[request.step] = (*begun, *drawn)

    def can_verify(self, key: RolloutKey) -> bool:
        return key in self._actions and self._can_keep(key)

    def check(self, request: VerifyRequest) -> None:
        key, previous = request.key, 0
        if key in self._forgotten or key not in self._actions:
            raise ContractViolation(f"{key} is verified, but it {'was forgotten' if key in self._forgotten else 'kept no distribution'}")
        if request.round != self.round_of(key) + 1:
            raise ContractViolation(f"{key} is verified in round {request.round} after {self.round_of(key)} verifications")
        if not self._can_keep(key):
            raise HeadraceError(f"{key}: its distributions were not kept")
        for step, start, end in request.checked:
            if not previous <= start < end <= len(request.tokens):
                raise ContractViolation(f"{key}: step {step} of the verification spans [{start}, {end}) of {len(request.tokens)} tokens")
            if self._actions[key].get(step) != tuple(request.tokens[start:end]):
                raise ContractViolation(f"{key}: the tokens of step {step} are not the ones that were drawn and kept")
            previous = end

    def verified(self, request: VerifyRequest) -> None:
        self._rounds[request.key] = request.round

    def cut(self, request: VerifyRequest, step: int, rejected: int, token: int) -> None:
        """What comes after the rejected token is gone; the redrawn one stands in its place."""
        start = next(start for checked, start, _ in request.checked if checked == step)
        kept = {number: tokens for number, tokens in self._actions[request.key].items() if number < step}
        kept[step] = (*request.tokens[start:rejected], token)
        self._actions[request.key] = kept

    def forget(self, key: RolloutKey) -> None:
        self._actions.pop(key, None)
        self._rounds.pop(key, None)
        self._forgotten.add(key)


def verification_stream(request: VerifyRequest, index: int, *what: object) -> random.Random:
    return random.Random(repr((request.seed, *request.key, "verify", request.round, index, *what)))


def another_letter(request: VerifyRequest, index: int) -> int:
    return verification_stream(request, index).choice([letter for letter in range(ord("a"), ord("z") + 1) if letter != request.tokens[index]])


def verified_logprob(request: VerifyRequest, index: int, version: PolicyVersion) -> float:
    return -verification_stream(request, index, "p", version).random()


def accepted_spans(request: VerifyRequest, rejected: int | None, version: PolicyVersion) -> tuple[VersionSpan, ...]:
    until = len(request.tokens) if rejected is None else rejected
    return tuple(VersionSpan(version=version, start=start, end=min(end, until)) for _, start, end in request.checked if start < min(end, until))
