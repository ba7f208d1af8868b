"""Profiles whose plans can be worked out by hand."""

from __future__ import annotations

from typing import Literal

from headrace.planner.distributions import Distribution
from headrace.planner.fits import DecodeFit, LearnFit
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


def plain_profile(
    *,
    floor_seconds: float = 0.02,
    seconds_per_sequence: float = 1e-4,
    running: int = 128,
    learn_seconds_per_token: float = 1e-4,
    overhead_seconds: float = 0.0,
    exchange_seconds: float = 0.0,
    answers: Distribution | None = None,
    waits: float = 0.0,
    steps: float = 1.0,
    group_size: int = 8,
    num_parameters: int = 10**9,
    memory_bytes: int | None = None,
    kind: Literal["run", "measured", "estimated"] = "measured",
    errors: float = 0.0,
    device: str = "X1",
) -> Profile:
    """Answers of 1,000 tokens to empty prompts, up to `running` sequences measured; a step takes floor + per sequence, nothing else costs."""
    lengths = answers or Distribution.constant(1000.0)
    fit = DecodeFit(
        floor_seconds=floor_seconds, seconds_per_sequence=seconds_per_sequence, seconds_per_context_token=0.0, seconds_per_extra_token=0.0,
        sharpness=1.0, relative_error=errors,
    )  # fmt: skip
    learn = LearnFit(
        overhead_seconds=overhead_seconds, seconds_per_micro_batch=0.0, seconds_per_token=learn_seconds_per_token,
        seconds_per_exchange=exchange_seconds, relative_error=errors,
    )  # fmt: skip
    return Profile(
        source=Source(kind=kind, origin="worked out by hand"),
        hardware=Hardware(device=device, count=1, memory_bytes=memory_bytes),
        model=Model(num_parameters=num_parameters),
        decode=Decode(
            points=tuple(DecodePoint(running=float(b), context_tokens=0.0, seconds=fit.seconds(b), count=1) for b in (1, running)),
            fit=fit, kv_capacity_tokens=None, saturation=Saturation(running=running, tokens_per_second=running / fit.seconds(running)),
        ),
        prefill=Prefill(overhead_seconds=0.0, tokens_per_second=1e9),
        learn=Learn(
            points=tuple(LearnPoint(ranks=r, micro_batch_tokens=8192, tokens=1e6, seconds=learn.seconds(r, 8192, 1e6)) for r in (1, 64)), fit=learn
        ),
        weight_update=WeightUpdate(bytes=0, publish_seconds=0.0, transfer_seconds=0.0, pause_seconds=0.0),
        distributions=Distributions(
            prompt_tokens=Distribution.constant(0.0), answer_tokens=lengths, steps=Distribution.constant(steps),
            tool_wait_seconds=Distribution.constant(waits),
        ),
        group=Group(size=group_size, tailness=lengths.tailness(group_size)),
    )  # fmt: skip
