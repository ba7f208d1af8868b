"""One learner rank: learn, publish, save, load. Synchronous; the runtime hosts it in a process of its own.

Every rank gets the whole selection, decides the same things about it, computes its own rows, and ends with the same weights: sums of
gradients are joined in one collective and the optimizer step is the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from headrace.config import Settings
from headrace.errors import InvariantError, ModelError
from headrace.learner.batch import Batch, MicroBatch, Weighing, check_weights, coefficients, deal_rows, micro_batches, split_minibatches, weigh
from headrace.learner.checkpoints import LearnerState, load_checkpoint, load_tokenizer, pack_state, save_checkpoint, unpack_state
from headrace.learner.forward import Scores, SelectiveForward
from headrace.learner.guard import Guard
from headrace.learner.lora import Adapters, ReferenceForward
from headrace.learner.objective import Objective, evaluate_objective
from headrace.learner.ranks import FlatGradients, init_ranks, reduce_sum, shutdown_ranks
from headrace.learner.record import SelectionRecord
from headrace.learner.state_memory import StateMemory
from headrace.learner.unpack import unpack
from headrace.roles import WeightWriter
from headrace.types import PolicyVersion
from headrace.updates import Selection, UpdateResult, WeightUpdate

__all__ = ["LearnerRank", "init_ranks", "shutdown_ranks"]

LOW_PRECISION = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT16_LOSS_FACTOR = 1024.0
"""A power of two: float16 activations' gradients would vanish below 6e-8."""


def load_model(model_path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """AutoModelForCausalLM from a directory or hub name. Raises ModelError naming what is missing."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, use_safetensors=True, trust_remote_code=False).to(device)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AssertionError, SafetensorError) as error:
        what = str(error).strip().splitlines() or [type(error).__name__]  # what follows the first line may list every class there is
        raise ModelError(f"{model_path}: the model cannot be loaded on device '{device}': {what[0]}", remedy="Correct model.path or model.device.") from error


def usable_device(name: str | torch.device) -> torch.device:
    """Raises ModelError for a device that torch does not know or does not see."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"model.device '{name}' cannot be used: {str(error).splitlines()[0]}", remedy="Name one that `headrace doctor` lists, or cpu."
        ) from error
    return device


def learning_rate(settings: Settings, number: int) -> float:
    """Of the update from version `number`: linear warm-up, then constant, or linear or cosine to 0 after run.num_updates."""
    learner = settings.learner
    if number < learner.warmup_updates:
        return learner.learning_rate * (number + 1) / learner.warmup_updates
    progress = min((number - learner.warmup_updates) / max(settings.run.num_updates - learner.warmup_updates, 1), 1.0)
    match learner.schedule:
        case "constant":
            return learner.learning_rate
        case "linear":
            return learner.learning_rate * (1 - progress)
        case "cosine":
            return learner.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenLogprobs:
    """Log-probabilities that stay fixed during one selection; filled for this rank's rows only. None: not needed."""

    proximal_A: Tensor | None
    """Under the weights before the selection's first update."""
    reference_A: Tensor | None
    """Under the reference model."""

    def proximal_N(self, micro_batch: MicroBatch) -> Tensor | None:
        return None if self.proximal_A is None else self.proximal_A[micro_batch.index_N]

    def reference_N(self, micro_batch: MicroBatch) -> Tensor | None:
        return None if self.reference_A is None else self.reference_A[micro_batch.index_N]


