"""A profile without hardware: from a model's shape and a device's peaks, by roofline with stated efficiencies.

A decode step reads the weights that its tokens use and the KV caches of its sequences, multiplies them, and pays a fixed time a
layer; it takes the longer of reading and multiplying, blended (roofline, Williams et al. 2009). Everything made here is marked
`estimated` and carries a wide interval. The efficiencies come from published measurements (docs/planner.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headrace.errors import ConfigError, Problem
from headrace.planner.distributions import Distribution
from headrace.planner.fits import DecodeFit, LearnFit, fit_decode
from headrace.planner.hardware import DTYPE_BYTES, Device
from headrace.planner.profile import (
    Decode,
    DecodePoint,
    Distributions,
    Group,
    Hardware,
    Learn,
    LearnPoint,
    Model,
    Prefill,
    Profile,
    Saturation,
    Source,
    WeightUpdate,
)
from headrace.planner.shapes import ModelShape

_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_OPTIMIZER_BYTES = 16.0
"""Of a trained parameter: weights, gradient and two moments, partly in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Shares of a data sheet's peaks, and fixed times, as measured on GPUs."""

    memory: float = 0.80
    """Of the bandwidth, reading weights (Llama-3.1-8B on A100, vLLM: 0.77 with every overhead)."""
    cache: float = 0.60
    """Of the bandwidth, reading KV caches."""
    decode_compute: float = 0.50
    prefill_compute: float = 0.50
    learn_dense: float = 0.22
    """Of the peak, 6 operations a parameter and token (RL training on H100: Qwen3-4B 0.245, R1-Distill 1.5B 0.13, 7B 0.21)."""
    learn_experts: float = 0.10
    """Mixture-of-experts models."""
    layer_seconds: float = 50e-6
    """Launching one layer's kernels in a decode step."""
    step_seconds: float = 0.5e-3
    """Scheduling and sampling of one decode step."""
    all_reduce_seconds: float = 15e-6
    """Latency of one; tensor parallelism makes two a layer."""
    usable_memory: float = 0.88
    """Of the memory, weights and KV cache together."""
    update_overhead_seconds: float = 2.0
    """Of one update, beside its tokens."""
    transfer_bandwidth: float = 20e9
    """Bytes per second of a weight update into one engine."""
    decode_error: float = 0.25
    """Standard deviation of measured / estimated."""
    learn_error: float = 0.35


