"""Verification: a finished rollout's tokens are accepted or redrawn under the weights in use (DESIGN section 6).

The acceptance rule of speculative sampling (Leviathan, Kalman and Matias 2023, arXiv 2211.17192, section 2.3 and appendix A.1; on earlier
rollouts: SPEC-RL, arXiv 2509.23232). A token x that was drawn from p stands with probability min(1, q(x) / p(x)), q being the new distribution;
the first that does not is redrawn from the normalised max(0, q - p). What stands, and the redrawn token, are distributed as if drawn from q.

With lenience l > 1 tokens stand with probability min(1, l q / p): exact no more. The redraw stays that of l = 1: it then puts mass only where
q > p, where accepting alone gave too little, so the distance of the result to q (in total variation) is the least that this
acceptance allows: the sum over q < p of min(p, l q) - q.

The work is a prefill: each step of the sampler's loop computes some tokens of the queue beside its decode step, in a cache of their own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import HeadraceError
from headrace.sampler.attention import make_plan
from headrace.sampler.distributions import DistributionStore
from headrace.sampler.kv_cache import SlotCache
from headrace.sampler.model import ServedModel
from headrace.sampler.random_cuts import RandomCut
from headrace.sampler.sampling import stream_key, uniforms
from headrace.sampler.work import wait_for
from headrace.types import PolicyVersion, RolloutKey, VerifyRequest, VerifyResult, VersionSpan

DRAW, ACCEPT, REDRAW = 0, 1, 2
"""Purposes of random streams: after a verification they are named by its round and one of these."""
_MOST_LOGITS = 2**24
"""Numbers in the logits of one forward at most, unless one token alone has more: 128 MiB in float64."""
_LEAST_TOKENS = 256
_TOKENS_A_ROW = 4
"""Beside decoding a forward has so many tokens: enough to be efficient, few enough that no token waits long for it."""
_MOST_SLOTS = 64
_CACHE_SHARE = 8
"""The scratch cache takes at most 1/8 of what kv_memory_bytes pays for, and at least one slot."""


def accepts(new_C: torch.Tensor, old_C: torch.Tensor, uniforms_C: npt.NDArray[np.float64], lenience: float = 1.0) -> torch.Tensor:
    """[C] bool: which tokens stand. new_C and old_C: log-probabilities of the tokens under q and p."""
    chance_C = (new_C - old_C).exp() * lenience
    return torch.from_numpy(uniforms_C).to(chance_C.device) < chance_C


def redraw(new_RV: torch.Tensor, old_RV: torch.Tensor, uniforms_R: npt.NDArray[np.float64]) -> torch.Tensor:
    """[R] tokens drawn from the normalised max(0, q - p), by inverse CDF; from q where rounding left nothing of it."""
    new = new_RV.exp()
    residual = (new - old_RV.exp()).clamp_(min=0.0)
    cumulative = torch.where(residual.sum(-1, keepdim=True) > 0, residual, new).cumsum(-1)
    targets_R1 = torch.from_numpy(uniforms_R).to(cumulative.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets_R1, right=True)[:, 0].clamp_(max=new_RV.shape[1] - 1)


@dataclass(slots=True, eq=False)
class _Segment:
    """Tokens that are computed in one slot: the whole trajectory, or one action and its own context."""

    first: int
    """Index of its first token in the trajectory."""
    tokens: list[int]
    """Without the last one, whose logits nobody needs."""
    checked: list[tuple[int, int, int]]
    """(step, start, end) in the trajectory"""
    done: int = 0
    slot: int = -1


@dataclass(slots=True, eq=False)
class _Job:
    request: VerifyRequest
    future: asyncio.Future[VerifyResult]
    segments: deque[_Segment]
    accepted: list[VersionSpan] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    random_cut: RandomCut | None = None


@dataclass(slots=True)
class _Target:
    """Checked tokens [start, end) of one action whose logits a forward gives."""

    step: int
    offset: int
    """Of the first one in its action."""
    start: int
    end: int


class Verifier:
    """The queue of rollouts to verify. Weights may change only while no job is half done (`half_done`)."""

    def __init__(self, model: ServedModel, store: DistributionStore, *, max_context_tokens: int, kv_memory_bytes: int) -> None:
        self.closing = False
        """New weights wait for the job that is half done: no other is begun."""
        self.redrawn_tokens = 0
        self.accepted_tokens = 0
        self.forward_tokens = 0
        self.last_work_seconds = 0.0
        """Of the last step: forward, acceptance, redraws."""
        self.num_verified = 0
        self.num_cut = 0
        self._model = model
        self._store = store
        self._max_context_tokens = max_context_tokens
        self._num_slots = min(_MOST_SLOTS, max(1, kv_memory_bytes // _CACHE_SHARE // model.slot_bytes))
        self._cache: SlotCache | None = None
        self._free = list(range(self._num_slots))
        self._jobs: dict[RolloutKey, _Job] = {}
        self._begun: dict[RolloutKey, _Job] = {}
        """Those of which something is computed, first come first."""

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    @property
    def half_done(self) -> bool:
        return bool(self._begun)

    def add(self, request: VerifyRequest, future: asyncio.Future[VerifyResult]) -> None:
        """Raises HeadraceError for a request that cannot be served."""
        self._check(request)
        starts = request.context_starts or [0]
        segments: deque[_Segment] = deque()
        for index, start in enumerate(starts):
            checked = list(request.checked) if not request.context_starts else [request.checked[index]]
            segments.append(_Segment(first=start, tokens=list(request.tokens[start : checked[-1][2] - 1]), checked=checked))
        self._jobs[request.key] = _Job(request, future, segments, random_cut=RandomCut.of(request) if request.random_cuts else None)

    def drop(self, key: RolloutKey) -> None:
        """Nobody waits for the answer any more. A rollout that is half judged is given up: some of its distributions are the new ones."""
        job = self._jobs.get(key)
        if job is not None:
            if key in self._begun:
                self._store.give_up(key)
            self._remove(job)

    def step(self, version: PolicyVersion, budget: int) -> int:
        """Computes up to `budget` tokens of the queue. Gives the number of rollouts served."""
        parts = self._choose(min(budget, max(1, _MOST_LOGITS // self._model.vocabulary_size)))
        if not parts:
            return 0
        if self._cache is None:
            self._cache = self._model.new_cache(self._num_slots, self._max_context_tokens)
        plan = make_plan(
            [segment.tokens[segment.done : segment.done + count] for _, segment, count in parts],
            [segment.done for _, segment, _ in parts],
            [segment.slot for _, segment, _ in parts],
            self._model.device,
        )
        targets = [_targets(segment, count) for _, segment, count in parts]
        where: list[int] = []
        for (_, segment, count), last, mine in zip(parts, plan.last_R.tolist(), targets, strict=True):
            # the logits of token t stand at token t - 1; the chunk ends at packed position `last`
            end = segment.first + segment.done + count
            where.extend(last - (end - t) for target in mine for t in range(target.start, target.end))
        at = torch.tensor(where, device=self._model.device) if where else plan.last_R[:1]
        started = perf_counter()
        logits_CV = self._model.forward(self._cache, plan, at)
        if not where:
            wait_for(self._model.device)
        self.last_work_seconds = perf_counter() - started
        self.forward_tokens += plan.num_tokens
        position = 0
        for (job, segment, count), mine in zip(parts, targets, strict=True):
            segment.done += count
            size = sum(target.end - target.start for target in mine)
            if size and not job.future.done():
                started = perf_counter()
                self._judge(job, mine, logits_CV[position : position + size], version)
                self.last_work_seconds += perf_counter() - started
            position += size
            if segment.done == len(segment.tokens):
                self._end_segment(job, segment)
            if not job.segments and not job.future.done():
                self._finish(job, VerifyResult(version=version, accepted=tuple(job.accepted), logprobs=tuple(job.logprobs)))
        return len({id(job) for job, _, _ in parts})

    def fail_all(self, error: BaseException) -> None:
        """The sampler ends."""
        for job in list(self._jobs.values()):
            self._remove(job)
            if not job.future.done():
                job.future.set_exception(error) if isinstance(error, Exception) else job.future.cancel()

    def _check(self, request: VerifyRequest) -> None:
        key = request.key
        who = f"Group {key.group_id} member {key.member}"
        if not self._store.can_verify(key):
            raise HeadraceError(f"{who}: its distributions were not kept, so it cannot be verified.", remedy="Raise sampler.verify_memory_bytes.")
        if key in self._jobs:
            raise HeadraceError(f"{who} is being verified already.")
        sampling = request.sampling
        if not sampling.temperature > 0 or sampling.top_k or sampling.top_p < 1 or not request.lenience >= 1:
            raise HeadraceError(f"{who}: only draws from the whole distribution are verified, with a lenience of at least 1; got {request}.")
        contexts = request.context_starts or [0] * len(request.checked)
        if not request.checked or len(contexts) != len(request.checked):
            raise HeadraceError(f"{who}: {len(request.checked)} actions to check with {len(contexts)} contexts.")
        if any(end > start for (_, _, end), (_, start, _) in pairwise(request.checked)):
            raise HeadraceError(f"{who}: the actions to check are not in order: {request.checked}.")
        for context, (step, start, end) in zip(contexts, request.checked, strict=True):
            if not 0 <= context < start < end <= len(request.tokens) or end - context > self._max_context_tokens:
                raise HeadraceError(f"{who}: action [{start}, {end}) with the context from {context} on of {len(request.tokens)} tokens cannot be checked.")
            if len(self._store.rows_of(key, step)) != end - start:
                raise HeadraceError(f"{who}: step {step} has {end - start} tokens, {len(self._store.rows_of(key, step))} of its distributions were kept.")

    def _choose(self, budget: int) -> list[tuple[_Job, _Segment, int]]:
        """First come, first served: whole segments, and the beginning of one that the budget cuts."""
        parts: list[tuple[_Job, _Segment, int]] = []
        for job in list(self._begun.values()) if self.closing else self._jobs.values():
            for segment in job.segments:
                if budget <= 0 or (segment.slot < 0 and not self._free):
                    return parts
                if segment.slot < 0:
                    segment.slot = self._free.pop()
                count = min(budget, len(segment.tokens) - segment.done)
                budget -= count
                self._begun[job.request.key] = job
                parts.append((job, segment, count))
        return parts

    def _judge(self, job: _Job, targets: list[_Target], logits_CV: torch.Tensor, version: PolicyVersion) -> None:
        """Accepts tokens in order up to the first that does not stand; that one is redrawn and the job ends."""
        request = job.request
        places = [(target.step, target.offset + index) for target in targets for index in range(target.end - target.start)]
        rows = [self._store.rows_of(request.key, step)[offset] for step, offset in places]
        tokens = [token for target in targets for token in request.tokens[target.start : target.end]]
        new_CV = torch.log_softmax(logits_CV.double() / request.sampling.temperature, -1)
        tokens_C1 = torch.tensor(tokens, device=new_CV.device)[:, None]
        new_C = new_CV.gather(-1, tokens_C1)[:, 0]
        if bool(new_C.isnan().any()):
            self._fail(job, f"the model gave a logit that is not finite under weights {version}")
            return
        old_CV = self._store.read(rows)
        stands_C = accepts(new_C, old_CV.gather(-1, tokens_C1)[:, 0], _uniforms(request, places, ACCEPT), request.lenience)
        rejected = not bool(stands_C.all())
        if job.random_cut is not None:
            job.random_cut.judged(places, new_CV, rejected=rejected)
            rejected = False
        num_accepted = int(stands_C.long().argmin()) if rejected else len(places)
        self._accept(job, targets, num_accepted, version)
        job.logprobs.extend(new_C[:num_accepted].clamp(max=0.0).tolist())
        self._store.write(rows[: num_accepted + rejected], new_CV[: num_accepted + rejected])
        if job.random_cut is not None and job.random_cut.is_due:
            self._cut_at_random(job, job.random_cut, version)
        if rejected:
            one = slice(num_accepted, num_accepted + 1)
            step, offset = places[num_accepted]
            token = int(redraw(new_CV[one], old_CV[one], _uniforms(request, places[one], REDRAW)))
            index = next(target.start - target.offset for target in targets if target.step == step) + offset
            self._cut(
                job,
                step,
                offset,
                VerifyResult(
                    version=version,
                    accepted=tuple(job.accepted),
                    logprobs=tuple(job.logprobs),
                    rejected=index,
                    redrawn_token=token,
                    redrawn_logprob=min(0.0, float(new_CV[num_accepted, token])),
                ),
            )

    def _accept(self, job: _Job, targets: list[_Target], count: int, version: PolicyVersion) -> None:
        """The first `count` tokens of the targets."""
        self.accepted_tokens += count
        for target in targets:
            start, end = target.start, min(target.end, target.start + count)
            count -= end - start
            if end > start:
                if job.accepted and job.accepted[-1].end == start:
                    start = job.accepted.pop().start
                job.accepted.append(VersionSpan(version=version, start=start, end=end))

    def _cut(self, job: _Job, step: int, offset: int, result: VerifyResult) -> None:
        self._store.cut(job.request.key, step, offset + 1)
        self.redrawn_tokens += 1
        self.num_cut += 1
        self._finish(job, result)

    def _cut_at_random(self, job: _Job, cut: RandomCut, version: PolicyVersion) -> None:
        self.accepted_tokens -= len(job.logprobs) - cut.num_before
        result = VerifyResult(
            version=version,
            accepted=cut.before(job.accepted),
            logprobs=tuple(job.logprobs[: cut.num_before]),
            rejected=cut.index,
            redrawn_token=cut.token,
            redrawn_logprob=cut.logprob,
        )
        self._cut(job, cut.step, cut.offset, result)

    def _finish(self, job: _Job, result: VerifyResult) -> None:
        self.num_verified += 1
        self._remove(job)
        job.future.set_result(result)

    def _fail(self, job: _Job, why: str) -> None:
        """Some of its distributions may be the new ones already, for tokens that nobody will hear are verified."""
        key = job.request.key
        self._store.give_up(key)
        self._remove(job)
        job.future.set_exception(HeadraceError(f"Group {key.group_id} member {key.member}: {why}; it cannot be verified."))

    def _end_segment(self, job: _Job, segment: _Segment) -> None:
        if segment in job.segments:
            job.segments.remove(segment)
            self._free.append(segment.slot)

    def _remove(self, job: _Job) -> None:
        del self._jobs[job.request.key]
        self._begun.pop(job.request.key, None)
        self._free.extend(segment.slot for segment in job.segments if segment.slot >= 0)
        job.segments.clear()


def _targets(segment: _Segment, count: int) -> list[_Target]:
    """Checked tokens whose logits the next `count` tokens of the segment give."""
    first, end = segment.first + segment.done + 1, segment.first + segment.done + count + 1
    targets = []
    for step, start, stop in segment.checked:
        low, high = max(start, first), min(stop, end)
        if low < high:
            targets.append(_Target(step, low - start, low, high))
    return targets


def _uniforms(request: VerifyRequest, places: Sequence[tuple[int, int]], purpose: int) -> npt.NDArray[np.float64]:
    """One for each (step, position in the action)."""
    streams = {step: stream_key(request.seed, request.key, step, request.round, purpose) for step, _ in places}
    return uniforms([streams[step] for step, _ in places], [position for _, position in places])


def budget_beside(num_rows: int, most: int) -> int:
    """Tokens that one step may verify beside a decode step of so many rows."""
    return most if num_rows == 0 else min(most, max(_LEAST_TOKENS, _TOKENS_A_ROW * num_rows))