class LearnerRank:
    """The learner, or one of its data-parallel ranks (`ranks.init_ranks` first).

    Weights and optimizer are float32; with model.dtype bfloat16 or float16 the forward runs under autocast and published weights are
    cast. The reference model of the KL term is what `model_path` holds, also after `load`.
    """

    def __init__(
        self,
        model_path: str | Path,
        settings: Settings,
        *,
        rank: int = 0,
        world_size: int = 1,
        writer: WeightWriter | None = None,
        memory: StateMemory | None = None,
        device: str | torch.device | None = None,
        parameter_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._settings = settings
        self._objective = Objective.from_settings(settings)
        self._rank, self._world_size, self._writer, self._memory = rank, world_size, writer, memory
        self._device = usable_device(settings.model.device if device is None else device)
        if self._device == torch.device("cuda") and world_size > 1:  # "cuda" alone would put every rank on the first one
            self._device = torch.device("cuda", rank)
        self._dtype = parameter_dtype
        self._low_precision = LOW_PRECISION.get(settings.model.dtype)
        self._loss_factor = FLOAT16_LOSS_FACTOR if self._low_precision is torch.float16 else 1.0
        self.model = load_model(str(model_path), parameter_dtype, self._device)
        self._tokenizer = load_tokenizer(str(model_path)) if rank == 0 else None
        self._adapters = Adapters(self.model, settings) if settings.model.lora_rank else None
        self._forward = SelectiveForward(self.model)
        self._reference = self._make_reference(str(model_path)) if settings.learner.kl_coefficient > 0 else None
        trained = list(self.model.parameters()) if self._adapters is None else self._adapters.parameters()
        self._gradients = FlatGradients(trained)
        self._guard = Guard(explosion_factor=settings.governor.explosion_factor, max_gradient_norm=settings.learner.max_gradient_norm)
        self._optimizer = torch.optim.AdamW(
            trained,
            lr=settings.learner.learning_rate,
            betas=settings.learner.betas,
            eps=settings.learner.epsilon,
            weight_decay=settings.learner.weight_decay,
        )
        self._version = PolicyVersion(0, 0)
        self._ancestry = {0: 0}
        self.learning_rate_factor = 1.0
        """What rollbacks have multiplied the learning rate by."""

    @property
    def version(self) -> PolicyVersion:
        """The weights as they are now."""
        return self._version

    def learn(self, selection: Selection) -> UpdateResult:
        """num_epochs x num_minibatches updates, each raising the version by 1. Collective over ranks.

        An update that is not finite or explodes (guard.py) is refused: weights, optimizer and version stay, `refused` says why, the next
        minibatch is tried. Raises InvariantError or StaleTokenError before anything is changed by the update concerned.
        """
        started = perf_counter()
        before = self._version
        batch = self._unpack(selection)
        record = SelectionRecord(batch, device=self._device, world_size=self._world_size, has_reference=self._reference is not None)
        parts = split_minibatches(batch, self._settings.learner.num_minibatches)
        weighing = weigh(batch, before.number)
        shares = [deal_rows(batch, weighing, part, self._world_size)[self._rank] for part in parts]
        frozen = self._freeze(batch, shares, record)
        refusals: list[str] = []
        for _ in range(self._settings.learner.num_epochs):
            for part, share in zip(parts, shares, strict=True):
                refusal = self._update(batch, part, share, frozen, record)
                if refusal is not None:
                    refusals.append(refusal)
        outcomes, statistics, busy_seconds = record.finish(selection)
        return UpdateResult(
            selection_id=selection.id,
            version_before=before,
            version_after=self._version,
            outcomes=outcomes,
            statistics=statistics,
            refused="; ".join(refusals) or None,
            seconds=perf_counter() - started,
            busy_seconds=busy_seconds,
        )

    def publish(self) -> WeightUpdate:
        """Gives the weights, or the adapters, to the writer under the version they have. Never waits for a reader."""
        if self._writer is None:
            raise InvariantError(f"learner rank {self._rank} publishes but has no weight writer.")
        if self._adapters is not None:
            return self._writer.publish(self._adapters.published(), self._version)
        parameters = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        if self._low_precision is not None:
            parameters = {name: value.to(self._low_precision) for name, value in parameters.items()}
        return self._writer.publish(parameters, self._version)

    def save(self, directory: Path) -> None:
        """Writes a checkpoint, whole or absent (checkpoints.py). All ranks hold the same: rank 0 writes, the others return at once."""
        if self._rank == 0:
            save_checkpoint(Path(directory), self.model, self._tokenizer, self._optimizer, self._state(), adapters=self._adapters)

    def copy(self) -> int:
        """Puts what it takes to go on exactly into memory that outlives this process; its size in bytes. Raises CheckpointError when there is no room."""
        if self._memory is None:
            raise InvariantError(f"learner rank {self._rank} is to copy its state and has no memory for it.")
        packed = pack_state(self.model, self._optimizer, self._state())
        self._memory.write(self._version, packed)
        return len(packed)

    def begin_again(self, lineage: int) -> None:
        """The weights that it was made with are update 0 of a new lineage: a run goes on that had saved nothing. Every rank does so."""
        self._version = PolicyVersion(lineage, 0)
        self._ancestry = {0: 0, lineage: 0}

    def load(self, directory: Path, *, lineage: int | None = None) -> None:
        """Goes on from a checkpoint under a new lineage (default: the saved one + 1), so that numbers after it never name two models.

        Give `lineage` where the same checkpoint is restored more than once. Every rank loads.
        """
        self._go_on_from(load_checkpoint(Path(directory), self.model, self._optimizer, adapters=self._adapters), lineage)

    def load_copy(self, version: PolicyVersion, *, lineage: int) -> None:
        """The same from what another learner put into memory. Every rank loads."""
        if self._memory is None:
            raise InvariantError(f"learner rank {self._rank} is to go on from memory and has none.")
        self._go_on_from(unpack_state(self._memory.read(version), self.model, self._optimizer), lineage)

    def _state(self) -> LearnerState:
        return LearnerState(
            version=self._version,
            ancestry=self._ancestry,
            settings=self._settings.model_dump(mode="json"),
            learning_rate_factor=self.learning_rate_factor,
            guard=self._guard.state(),
        )

    def _go_on_from(self, state: LearnerState, lineage: int | None) -> None:
        self._version = PolicyVersion(state.version.lineage + 1 if lineage is None else lineage, state.version.number)
        self._ancestry = {**state.ancestry, self._version.lineage: self._version.number}
        self.learning_rate_factor = state.learning_rate_factor
        self._guard.restore(state.guard)

    def _unpack(self, selection: Selection) -> Batch:
        settings = self._settings
        return unpack(
            selection,
            self._version,
            self._ancestry,
            self._objective.advantage,
            context=settings.rollout.context,
            unmarked_fraction=settings.learner.unmarked_fraction,
            seed=settings.run.seed,
        )

    def _make_reference(self, model_path: str) -> SelectiveForward | ReferenceForward:
        if self._adapters is not None:
            return ReferenceForward(self._forward, self._adapters)
        return SelectiveForward(load_model(model_path, self._dtype, self._device).requires_grad_(False))

    def _update(self, batch: Batch, part: NDArray[np.int64], share: NDArray[np.int64], frozen: FrozenLogprobs, record: SelectionRecord) -> str | None:
        """One optimizer step on one minibatch. None, or why it was refused. A minibatch without a trained token is no update."""
        number = self._version.number
        weighing = weigh(batch, number)
        check_weights(batch, weighing, number)
        part_A = np.isin(batch.row_A, part)
        update = record.begin_update(weighing, part_A)
        trained_A = part_A & weighing.trained_A
        if not trained_A.any():
            return None
        coefficient_of_row = coefficients(batch, weighing, part, self._objective.loss_scale, self._objective.max_tokens)
        self._gradients.clear()
        for micro_batch in self._cut(batch, weighing, share, coefficient_of_row):
            with record.busy():
                scores = self._scores(self._forward, micro_batch)
                terms = evaluate_objective(
                    self._objective,
                    micro_batch,
                    scores,
                    proximal_logprobs_N=frozen.proximal_N(micro_batch),
                    reference_logprobs_N=frozen.reference_N(micro_batch),
                )
                (terms.loss * self._loss_factor).backward()  # type: ignore[no-untyped-call]
                update.add(micro_batch, scores, terms)
        reduce_sum(self._gradients.flat, self._world_size)
        with record.busy():
            norm = self._gradients.norm() / self._loss_factor
            reason = self._guard.refusal(norm, record.kl(update) if self._guard.on else 0.0)
            if reason is not None:
                record.refuse(update, weighing, part_A)
                return f"update from version {self._version}: {reason}"
            rate = self._step(norm, staleness=float(weighing.staleness_A[trained_A].mean()))
        record.commit(update, weighing, gradient_norm=norm, learning_rate=rate)
        self._version = PolicyVersion(self._version.lineage, number + 1)
        return None

    def _freeze(self, batch: Batch, shares: Sequence[NDArray[np.int64]], record: SelectionRecord) -> FrozenLogprobs:
        """The tokens of the first update are enough: staleness only grows, later ones train no others."""
        several = self._settings.updates_per_batch > 1  # with a single update the proximal policy is the learner's
        needs_proximal = self._objective.starts_from_proximal and several
        models: list[SelectiveForward | ReferenceForward | None] = [self._forward if needs_proximal else None, self._reference]
        results: list[Tensor | None] = []
        for forward in models:
            if forward is None:
                results.append(None)
                continue
            values_A = torch.zeros(len(batch.positions_A), dtype=self._dtype, device=self._device)
            for micro_batch in self._cut(batch, weigh(batch, self._version.number), np.concatenate(shares), np.zeros(len(batch.rows))):
                with record.busy(), torch.no_grad():
                    values_A[micro_batch.index_N] = self._scores(forward, micro_batch).logprobs_N
            results.append(values_A)
        return FrozenLogprobs(proximal_A=results[0], reference_A=results[1])

    def _cut(self, batch: Batch, weighing: Weighing, share: NDArray[np.int64], coefficient_of_row: NDArray[np.float64]) -> Iterator[MicroBatch]:
        budget = self._settings.learner.micro_batch_tokens
        whole = self._settings.learner.compares_whole_trajectories
        return micro_batches(batch, weighing, share, coefficient_of_row, budget_tokens=budget, dtype=self._dtype, device=self._device, whole=whole)

    def _scores(self, forward: SelectiveForward | ReferenceForward, micro_batch: MicroBatch) -> Scores:
        precision: AbstractContextManager[Any] = nullcontext()
        if self._low_precision is not None:
            precision = torch.autocast(self._device.type, dtype=self._low_precision)
        with precision:
            return forward.scores(micro_batch, entropy_gradient=self._objective.entropy_coefficient > 0)

    def _step(self, norm: float, *, staleness: float) -> float:
        """Scales the gradient down to max_gradient_norm and steps. Returns the learning rate.

        `staleness`: mean over the tokens of this update. Stale data biases an update by O(staleness x learning rate), so the rate is
        divided by 1 + slope x staleness (arXiv 2607.01083).
        """
        scale = min(self._settings.learner.max_gradient_norm / (norm + 1e-6), 1.0) / self._loss_factor
        if scale != 1.0:
            self._gradients.flat.mul_(scale)
        rate = self.learning_rate_factor * learning_rate(self._settings, self._version.number) / (1 + self._settings.learner.staleness_slope * staleness)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return rate
