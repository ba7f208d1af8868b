"""The distributions that tokens were drawn from, kept until their rollouts are verified for the last time.

One row of float32 log-probabilities over the vocabulary a token, in one block of memory: the rollouts that began first get it. When it is
full the one that began last gives its rows back and is never verified: its tokens stay as old as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.types import RolloutKey, SampleRequest


def is_kept(request: SampleRequest) -> bool:
    """Greedy, truncated and evaluation draws are never verified."""
    sampling = request.sampling
    return request.keep_distribution and not request.evaluation and sampling.temperature > 0 and sampling.top_k == 0 and sampling.top_p >= 1


class DistributionStore:
    """Rows by rollout, step and position in the action."""

    def __init__(self, vocabulary_size: int, *, memory_bytes: int, device: torch.device) -> None:
        self.num_rows = memory_bytes // (4 * vocabulary_size)
        self.num_unkept = 0
        """Rollouts whose rows did not fit, so far."""
        self._shape = (self.num_rows, vocabulary_size)
        self._device = device
        self._block: torch.Tensor | None = None  # a run that never verifies takes no memory
        self._num_touched = 0
        self._free: list[int] = []
        self._kept: dict[RolloutKey, dict[int, list[int]]] = {}
        self._unkept: set[RolloutKey] = set()

    @property
    def num_used(self) -> int:
        """Rows in use."""
        return self._num_touched - len(self._free)

    @property
    def in_use(self) -> bool:
        """Some rollout keeps distributions."""
        return bool(self._kept)

    def begin(self, request: SampleRequest) -> None:
        """An action is about to be drawn, or goes on after its first `drawn_tokens`."""
        if request.key in self._unkept:
            return
        rows = self._kept.setdefault(request.key, {}).setdefault(request.step, [])
        if len(rows) < request.drawn_tokens:
            self.give_up(request.key)
        else:
            self.truncate(request.key, request.step, request.drawn_tokens)

    def add(self, actions: Sequence[tuple[RolloutKey, int]], logprobs_RV: torch.Tensor) -> None:
        """One more token each for these actions (key, step), drawn from these rows."""
        indices, sources = [], []
        for source, (key, step) in enumerate(actions):
            rows = self._kept.get(key, {}).get(step)
            if rows is None:  # given up, or forgotten while it was drawn
                continue
            index = self._take(key)
            if index < 0:
                continue
            rows.append(index)
            indices.append(index)
            sources.append(source)
        if indices:  # a row that was given up in this call and taken again comes twice: the last one counts, as its owner is the last
            last = dict(zip(indices, sources, strict=True))
            self.write(list(last), logprobs_RV if list(last.values()) == list(range(len(actions))) else logprobs_RV[list(last.values())])

    def write(self, indices: Sequence[int], logprobs_RV: torch.Tensor) -> None:
        self.block.index_copy_(0, torch.tensor(indices, device=self._device), logprobs_RV.float())

    @property
    def block(self) -> torch.Tensor:
        """[rows, V]"""
        if self._block is None:
            self._block = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        return self._block

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """[len(indices), V] float64"""
        return self.block[list(indices)].double()

    def rows_of(self, key: RolloutKey, step: int) -> list[int]:
        """By position in the action; empty when nothing is kept."""
        return self._kept.get(key, {}).get(step, [])

    def can_verify(self, key: RolloutKey) -> bool:
        return key in self._kept and key not in self._unkept

    def truncate(self, key: RolloutKey, step: int, length: int) -> None:
        """What was drawn after the action's first `length` tokens does not stand."""
        if (rows := self._kept.get(key, {}).get(step)) is not None:
            self._free.extend(rows[length:])
            del rows[length:]

    def cut(self, key: RolloutKey, step: int, length: int) -> None:
        """The rollout stands up to the first `length` tokens of this step."""
        self.truncate(key, step, length)
        actions = self._kept.get(key, {})
        for later in [number for number in actions if number > step]:
            self._free.extend(actions.pop(later))

    def give_up(self, key: RolloutKey) -> None:
        """The rollout cannot be verified any more."""
        self.num_unkept += key not in self._unkept
        self._release(key)
        self._unkept.add(key)

    def forget(self, key: RolloutKey) -> None:
        self._release(key)
        self._unkept.discard(key)

    def _release(self, key: RolloutKey) -> None:
        for rows in self._kept.pop(key, {}).values():
            self._free.extend(rows)

    def _take(self, key: RolloutKey) -> int:
        """A row for this rollout; -1 when it is itself the one that began last."""
        if not self._free and self._num_touched < self.num_rows:
            self._num_touched += 1
            return self._num_touched - 1
        while not self._free:
            last = next(reversed(self._kept))
            self.give_up(last)
            if last == key:
                return -1
        return self._free.pop()
