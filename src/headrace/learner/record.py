"""What the updates of one selection did: statistics over its trained tokens, and one outcome a member for the ledger.

Shapes: _N trained tokens of a micro-batch, _A all action tokens of the selection. A token counts once, at the first update that
trained it, however many epochs there were; means are over every (token, update) pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.learner.batch import Batch, MicroBatch, Weighing
from headrace.learner.forward import Scores
from headrace.learner.objective import ObjectiveTerms
from headrace.learner.ranks import reduce_max, reduce_sum
from headrace.learner.sequences import ratio
from headrace.updates import MemberOutcome, Selection, UpdateStatistics

UNTOUCHED = -2
MASKED = -1


class Sums(NamedTuple):
    """Additive over micro-batches, ranks and updates."""

    loss: float = 0.0
    weighed: float = 0.0
    """Tokens with weight, masked ones included."""
    kept: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0
    squared_ratio: float = 0.0
    clipped: float = 0.0
    reference_kl: float = 0.0
    padded_tokens: float = 0.0
    busy_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class UpdateRecord:
    """One update while it runs, on one rank."""

    sums: Tensor
    ratio_max: Tensor
    indices: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def add(self, micro_batch: MicroBatch, scores: Scores, terms: ObjectiveTerms) -> None:
        with torch.no_grad():
            kept_N = terms.kept_N.to(self.sums.dtype)
            logprobs_N = scores.logprobs_N.detach()
            ratio_N = ratio(logprobs_N, micro_batch.sampler_logprobs_N).to(self.sums.dtype) * kept_N
            ones_N = torch.ones_like(kept_N)
            reference_N = torch.zeros_like(kept_N) if terms.reference_kl_N is None else terms.reference_kl_N.to(self.sums.dtype)
            columns_NC = torch.stack(
                [
                    ones_N,
                    kept_N,
                    scores.entropy_N.detach().to(self.sums.dtype) * kept_N,
                    (micro_batch.sampler_logprobs_N - logprobs_N).to(self.sums.dtype) * kept_N,
                    ratio_N,
                    ratio_N.square(),
                    terms.clipped_N.to(self.sums.dtype),
                    reference_N * kept_N,
                ],
                dim=1,
            )
            self.sums[0] += terms.loss.detach()
            self.sums[1:9] += columns_NC.sum(0)
            self.sums[9] += micro_batch.padded_tokens
            self.ratio_max = torch.maximum(self.ratio_max, ratio_N.max())
        self.indices.append(micro_batch.index_N)
        self.kept.append(terms.kept_N)


class SelectionRecord:
    """Collects the updates of one selection on one rank; `finish` joins the ranks."""

    def __init__(self, batch: Batch, *, device: torch.device, world_size: int, has_reference: bool) -> None:
        self._batch = batch
        self._has_reference = has_reference
        self._device = device
        self._world_size = world_size
        size = len(batch.positions_A)
        self._state_A: NDArray[np.int64] = np.full(size, UNTOUCHED, dtype=np.int64)
        self._refused_A: NDArray[np.bool_] = np.zeros(size, dtype=np.bool_)
        self._sampled_out_A: NDArray[np.bool_] = np.zeros(size, dtype=np.bool_)
        self._over_bound_A: NDArray[np.bool_] = np.zeros(size, dtype=np.bool_)
        self._sums = torch.zeros(len(Sums._fields), dtype=torch.float64)
        self._ratio_max = 0.0
        self._norms: list[float] = []
        self._learning_rate = 0.0

    def begin_update(self, weighing: Weighing, part_A: NDArray[np.bool_]) -> UpdateRecord:
        """`part_A`: the action tokens of its minibatch."""
        self._sampled_out_A |= part_A & weighing.eligible_A & ~weighing.trained_A
        kind = torch.float32 if self._device.type == "mps" else torch.float64
        zeros = torch.zeros(len(Sums._fields), dtype=kind, device=self._device)
        return UpdateRecord(sums=zeros, ratio_max=torch.zeros((), dtype=kind, device=self._device))

    def kl(self, update: UpdateRecord) -> float:
        """KL(sampler || learner) of an update before it is made, nats a token; 0 without tokens in the loss. Collective."""
        kept, kl = reduce_sum(update.sums[[2, 4]], self._world_size).tolist()
        return kl / kept if kept else 0.0

    def commit(self, update: UpdateRecord, weighing: Weighing, *, gradient_norm: float, learning_rate: float) -> None:
        """The update was made."""
        self._sums += update.sums.cpu()
        self._ratio_max = max(self._ratio_max, float(update.ratio_max))
        self._norms.append(gradient_norm)
        self._learning_rate = learning_rate
        for index_N, kept_N in zip(update.indices, update.kept, strict=True):
            index_A, kept = index_N.cpu().numpy(), kept_N.cpu().numpy()
            trained_A, masked_A = index_A[kept], index_A[~kept]
            fresh_A = trained_A[self._state_A[trained_A] < 0]
            self._state_A[fresh_A] = weighing.staleness_A[fresh_A]
            self._state_A[masked_A] = np.maximum(self._state_A[masked_A], MASKED)
            self._over_bound_A[trained_A] |= weighing.over_bound_A[trained_A]

    def refuse(self, update: UpdateRecord, weighing: Weighing, part_A: NDArray[np.bool_]) -> None:
        """The update was not made: its tokens are not trained by it. The forward was paid for all the same."""
        self._sums[9] += update.sums[9].cpu()
        self._refused_A |= part_A & weighing.trained_A

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts what runs inside as busy seconds of this rank's device; on CUDA it waits for the device."""
        started = perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._sums[10] += perf_counter() - started

    def finish(self, selection: Selection) -> tuple[tuple[MemberOutcome, ...], UpdateStatistics | None, float]:
        """Outcomes of the members, statistics (None when nothing was trained), busy seconds (mean over ranks). Collective."""
        sums = Sums(*reduce_sum(self._sums.to(self._device), self._world_size).tolist())
        joined = torch.from_numpy(np.stack([self._state_A, self._over_bound_A.astype(np.int64)])).to(self._device)
        state_A, over_A = reduce_max(joined, self._world_size).cpu().numpy()
        ratio_max = float(reduce_max(torch.tensor([self._ratio_max], dtype=torch.float32, device=self._device), self._world_size))
        outcomes = tuple(self._outcome(selection, index, state_A, over_A > 0) for index in range(len(self._batch.rows)))
        statistics = self._statistics(sums, state_A, ratio_max, outcomes) if self._norms and sums.kept else None
        return outcomes, statistics, sums.busy_seconds / self._world_size

    def _outcome(self, selection: Selection, index: int, state_A: NDArray[np.int64], over_A: NDArray[np.bool_]) -> MemberOutcome:
        row = self._batch.rows[index]
        skipped = Counter(self._reason(token, state_A) for token in range(row.start, row.end) if state_A[token] < 0)
        trained_steps = over_steps = 0
        skipped_steps: Counter[str] = Counter()
        for step in row.steps:
            if not step.key:
                continue
            if (state_A[step.start : step.end] >= 0).any():
                trained_steps += 1
                over_steps += bool(over_A[step.start : step.end].any())
            else:
                skipped_steps[self._reason(step.start, state_A) if step.end > step.start else "empty"] += 1
        return MemberOutcome(
            key=selection.members[row.member].summary.key,
            trained_tokens=row.end - row.start - skipped.total(),
            skipped_tokens=dict(skipped),
            trained_key_steps=trained_steps,
            over_bound_key_steps=over_steps,
            skipped_key_steps=dict(skipped_steps),
        )

    def _reason(self, token: int, state_A: NDArray[np.int64]) -> str:
        if state_A[token] == MASKED:
            return "masked"
        if self._refused_A[token]:
            return "refused"
        return "sampled_out" if self._sampled_out_A[token] else "stale"

    def _statistics(self, sums: Sums, state_A: NDArray[np.int64], ratio_max: float, outcomes: tuple[MemberOutcome, ...]) -> UpdateStatistics:
        trained_A = state_A[state_A >= 0]
        key_A = state_A[(state_A >= 0) & self._batch.key_A]
        mean_ratio = sums.ratio / sums.kept
        return UpdateStatistics(
            loss=sums.loss / len(self._norms),
            gradient_norm=float(np.mean(self._norms)),
            learning_rate=self._learning_rate,
            entropy=sums.entropy / sums.kept,
            kl_sampler_learner=sums.kl / sums.kept,
            ratio_mean=mean_ratio,
            ratio_variance=max(sums.squared_ratio / sums.kept - mean_ratio**2, 0.0),
            ratio_max=ratio_max,
            effective_sample_size=sums.ratio**2 / (sums.kept * sums.squared_ratio) if sums.squared_ratio else 0.0,
            clipped_fraction=sums.clipped / sums.kept,
            masked_fraction=1.0 - sums.kept / sums.weighed,
            staleness_mean=float(trained_A.mean()),
            staleness_max=int(trained_A.max()),
            staleness_histogram=_histogram(trained_A),
            key_staleness_mean=float(key_A.mean()) if len(key_A) else None,
            key_staleness_max=int(key_A.max()) if len(key_A) else None,
            trained_tokens=len(trained_A),
            trained_trajectories=sum(outcome.trained_tokens > 0 for outcome in outcomes),
            padded_tokens=round(sums.padded_tokens),
            reference_kl=sums.reference_kl / sums.kept if self._has_reference else None,
            key_staleness_histogram=_histogram(key_A),
        )


def _histogram(ages_A: NDArray[np.int64]) -> dict[int, int]:
    """Updates -> tokens."""
    ages, counts = np.unique(ages_A, return_counts=True)
    return dict(zip(ages.tolist(), counts.tolist(), strict=True))
