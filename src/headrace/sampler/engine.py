"""The decode engine: takes rows, gives completions, one forward a step. Synchronous; transformers_sampler gives it a loop.

One step serves every row that needs few tokens (decode, a short observation) and as much of the longer prompts as
`max_prefill_tokens` allows, so a prompt never stops the others. Weights change only between two steps (case 11).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from time import perf_counter

import torch

from headrace.config import Apply, SamplerSettings, UpdateMode
from headrace.errors import HeadraceError, ModelError
from headrace.roles import Tokenizer, WeightReader
from headrace.sampler.admission import Admission
from headrace.sampler.applying import ApplyGate
from headrace.sampler.attention import SHORT_TOKENS, make_plan
from headrace.sampler.distributions import DistributionStore
from headrace.sampler.model import ServedModel
from headrace.sampler.rows import Row, SlotTable
from headrace.sampler.sampling import Draws
from headrace.sampler.verification import Verifier
from headrace.sampler.work import work
from headrace.types import PolicyVersion, RolloutKey, StopReason


class Engine:
    """Rows, slots and weights of one model."""

    def __init__(
        self,
        model: ServedModel,
        *,
        settings: SamplerSettings,
        max_context_tokens: int,
        weights: WeightReader | None,
        tokenizer: Tokenizer,
        measures_entropy: bool = False,
    ) -> None:
        self.model = model
        self.settings = settings
        self.max_context_tokens = max_context_tokens
        self.num_slots = self._affordable_slots()
        self.max_running = min(settings.max_running, self.num_slots)
        self.cache = model.new_cache(self.num_slots, max_context_tokens)
        self.slots = SlotTable(self.num_slots)
        self.gate = ApplyGate(settings.apply, max_delay_seconds=settings.max_apply_delay_seconds)
        self.admission = Admission(self.slots, self.gate, max_running=self.max_running, settings=settings)
        self.distributions = DistributionStore(model.vocabulary_size, memory_bytes=settings.verify_memory_bytes, device=model.device)
        self.verifier = Verifier(model, self.distributions, max_context_tokens=max_context_tokens, kv_memory_bytes=settings.kv_memory_bytes)
        self.waiting: deque[Row] = deque()
        """In order of arrival."""
        self.running: list[Row] = []
        self.version = PolicyVersion(0, 0)
        self.held = False
        self.generated_tokens = 0
        """For training rollouts, discarded and lost ones included."""
        self.drawn_tokens = 0
        """For all."""
        self._lost: dict[RolloutKey, int] = {}
        self.decode_steps = 0
        self.last_step_tokens = 0
        self.last_step_context = 0
        """Tokens of the contexts that the last step read, summed over its rows."""
        self.last_work_seconds = 0.0
        """Of the last step: the model's work in it."""
        self.prefill_tokens = 0
        self.recomputed_tokens = 0
        """Computed for the same rollout before."""
        self.evicted_tokens = 0
        """Part of recomputed_tokens: for want of memory."""
        self.applied_updates = 0
        self._weights = weights
        self._tokenizer = tokenizer
        self._measures_entropy = measures_entropy
        self._draining = False
        self._has_loaded = False

    @property
    def num_ready(self) -> int:
        """Requests that hold or wait for a decode slot."""
        return len(self.running) + len(self.waiting)

    @property
    def can_grow(self) -> bool:
        """One more request would be served in the next step."""
        return self.num_ready < self.max_running and not self._draining and not self.gate.draining

    @property
    def has_work(self) -> bool:
        """A step would serve somebody; otherwise whoever waits waits for new weights."""
        if self.running or not (self._draining or self.gate.draining):
            return bool(self.running or self.waiting)
        return any(self.admission.may_run(row, draining=self._draining) for row in self.waiting)

    @property
    def num_drained_slots(self) -> int:
        """Decode slots that stay empty although somebody waits, as new weights have to come first."""
        if not self._draining and not self.gate.draining:
            return 0
        held_up = sum(not self.admission.may_run(row, draining=self._draining) for row in self.waiting)
        return min(held_up, self.max_running - len(self.running))

    @property
    def parked(self) -> tuple[RolloutKey, ...]:
        return tuple(row.request.key for row in self.waiting if row.parked)

    def add(self, row: Row) -> None:
        self.admission.arrive(row)
        if row.keeps_distribution:
            self.distributions.begin(row.request)
        self.waiting.append(row)

    def drop(self, row: Row) -> None:
        """The request was cancelled."""
        if row in self.running:
            self.running.remove(row)
        elif row in self.waiting:
            self.waiting.remove(row)
        elif row.future.cancelled() or row.future.exception() is not None:
            return
        self._lose(row)
        self._free(row)

    def release(self, key: RolloutKey) -> int:
        """Gives its cache up; returns the tokens that no completion delivered."""
        self.slots.forget(key)
        self.admission.released(key)
        for row in (*self.running, *self.waiting):
            if row.request.key == key:
                row.keep = False
        return self._lost.pop(key, 0)

    def _lose(self, row: Row) -> None:
        """The row's tokens were drawn and nobody will get them (I7)."""
        if row.keeps_distribution:
            self.distributions.truncate(row.request.key, row.request.step, row.begun)
        lost = len(row.logprobs) + row.discarded
        if lost and not row.request.evaluation:
            self.lose(row.request.key, lost)

    def lose(self, key: RolloutKey, num_tokens: int) -> None:
        """Tokens drawn for a rollout that nobody will get: `release` tells them (I7)."""
        self._lost[key] = self._lost.get(key, 0) + num_tokens

    def fail_all(self, error: BaseException) -> None:
        """The engine ends: nobody is left waiting."""
        for row in (*self.running, *self.waiting):
            self._free(row)
            if not row.future.done():
                row.future.set_exception(error) if isinstance(error, Exception) else row.future.cancel()
        self.running.clear()
        self.waiting.clear()
        self.verifier.fail_all(error)

    def take_up_weights(self, now: float = 0.0) -> bool:
        """Applies newer weights if there are any, the apply mode wants them now and the update mode allows it. Called between two steps.

        now: seconds, of whatever clock `max_apply_delay_seconds` is measured with.
        """
        self.verifier.closing = False
        if not self._has_newer_weights():
            self._draining = False
            self.gate.withdraw()
            return False
        wanted = self._draining or (self.settings.apply is Apply.KEY_STEPS and self._wants_newest())
        if not self.gate.allows(now=now, at_rest=not self.running, key_step_due=wanted):
            return False
        mode = self.settings.update_mode
        if mode is UpdateMode.WAIT and (self.running or any(row.logprobs for row in self.waiting)):
            self._draining = True
            return False
        if any(row.recomputing for row in self.running):
            return False  # else updates that come faster than caches are recomputed would stop all progress
        if self.verifier.half_done:
            self.verifier.closing = True
            return False
        self._draining = False
        self._load_weights()
        self.gate.applied(now)
        return True

    def _has_newer_weights(self) -> bool:
        if self._weights is None or self.held:
            return False
        newest = self._weights.newest_version()
        return newest is not None and (newest > self.version or (newest == self.version and not self._has_loaded))

    def _wants_newest(self) -> bool:
        """The next step may draw the first token of a key step, or a verification is to begin."""
        rows: Iterable[Row] = self.running
        if self.settings.update_mode is UpdateMode.WAIT:
            rows = chain(self.running, self.waiting)  # once it runs it has to finish first
        else:
            self._admit()
        return any(row.request.key_weight > 0 and not row.logprobs for row in rows) or (self.verifier.has_work and not self.verifier.half_done)

    def _load_weights(self) -> None:
        assert self._weights is not None
        mode = self.settings.update_mode
        self.version = self._weights.load_into(self.model.parameters)
        self._has_loaded = True
        self.applied_updates += 1
        if mode is not UpdateMode.KEEP or self.settings.recompute_kv:
            self._start_over(discard=mode is UpdateMode.ABORT)

    def step(self) -> int:
        """One forward and one token for every row that is through with its context. Gives the number of rows served."""
        self._admit()
        rows, counts = self._choose_rows()
        if not rows:
            self.last_work_seconds = 0.0
            return 0
        plan = make_plan(
            [row.tokens[row.cached : row.cached + count] for row, count in zip(rows, counts, strict=True)],
            [row.cached for row in rows],
            [row.slot for row in rows],
            self.model.device,
        )
        drawing, where = [], []
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if row.cached < row.computed:
                self._count_recomputed(row, row.cached + count)
            row.cached += count
            if row.cached == len(row.tokens):
                row.recomputing = False
                drawing.append(row)
                where.append(index)
        last = plan.last_R if len(where) == len(rows) else plan.last_R[where]
        done = work(
            self.model,
            self.cache,
            plan,
            last,
            [row.request.sampling for row in drawing],
            [row.stream for row in drawing],
            [row.begun + len(row.logprobs) for row in drawing],
            measures_entropy=self._measures_entropy,
        )
        self.last_work_seconds = done.seconds
        self.decode_steps += 1
        self.last_step_tokens = plan.num_tokens
        self.last_step_context = sum(row.cached for row in rows)
        self.prefill_tokens += plan.num_tokens - len(drawing)
        if done.draws is not None:
            self._spread(drawing, done.draws, done.entropies)
        return len(rows)

    def _count_recomputed(self, row: Row, end: int) -> None:
        self.recomputed_tokens += min(end, row.computed) - row.cached
        self.evicted_tokens += max(0, min(end, row.evicted) - row.cached)

    def _admit(self) -> None:
        self.admission.admit(self.running, self.waiting, draining=self._draining)

    def _choose_rows(self) -> tuple[list[Row], list[int]]:
        """Rows of this step and how many of their tokens it computes."""
        rows, counts = [], []
        budget = self.settings.max_prefill_tokens
        for row in self.running:
            count = len(row.tokens) - row.cached
            if count > SHORT_TOKENS:
                count = min(count, budget)
                if count <= 0:
                    continue
                budget -= count
            rows.append(row)
            counts.append(count)
        return rows, counts

    def _spread(self, rows: list[Row], draws: Draws, entropies: list[float] | None) -> None:
        """Each row gets its token; those that end go."""
        if self.distributions.in_use:
            self._keep_distributions(rows, draws.logprobs_RV)
        if entropies is not None:
            for row, entropy in zip(rows, entropies, strict=True):
                if row.entropies is None:
                    row.entropies = []
                row.entropies.append(entropy)
        version = self.version
        ended = False
        for row, token, logprob in zip(rows, draws.tokens, draws.logprobs, strict=True):
            if logprob != logprob:
                self._fail_not_finite(row)
                ended = True
                continue
            row.record(token, logprob, version)
            self.drawn_tokens += 1
            self.generated_tokens += not row.request.evaluation
            try:
                reason = self._stop_reason(row, token)
            except Exception as error:  # the tokenizer is foreign code: its failure ends this request only
                self._end(row, error=error)
                ended = True
                continue
            if reason is not None:
                self._end(row, reason=reason)
                ended = True
        if ended:
            self.running = [row for row in self.running if not row.future.done()]

    def _keep_distributions(self, rows: list[Row], logprobs_RV: torch.Tensor) -> None:
        keeping = [index for index, row in enumerate(rows) if row.keeps_distribution]
        if keeping:
            actions = [(rows[index].request.key, rows[index].request.step) for index in keeping]
            self.distributions.add(actions, logprobs_RV if len(keeping) == len(rows) else logprobs_RV[keeping])

    def _stop_reason(self, row: Row, token: int) -> StopReason | None:
        sampling = row.request.sampling
        if token in sampling.stop_tokens:
            return StopReason.STOP
        if sampling.stop_strings and self._ends_in_stop_string(row):
            return StopReason.STOP
        if len(row.logprobs) >= row.most_tokens:
            return StopReason.MAX_TOKENS
        if len(row.tokens) >= self.max_context_tokens:
            return StopReason.CONTEXT
        return None

    def _ends_in_stop_string(self, row: Row) -> bool:
        """Decodes only as many of the last tokens as the longest stop string can span."""
        stops = row.request.sampling.stop_strings
        longest = max(map(len, stops))
        drawn = row.begun + len(row.logprobs)
        width = longest + 4
        while True:
            text = self._tokenizer.decode(row.tokens[-min(width, drawn) :], skip_special_tokens=False)
            if len(text) >= longest + 4 or width >= drawn:
                return any(stop in text for stop in stops)
            width *= 2

    def _end(self, row: Row, *, reason: StopReason | None = None, error: Exception | None = None) -> None:
        if error is None:
            self.admission.acted(row)
        if row.keep and error is None:
            self.slots.keep(row, row.tokens)
            row.slot = -1
        else:
            self._free(row)
        if row.future.done():
            return
        if error is None:
            assert reason is not None
            row.future.set_result(row.completion(reason))
        else:
            self._lose(row)
            row.future.set_exception(error)

    def _fail_not_finite(self, row: Row) -> None:
        if row.slot >= 0:
            self.cache.clear(row.slot)
        key = row.request.key
        self._end(
            row,
            error=HeadraceError(
                f"Group {key.group_id} member {key.member}: the model gave a logit that is not finite at token {len(row.tokens)} under weights {self.version}.",
                remedy="The weights have diverged or overflow: lower learner.learning_rate, or use a wider dtype.",
            ),
        )

    def _free(self, row: Row) -> None:
        if row.slot >= 0:
            self.slots.give(row.slot)
            row.slot = -1

    def _start_over(self, *, discard: bool) -> None:
        """No cache of older weights is read again; with `discard` the actions in progress are drawn again too."""
        self.slots.invalidate_kept()
        for row in (*self.running, *self.waiting):
            row.invalidate()
        for row in (*self.running, *self.waiting):
            if discard and row.logprobs:
                row.discard()
                if row.keeps_distribution:
                    self.distributions.truncate(row.request.key, row.request.step, row.begun)
        if not discard:
            for row in self.running:
                row.recomputing = True

    def _affordable_slots(self) -> int:
        budget, size = self.settings.kv_memory_bytes, self.model.slot_bytes
        if budget < size:
            raise ModelError(
                f"sampler.kv_memory_bytes is {budget}, but one sequence of {self.max_context_tokens} tokens takes {size} bytes.",
                remedy="Raise sampler.kv_memory_bytes or lower rollout.max_tokens.",
            )
        most = self.settings.max_in_flight
        return budget // size if most is None else min(budget // size, max(most, self.settings.max_running))


def score_batch(model: ServedModel, sequences: Sequence[Sequence[int]]) -> tuple[list[list[float]], float]:
    """(log-probability of each token given those before it, temperature 1, [len - 1] each; seconds of the model's work).

    One forward, its own scratch cache.
    """
    lengths = [len(sequence) - 1 for sequence in sequences]
    cache = model.new_cache(len(sequences), max(lengths))
    plan = make_plan([list(sequence[:-1]) for sequence in sequences], [0] * len(sequences), list(range(len(sequences))), model.device)
    started = perf_counter()
    logits_NV = model.forward(cache, plan, torch.arange(plan.num_tokens, device=model.device))
    targets = [list(sequence[1:]) for sequence in sequences]
    scores: list[list[float]] = []
    for last, target in zip(plan.last_R.tolist(), targets, strict=True):
        part = torch.log_softmax(logits_NV[last + 1 - len(target) : last + 1].double(), -1)
        index = torch.tensor(target, device=model.device)[:, None]
        scores.append(part.gather(-1, index)[:, 0].clamp_(max=0.0).tolist())
    return scores, perf_counter() - started
