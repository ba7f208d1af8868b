"""The sampler over transformers models: continuous batching in one asyncio loop.

Loop  takes: requests (`sample`), sequences (`score`), published weights      gives: completions, log-probabilities
      waits for: a request, a score, an announcement                          woken by: sample, score, wake, hold_weights
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import SamplerSettings
from headrace.errors import HeadraceError
from headrace.roles import Tokenizer, WaitingFor, WeightReader
from headrace.sampler.activity import BOOKKEEPING, ENVIRONMENT, GATHER, ROLLOUTS, ActivityMeter
from headrace.sampler.applying import DrainedSlots
from headrace.sampler.capacity import measure_capacity
from headrace.sampler.engine import Engine, score_batch
from headrace.sampler.gather import GatherTarget
from headrace.sampler.model import ServedModel
from headrace.sampler.rows import PromptTooLongError, Row
from headrace.sampler.sampling import stream_key
from headrace.sampler.verification import DRAW, budget_beside
from headrace.types import Completion, PolicyVersion, RolloutKey, SampleRequest, VerifyRequest, VerifyResult, WorkerActivity

_SCORE_LOGITS = 2**24
"""Numbers in the logits of one scoring forward at most, unless one sequence alone has more: 128 MiB in float64."""

_GIVE_WAY_SHARE = 0.02
"""Of a step's time, for everything else in the loop."""


@dataclass(slots=True, eq=False)
class _ScoreJob:
    sequence: Sequence[int]
    future: asyncio.Future[list[float]]


