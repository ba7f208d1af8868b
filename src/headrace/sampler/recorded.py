"""Decode steps as recorded graphs: the same operations in the same order, without the Python between them.

A small model's step is mostly Python: on one core two thirds of the time of 34 rows of a 2-layer model. Once at loading a step is
recorded with torch.jit.trace, which follows tensors, not code, and so knows no architecture. What varies from step to step (rows, new tokens,
contexts, the cache itself) goes in as tensors. A recording is used only if nothing in the forward depended on a tensor's value and
if it gives, for other shapes and values, what the forward in Python gives: logits, keys and values. Without one nothing changes
but speed, and the run says why (run_started, watch). Two are made: one new token a row; a few new tokens a row, padded. Other steps
(prompts, unlike contexts) have much to compute and run in Python, as do large models and devices other than the CPU. torch keeps a
recording's code (about 9 MiB for the two) until the process ends; a sampler makes one pair in its life.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import logging

from headrace.sampler.attention import BatchPlan, LayerShape, RowGroup, make_plan
from headrace.sampler.kv_cache import SlotCache

Forward = Callable[[SlotCache, BatchPlan, torch.Tensor], torch.Tensor]
_Rows = Sequence[tuple[int, int]]
"""(tokens in the cache, new tokens) of each row"""

_DECODE: tuple[_Rows, ...] = (((3, 1), (7, 1), (5, 1)), ((11, 1),), ((2, 1), (30, 1), (9, 1), (1, 1), (0, 1)))
_SHORT: tuple[_Rows, ...] = (((3, 2), (7, 3), (5, 1)), ((11, 4),), ((2, 1), (24, 8), (9, 2), (1, 5), (0, 2)))
"""The first is recorded, the others are what it is tested with."""
_CONTEXT = 40
_REASON_CHARACTERS = 160
_MOST_PARAMETERS = 2**25
"""Beyond it a step is mostly arithmetic, and recording one takes seconds (135 M parameters, 30 layers: 7 s, for steps 15 % faster)."""


class RecordedSteps:
    """The recordings of one model; `run` gives None for a step that has none.

    `failure`: why a model that should have recordings lacks some, for people; None where it has both or is not to have any.
    """

    def __init__(
        self, model: torch.nn.Module, forward: Forward, new_cache: Callable[[int, int], SlotCache], shapes: Sequence[LayerShape], vocabulary_size: int
    ) -> None:
        self._decode: Any = None
        self._short: Any = None
        self.failure: str | None = None
        if next(model.parameters()).device.type != "cpu" or sum(parameter.numel() for parameter in model.parameters()) > _MOST_PARAMETERS:
            return
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad(), _quiet():
            torch.manual_seed(0)
            self._decode, self._short = (
                self._recording(_Step(model, forward, shapes, single), new_cache, vocabulary_size, cases)
                for single, cases in ((True, _DECODE), (False, _SHORT))
            )

    def _recording(self, step: _Step, new_cache: Callable[[int, int], SlotCache], vocabulary_size: int, cases: Sequence[_Rows]) -> Any:
        try:
            return _record(step, new_cache, vocabulary_size, cases)
        except _NotRecordedError as error:
            self.failure = self.failure or str(error)
            return None

    def run(self, cache: SlotCache, plan: BatchPlan, logits_at: torch.Tensor) -> torch.Tensor | None:
        if len(plan.groups) > 1 or plan.groups[0].fused:
            return None
        recording = self._decode if plan.groups[0].single else self._short
        if recording is None:
            return None
        logits: torch.Tensor = recording(*_inputs(cache, plan, logits_at))
        return logits


class _NotRecordedError(Exception):
    """Why, for people."""


class _Step(torch.nn.Module):
    """What is recorded: rebuilds the plan and the cache around the tensors that it is given."""

    def __init__(self, model: torch.nn.Module, forward: Forward, shapes: Sequence[LayerShape], single: bool) -> None:
        super().__init__()
        # By reference, so that new weights are seen. Flat, because a recording of the modules themselves takes four times as long to make.
        for index, parameter in enumerate(model.parameters()):
            self.register_parameter(f"parameter_{index}", parameter)
        for index, buffer in enumerate(model.buffers()):
            self.register_buffer(f"buffer_{index}", buffer)
        self._forward_in_python, self._shapes, self._single = forward, shapes, single

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, slots_N: torch.Tensor, logits_at: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        slots_R, positions_RQ, keys_L, *stores = more
        pad = unpad = None
        if not self._single:
            pad, unpad, *stores = stores
        group = RowGroup(0, 0, slots_R, positions_RQ, keys_L, single=self._single, fused=False, pad_RQ=pad, unpad_N=unpad)
        plan = BatchPlan(tokens, positions, slots_N, logits_at, [group], num_tokens=0)
        return self._forward_in_python(SlotCache(self._shapes, stores), plan, logits_at)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.jit says that it is old; it reads every attribute of the model, about some of which transformers has something to say."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _inputs(cache: SlotCache, plan: BatchPlan, logits_at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    group = plan.groups[0]
    common = (plan.token_ids, plan.positions, plan.slots_N, logits_at, group.slots_R, group.positions_RQ, group.keys_L)
    if group.single:
        return (*common, *cache.stores)
    if group.pad_RQ is None or group.unpad_N is None:  # all rows have equally many queries
        same = torch.arange(plan.num_tokens)
        return (*common, same, same, *cache.stores)
    return (*common, group.pad_RQ, group.unpad_N, *cache.stores)


def _record(step: _Step, new_cache: Callable[[int, int], SlotCache], vocabulary_size: int, cases: Sequence[_Rows]) -> Any:
    """Raises _NotRecordedError when the forward cannot be recorded or the recording is not the forward."""
    try:
        with warnings.catch_warnings():
            # the forward looked at a tensor's value
            warnings.simplefilter("error", torch.jit.TracerWarning)  # type: ignore[attr-defined]
            inputs = _case(new_cache, vocabulary_size, cases[0])
            recording = torch.jit.trace(step, inputs, check_trace=False)  # type: ignore[no-untyped-call]
        for rows in cases[1:]:
            inputs = _case(new_cache, vocabulary_size, rows)
            copies = tuple(tensor.clone() for tensor in inputs)
            expected = (step(*inputs), *inputs)
            for _ in range(3):  # the executor rewrites itself in its first runs
                got = (recording(*copies), *copies)
                if not all(torch.allclose(one.double(), two.double(), rtol=1e-5, atol=1e-5, equal_nan=True) for one, two in zip(expected, got, strict=True)):
                    raise _NotRecordedError("for other rows than it was recorded with, the recording gives other numbers than the model's forward")
    except _NotRecordedError:
        raise
    except Exception as error:
        raise _NotRecordedError(_reason(error)) from error
    return recording


def _reason(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, torch.jit.TracerWarning):  # type: ignore[attr-defined]
        cause = cause.__cause__  # `float(tensor)` raises another error from the warning
    if cause is not None:
        return f"its forward depends on a tensor's value: {_shortened(cause)}"
    return f"recording its forward raised {type(error).__name__}: {_shortened(error)}"


def _shortened(error: BaseException) -> str:
    return " ".join(str(error).split())[:_REASON_CHARACTERS]


def _case(new_cache: Callable[[int, int], SlotCache], vocabulary_size: int, rows: _Rows) -> tuple[torch.Tensor, ...]:
    """Inputs of a step over a cache of random numbers; slots in no order, one of them free."""
    cache = new_cache(len(rows) + 1, _CONTEXT + len(rows))
    for store in cache.stores:
        store.normal_()
    tokens = [torch.randint(0, vocabulary_size, (new,)).tolist() for _, new in rows]
    plan = make_plan(tokens, [held for held, _ in rows], torch.randperm(len(rows) + 1)[: len(rows)].tolist(), cache.stores[0].device)
    return _inputs(cache, plan, plan.last_R)
