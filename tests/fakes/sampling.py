"""Helpers of sampler tests: build one, run it beside a test, draw, and replay what it drew with plain transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from fakes.tiny_models import CONTEXT, tiny_model, tiny_tokenizer
from headrace.config import SamplerSettings
from headrace.roles import WeightReader
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import Completion, PolicyVersion, RolloutKey, SampleRequest, SamplingParameters

T = TypeVar("T")


def make_sampler(
    kind: str = "qwen2",
    *,
    weights: WeightReader | None = None,
    tokenizer: Any = None,
    path: Path | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    measures_entropy: bool = False,
    **settings: Any,
) -> TransformersSampler:
    return TransformersSampler(
        str(path or tiny_model(kind)),
        settings=SamplerSettings().model_copy(update=settings),  # unchecked: a tiny model's slots are smaller than the least kv_memory_bytes
        max_context_tokens=CONTEXT,
        device=device,
        dtype=dtype,
        weights=weights,
        tokenizer=tokenizer or tiny_tokenizer(),
        measures_entropy=measures_entropy,
    )


def plain_model(kind: str = "qwen2") -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model(kind), attn_implementation="eager").eval()


async def beside(sampler: TransformersSampler, main: Awaitable[T], waiting_for: Callable[[], str] = lambda: "admission") -> T:
    """The result of `main` while the sampler runs."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(sampler.run(waiting_for))
        try:
            return await main
        finally:
            running.cancel()


def request(tokens: Sequence[int], *, group: int = 0, member: int = 0, step: int = 0, seed: int = 0, keep: bool = False, **sampling: Any) -> SampleRequest:
    return SampleRequest(key=RolloutKey(group, member, 0), step=step, seed=seed, tokens=tuple(tokens), sampling=SamplingParameters(**sampling), keep_cache=keep)


async def turns(count: int) -> None:
    """Lets the loop go round so many times: about one decode step each."""
    for _ in range(count):
        await asyncio.sleep(0)


def version_of_each_token(completion: Completion) -> list[PolicyVersion]:
    return [span.version for span in completion.version_spans for _ in range(span.end - span.start)]


class Replay:
    """The independent reference: plain transformers forward and DynamicCache, one sequence at a time, weights set token by token."""

    def __init__(self, kind: str, history: Mapping[PolicyVersion, Mapping[str, torch.Tensor]]) -> None:
        self._model = plain_model(kind)
        self._history = history
        self._parameters = dict(self._model.named_parameters())

    @torch.no_grad()
    def logprobs(self, context: Sequence[int], completion: Completion, *, cache: DynamicCache | None, cached: int = 0) -> tuple[list[float], int]:
        """Log-probability of each token of the action under the version its span names, and how many tokens the cache holds then.

        With a cache, keys and values stay those of the weights that computed them. Without, each token's whole context is
        computed by the weights that drew the token.
        """
        tokens, values = list(context), []
        for token, version in zip(completion.tokens, version_of_each_token(completion), strict=True):
            for name, parameter in self._parameters.items():
                parameter.copy_(self._history[version][name])
            if cache is None:
                logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            else:
                logits = self._model(input_ids=torch.tensor([tokens[cached:]]), use_cache=True, **{_cache_name(self._model): cache}).logits[0, -1]
                cached = len(tokens)
            values.append(float(torch.log_softmax(logits.double(), -1)[token]))
            tokens.append(token)
        return values, cached


def _cache_name(model: Any) -> str:
    import inspect

    accepted = inspect.signature(model.forward).parameters
    return "cache" if "cache" in accepted else "past_key_values"