class TransformersSampler:
    """roles.Sampler over any causal LM of transformers that passes ServedModel's check.

    `measures_entropy`: completions carry the entropy of each token's distribution. `weights` None keeps the weights of `model_path`.
    Before the first publish the version is 0:0. Raises ModelError when the model cannot be loaded or served, when the tokenizer is not the
    model's, or when `settings.kv_memory_bytes` holds not even one sequence.
    """

    def __init__(
        self,
        model_path: str,
        *,
        settings: SamplerSettings,
        max_context_tokens: int,
        device: str,
        dtype: str,
        weights: WeightReader | None,
        tokenizer: Tokenizer,
        measures_entropy: bool = False,
    ) -> None:
        self._model = ServedModel(model_path, max_context_tokens=max_context_tokens, device=device, dtype=dtype)
        self._model.check_tokenizer(tokenizer)
        self._engine = Engine(
            self._model, settings=settings, max_context_tokens=max_context_tokens, weights=weights, tokenizer=tokenizer, measures_entropy=measures_entropy
        )
        self._settings = settings
        self._scores: deque[_ScoreJob] = deque()
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._applied = asyncio.Event()
        self._target = GatherTarget()
        self._meter = ActivityMeter(_loop_time, time.thread_time)
        self._drained = DrainedSlots()
        self._verify_ahead_seconds = 0.0
        """What verification has had more of than decoding since it last ran."""
        self.max_running = self._engine.max_running
        self.most_long = self._engine.admission.most_long
        self.max_context_tokens = max_context_tokens

    @property
    def version(self) -> PolicyVersion:
        return self._engine.version

    @property
    def num_running(self) -> int:
        return self._engine.num_ready

    @property
    def generated_tokens(self) -> int:
        return self._engine.generated_tokens + self._engine.verifier.redrawn_tokens

    @property
    def num_slots(self) -> int:
        """Storage slots that kv_memory_bytes pays for."""
        return self._engine.num_slots

    async def sample(self, request: SampleRequest) -> Completion:
        """Raises PromptTooLongError or another HeadraceError for this request only (case 14)."""
        self._check(request)
        named = (request.round, DRAW) if request.round else ()
        row = Row(request, stream_key(request.seed, request.key, request.step, *named), asyncio.get_running_loop().create_future())
        self._check_tokens(row.tokens[self._engine.slots.num_known(row) :])
        self._engine.add(row)
        self._wake.set()
        self._target.arrive()
        if self._engine.num_ready >= min(self._target.rows, self.max_running):
            self._full.set()
        try:
            return await row.future
        except asyncio.CancelledError:
            self._engine.drop(row)
            raise

    def release(self, key: RolloutKey) -> int:
        if self._engine.gate.draining:
            self._wake.set()  # it may have been the last one that new weights waited for
        return self._engine.release(key)

    async def applied(self, version: PolicyVersion) -> None:
        while self.version < version:
            self._applied.clear()
            await self._applied.wait()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token given those before it, temperature 1, under the weights in use; [len - 1] each."""
        for sequence in sequences:
            if len(sequence) > self.max_context_tokens + 1:
                raise PromptTooLongError(f"A sequence to score has {len(sequence)} tokens, the context holds {self.max_context_tokens}.")
            self._check_tokens(sequence)
        loop = asyncio.get_running_loop()
        jobs = [_ScoreJob(sequence, loop.create_future()) for sequence in sequences]
        self._scores.extend(job for job in jobs if len(job.sequence) > 1)
        self._wake.set()
        try:
            return [await job.future if len(job.sequence) > 1 else [] for job in jobs]
        except BaseException:
            for job in jobs:
                job.future.cancel()
            raise

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Served beside the decode steps, first come first served. Raises HeadraceError for this request only."""
        self._check_tokens(request.tokens)
        future: asyncio.Future[VerifyResult] = asyncio.get_running_loop().create_future()
        self._engine.verifier.add(request, future)
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None and future.result().rejected is not None:
                self._engine.lose(request.key, 1)  # it came too late for whoever was cancelled
            self._engine.verifier.drop(request.key)
            raise

    def can_verify(self, key: RolloutKey) -> bool:
        return self._engine.distributions.can_verify(key)

    def forget(self, key: RolloutKey) -> None:
        self._engine.distributions.forget(key)

    @property
    def long_rollouts(self) -> frozenset[RolloutKey]:
        return self._engine.admission.long_rollouts(self._engine.running)

    @property
    def parked(self) -> tuple[RolloutKey, ...]:
        return self._engine.parked

    def wake(self) -> None:
        self._wake.set()

    def hold_weights(self, held: bool) -> None:
        self._engine.held = held
        self._wake.set()

    def take_activity(self) -> WorkerActivity:
        engine = self._engine
        return self._meter.take(
            decode_steps=engine.decode_steps,
            prefill_tokens=engine.prefill_tokens,
            sampled_tokens=engine.drawn_tokens + engine.verifier.redrawn_tokens,
            applied_updates=engine.applied_updates,
            apply_delay_seconds=engine.gate.delay_seconds,
            drained_slot_seconds=self._drained.slot_seconds,
            verify_tokens=engine.verifier.forward_tokens,
            num_parked=engine.admission.num_parked,
            num_unkept=engine.distributions.num_unkept,
            recomputed_tokens=engine.recomputed_tokens,
            evicted_tokens=engine.evicted_tokens,
            kv_slots=engine.num_slots,
        )

    @property
    def recording_failure(self) -> str | None:
        return self._model.recording_failure

    def measure_capacity(self) -> tuple[int, float]:
        """(capacity, tokens/s at saturation): the smallest running batch that reaches 90 % of the best tokens/s (DESIGN section 2)."""
        return measure_capacity(self._model, self.max_running, self.max_context_tokens)

    async def run(self, waiting_for: WaitingFor) -> None:
        self._wake, self._full = asyncio.Event(), asyncio.Event()  # they belong to this loop
        self._meter.start()
        try:
            while True:
                await self._once(waiting_for)
        except BaseException as error:
            self._engine.fail_all(error)
            for job in self._scores:
                job.future.cancel()
            self._scores.clear()
            raise
        finally:
            self._meter.stop()

    async def _once(self, waiting_for: WaitingFor) -> None:
        """One turn: weights, then a wait, or a step; then the loop's other work."""
        engine, meter = self._engine, self._meter
        self._wake.clear()
        meter.idle(BOOKKEEPING, between=GATHER)
        self._take_up_weights()
        self._drained.note(meter.time, engine.num_drained_slots)
        verifying = engine.verifier.has_work
        if not engine.has_work and not self._scores and not verifying:
            meter.idle("weights" if engine.num_ready else waiting_for())
            await self._wake.wait()
            return
        if engine.has_work:
            if engine.can_grow and engine.num_ready < self._target.rows and waiting_for() == ENVIRONMENT and not verifying:
                await self._gather()
                self._take_up_weights()  # a key step may have come
            meter.busy(engine.step(), engine.last_work_seconds, engine.last_step_tokens, engine.last_step_context)
            self._target.observe_step(engine.last_step_tokens, meter.last_seconds, meter.time)
            self._verify_ahead_seconds -= meter.last_seconds
        if verifying:
            self._verify_some()
        if self._scores:
            meter.busy(*self._score_some())
        meter.idle(ROLLOUTS, between=GATHER if engine.num_ready else waiting_for())
        await self._give_way()

    def _take_up_weights(self) -> None:
        if self._engine.take_up_weights(self._meter.time):
            self._meter.applied()
            self._applied.set()

    def _verify_some(self) -> None:
        """Some tokens of the queue, for at most half of the time while others decode. Weights that wait for it do not wait longer for that."""
        engine = self._engine
        num_running = len(engine.running)
        if num_running and self._verify_ahead_seconds > 0 and not engine.verifier.closing:
            return
        served = engine.verifier.step(engine.version, budget_beside(num_running, self._settings.max_prefill_tokens))
        if served:
            self._meter.verified(num_running + served, engine.verifier.last_work_seconds)
            self._verify_ahead_seconds = self._meter.last_seconds

    async def _give_way(self) -> None:
        """Lets the loop go round once, and after a long step for up to 2 % of its time.

        An answer that comes from another process takes several rounds: at one a step, steps of half a second would make it wait for seconds.
        """
        until = self._meter.time + _GIVE_WAY_SHARE * self._meter.last_seconds
        await asyncio.sleep(0)
        while _loop_time() < until:  # noqa: ASYNC110 (it waits for rounds of the loop, nothing sets an event)
            await asyncio.sleep(0)

    async def _gather(self) -> None:
        """Waits for more requests, up to gather_seconds, until the batch is full or more would not pay."""
        self._full.clear()
        self._meter.idle(GATHER)
        try:
            async with asyncio.timeout(self._settings.gather_seconds):
                await self._full.wait()
        except TimeoutError:
            pass
        self._meter.idle(BOOKKEEPING, between=GATHER)

    def _score_some(self) -> tuple[int, float]:
        """One forward over jobs of like length. (Sequences, seconds of the model's work)"""
        budget = min(self._settings.max_prefill_tokens, max(1, _SCORE_LOGITS // self._model.vocabulary_size))
        alive = sorted((job for job in self._scores if not job.future.done()), key=lambda job: len(job.sequence))
        taken: list[_ScoreJob] = []
        for job in alive:
            longest = len(job.sequence) - 1
            if taken and (len(taken) + 1) * longest > budget:
                break
            taken.append(job)
        self._scores = deque(alive[len(taken) :])
        if not taken:
            return 0, 0.0
        results, seconds = score_batch(self._model, [job.sequence for job in taken])
        for job, scores in zip(taken, results, strict=True):
            job.future.set_result(scores)
        return len(taken), seconds

    def _check(self, request: SampleRequest) -> None:
        length, sampling = len(request.tokens), request.sampling
        if length >= self.max_context_tokens:
            raise PromptTooLongError(
                f"Group {request.key.group_id} member {request.key.member}: the context of {length} tokens leaves no room for an action; "
                f"the limit is {self.max_context_tokens} tokens.",
                remedy="Shorten the prompt or raise rollout.max_tokens.",
            )
        if length == 0:
            raise HeadraceError(f"Group {request.key.group_id} member {request.key.member}: the context is empty; a model continues at least one token.")
        if not sampling.temperature >= 0 or sampling.max_action_tokens < 1 or sampling.top_k < 0 or not 0 < sampling.top_p <= 1:
            raise HeadraceError(f"Sampling parameters out of range: {sampling}.")
        if not 0 <= request.drawn_tokens < min(length, sampling.max_action_tokens):
            raise HeadraceError(f"A context of {length} tokens cannot end with {request.drawn_tokens} of an action of at most {sampling.max_action_tokens}.")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        """An unknown token would fail the forward of the whole batch."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._model.vocabulary_size:
            raise HeadraceError(
                f"The context holds token {max(tokens) if max(tokens) >= self._model.vocabulary_size else min(tokens)}, the model knows 0 to "
                f"{self._model.vocabulary_size - 1}.",
                remedy="Use the tokenizer that belongs to the model.",
            )


def _loop_time() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