DEFAULT_EFFICIENCIES = Efficiencies()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One model on `tensor_parallel` devices."""

    shape: ModelShape
    device: Device
    tensor_parallel: int = 1
    dtype: str = "bfloat16"
    efficiencies: Efficiencies = DEFAULT_EFFICIENCIES

    @property
    def weight_bytes(self) -> float:
        return self.shape.num_parameters * DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """16-bit keys and values, whatever the weights' dtype below that."""
        return int(self.shape.kv_values_per_token * max(2.0, DTYPE_BYTES[self.dtype]))

    def kv_capacity_tokens(self) -> int:
        """What memory leaves beside the weights; not above 0 where they do not fit."""
        usable = self.device.memory_bytes * self.tensor_parallel * self.efficiencies.usable_memory
        return int((usable - self.weight_bytes) // self.kv_bytes_per_token)

    def decode_seconds(self, running: float, context_tokens: float) -> float:
        """Of one step with `running` sequences of `context_tokens` each."""
        shape, device, rates, parallel = self.shape, self.device, self.efficiencies, self.tensor_parallel
        reading = shape.touched_parameters(running) * DTYPE_BYTES[self.dtype] / (parallel * device.memory_bandwidth * rates.memory)
        cache = running * context_tokens * self.kv_bytes_per_token / (parallel * device.memory_bandwidth * rates.cache)
        operations = running * (2.0 * shape.active_parameters + shape.attention_flops(context_tokens))
        computing = operations / (parallel * device.flops(self.dtype) * rates.decode_compute)
        fixed = rates.step_seconds + shape.num_layers * rates.layer_seconds
        if parallel > 1:
            moved = running * shape.hidden_size * 2.0 * 2 * (parallel - 1) / parallel
            fixed += 2 * shape.num_layers * (rates.all_reduce_seconds + moved / device.link_bandwidth)
        return fixed + cache + math.hypot(reading, computing)

    def prefill_tokens_per_second(self, context_tokens: float) -> float:
        operations = 2.0 * self.shape.active_parameters + self.shape.attention_flops(context_tokens / 2)
        return self.tensor_parallel * self.device.flops(self.dtype) * self.efficiencies.prefill_compute / operations

    def learn_seconds_per_token(self, context_tokens: float) -> float:
        """Of one rank: forward and backward, 6 operations a parameter, 12 for each context number that attention reads."""
        rates = self.efficiencies
        share = rates.learn_experts if self.shape.num_experts else rates.learn_dense
        operations = 6.0 * self.shape.active_parameters + 3.0 * self.shape.attention_flops(context_tokens / 2)
        return operations / (self.device.flops(self.dtype if self.dtype != "fp8" else "bfloat16") * share)


def estimate_profile(
    engine: Engine,
    *,
    name: str,
    prompt_tokens: Distribution,
    answer_tokens: Distribution,
    steps: Distribution | None = None,
    tool_wait_seconds: Distribution | None = None,
    group_size: int = 8,
    micro_batch_tokens: int = 16384,
    ranks: int = 8,
) -> Profile:
    """Raises ConfigError when the weights do not fit on the engine's devices."""
    capacity = engine.kv_capacity_tokens()
    if capacity < prompt_tokens.mean + answer_tokens.mean:
        raise ConfigError([_does_not_fit(engine, name)])
    distributions = Distributions(
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        steps=steps or Distribution.constant(1.0),
        tool_wait_seconds=tool_wait_seconds or Distribution.constant(0.0),
    )
    total = prompt_tokens.mean + answer_tokens.mean
    update_seconds = 0.2 + engine.weight_bytes / engine.efficiencies.transfer_bandwidth
    return Profile(
        source=Source(kind="estimated", origin=f"{name} on {engine.device.name}, {engine.dtype}, tensor parallel {engine.tensor_parallel}"),
        hardware=Hardware(device=engine.device.name, count=1, memory_bytes=int(engine.device.memory_bytes)),
        model=Model(num_parameters=engine.shape.num_parameters, kv_bytes_per_token=engine.kv_bytes_per_token, tensor_parallel=engine.tensor_parallel),
        decode=_decode(engine, prompt_tokens.mean + answer_tokens.mean / 2, capacity),
        prefill=Prefill(overhead_seconds=0.0, tokens_per_second=engine.prefill_tokens_per_second(prompt_tokens.mean)),
        learn=_learn(engine, total, ranks, micro_batch_tokens),
        weight_update=WeightUpdate(
            bytes=int(engine.weight_bytes), publish_seconds=update_seconds, transfer_seconds=update_seconds, pause_seconds=update_seconds
        ),
        distributions=distributions,
        group=Group(size=group_size, tailness=answer_tokens.tailness(group_size)),
    )


def with_tensor_parallel(profile: Profile, tensor_parallel: int, *, efficiency: float = 0.85) -> Profile:
    """The profile of an engine on another number of devices: k times as many speed a step up k^efficiency times.

    Memory for the KV cache follows from `hardware.memory_bytes`, where that is known. Marked as estimated.
    """
    if tensor_parallel == profile.model.tensor_parallel:
        return profile
    factor = tensor_parallel / profile.model.tensor_parallel
    speed, fit = factor**efficiency, profile.decode.fit
    decode_fit = replace(
        fit,
        floor_seconds=fit.floor_seconds / speed,
        seconds_per_sequence=fit.seconds_per_sequence / speed,
        seconds_per_context_token=fit.seconds_per_context_token / speed,
        seconds_per_extra_token=fit.seconds_per_extra_token / speed,
        relative_error=max(fit.relative_error, 0.15),
    )
    decode = replace(
        profile.decode,
        fit=decode_fit,
        points=tuple(replace(point, seconds=point.seconds / speed) for point in profile.decode.points),
        kv_capacity_tokens=_capacity(profile, tensor_parallel),
        saturation=replace(profile.decode.saturation, tokens_per_second=profile.decode.saturation.tokens_per_second * speed),
    )
    return replace(
        profile,
        source=replace(profile.source, kind="estimated"),
        model=replace(profile.model, tensor_parallel=tensor_parallel),
        decode=decode,
        prefill=replace(profile.prefill, tokens_per_second=profile.prefill.tokens_per_second * speed),
    )


def saturation_of(fit: DecodeFit, context_tokens: float, most: int) -> Saturation:
    """By the fit, up to `most` sequences."""
    rates = {running: fit.tokens_per_second(running, context_tokens) for running in (*(b for b in _BATCHES if b < most), max(1, most))}
    best = max(rates.values())
    return Saturation(running=next(running for running, rate in sorted(rates.items()) if rate >= 0.9 * best), tokens_per_second=best)


def _decode(engine: Engine, context: float, capacity: int) -> Decode:
    most = max(1, int(capacity / max(context, 1.0)))
    batches = [batch for batch in _BATCHES if batch <= most] or [1]
    points = [(float(b), factor * context, engine.decode_seconds(b, factor * context)) for b in batches for factor in (0.5, 1.0, 2.0) if b * factor <= most]
    fit = fit_decode([(running, tokens, 0.0, seconds, 1.0) for running, tokens, seconds in points])
    per_extra = 1.0 / engine.prefill_tokens_per_second(context)
    fit = replace(fit, relative_error=max(fit.relative_error, engine.efficiencies.decode_error), seconds_per_extra_token=per_extra)
    return Decode(
        points=tuple(DecodePoint(running=running, context_tokens=tokens, seconds=seconds, count=1) for running, tokens, seconds in points),
        fit=fit,
        kv_capacity_tokens=capacity,
        saturation=saturation_of(fit, context, min(most, _BATCHES[-1])),
    )


def _learn(engine: Engine, total_tokens: float, ranks: int, micro_batch_tokens: int) -> Learn:
    """`ranks` are devices: models that need several for one replica share the work all the same."""
    shape, device, rates = engine.shape, engine.device, engine.efficiencies
    states = shape.num_parameters * _OPTIMIZER_BYTES
    fit = LearnFit(
        overhead_seconds=rates.update_overhead_seconds + states / max(ranks, 8) / (device.memory_bandwidth * rates.memory),
        seconds_per_micro_batch=0.02,
        seconds_per_token=engine.learn_seconds_per_token(total_tokens),
        seconds_per_exchange=2 * 2.0 * shape.num_parameters / device.link_bandwidth,
        relative_error=rates.learn_error,
    )
    points = [
        LearnPoint(ranks=count, micro_batch_tokens=micro_batch_tokens, tokens=tokens, seconds=fit.seconds(count, micro_batch_tokens, tokens))
        for count in (ranks, 2 * ranks)
        for tokens in (64 * total_tokens, 512 * total_tokens)
    ]
    return Learn(points=tuple(points), fit=fit, tokens_per_trajectory=total_tokens, micro_batch_tokens=micro_batch_tokens)


def _capacity(profile: Profile, tensor_parallel: int) -> int | None:
    old, memory, per_token = profile.decode.kv_capacity_tokens, profile.hardware.memory_bytes, profile.model.kv_bytes_per_token
    if old is None:
        return None
    if memory is None or not per_token:
        return max(1, int(old * tensor_parallel / profile.model.tensor_parallel))
    added = (tensor_parallel - profile.model.tensor_parallel) * memory * DEFAULT_EFFICIENCIES.usable_memory
    return max(1, int(old + added / per_token))


def _does_not_fit(engine: Engine, name: str) -> Problem:
    usable = engine.device.memory_bytes * engine.efficiencies.usable_memory
    least = math.ceil(engine.weight_bytes * 1.1 / usable)
    parallel = 1 << max(0, least - 1).bit_length()
    return Problem(
        key="--tensor-parallel",
        value=engine.tensor_parallel,
        limit=f">= {parallel}",
        message=f"{name} takes {engine.weight_bytes / 1e9:.0f} GB in {engine.dtype}; {engine.tensor_parallel} x {engine.device.name} "
        f"leave no room for the KV cache of one rollout beside it.",
        remedy=f"Give --tensor-parallel {max(parallel, 2 * engine.tensor_parallel)}, or another device.",
    )
