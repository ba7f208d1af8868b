"""Published throughput models of RL post-training as pure functions, each with its source. `estimate` holds those we predict with.

N devices in all, I of them generate, N - I train; B samples an update; lengths in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

DecodeEfficiency = Callable[[float], float]
"""U(h): share of a device's peak at h running sequences (PipelineRL)."""


def pipeline_rate(num_devices: int, num_generating: float, efficiency: float, train_cost: float) -> float:
    """min(I U(H), (N - I) / tau): tokens per flash (PipelineRL, arXiv 2509.19128, throughput analysis).

    A flash is the time one device at its peak takes for a token's forward; `train_cost` (tau) is what training a token takes in flashes.
    """
    return min(num_generating * efficiency, (num_devices - num_generating) / train_cost)


def pipeline_best_split(num_devices: int, efficiency: float, train_cost: float) -> float:
    """Generating devices where both sides match: N / (1 + tau U(H)). More staleness allows larger H, so fewer samplers."""
    return num_devices / (1.0 + train_cost * efficiency)


def pipeline_max_lag(running: float, num_generating: float, longest: float, mean_length: float, batch: float) -> int:
    """g_max = ceil(H I Lmax / (Lmean B)) updates: what is drawn while the longest sequence is written (same source)."""
    return math.ceil(running * num_generating * longest / (mean_length * batch) - 1e-9)


def conventional_rate(generate_rate: float, train_rate: float) -> float:
    """1 / (1/r_gen + 1/r_train): one after the other on the same devices (same source)."""
    return 1.0 / (1.0 / generate_rate + 1.0 / train_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    running: int
    num_generating: int
    rate: float
    max_lag: int


def pipeline_search(
    num_devices: int, efficiency: DecodeEfficiency, train_cost: float, *, batch: float, tail: float, allowed_lag: int, most_running: int
) -> PipelinePlan | None:
    """The best (H, I) with g_max <= `allowed_lag`; `tail` is Lmax / Lmean. None: no running batch is slow enough to age."""
    best: PipelinePlan | None = None
    for generating in range(1, num_devices):
        largest = min(most_running, int(allowed_lag * batch / (generating * tail) + 1e-9))
        if largest < 1:
            continue
        rate = pipeline_rate(num_devices, generating, efficiency(largest), train_cost)
        if best is None or rate > best.rate:
            lag = pipeline_max_lag(largest, generating, tail, 1.0, batch)
            best = PipelinePlan(running=largest, num_generating=generating, rate=rate, max_lag=lag)
    return best


def flash_sync_bound(samples: float, workers: float, generate: float, train: float, longest: float, epochs: float = 1.0) -> float:
    """Seconds of a synchronous step at most: (N_s/K)(mu_g + E mu_t) + L_g (ROLL Flash, arXiv 2510.11345, propositions on step time).

    `workers` K slots, `generate` mu_g seconds a sample, `train` mu_t a sample and epoch, `longest` L_g. Upper bounds: a simulation lies below.
    """
    return samples / workers * (generate + epochs * train) + longest


def flash_async_bound(samples: float, workers: float, generate: float, train: float, longest: float, async_ratio: float, epochs: float = 1.0) -> float:
    """The same with `async_ratio` (alpha) more batches in flight: the tail is shared by 1 + alpha batches."""
    return samples / workers * (generate + epochs * train) + longest / (1.0 + async_ratio)


def flash_best_train_share(samples: float, workers: float, generate: float, train: float, longest: float, async_ratio: float, epochs: float = 1.0) -> float:
    """beta*: share of the workers that trains at the bound above (same source)."""
    work = epochs * samples * train
    return work / (samples * generate + workers * longest / (1.0 + async_ratio) + work)


def flash_speedup_limit(samples: float, workers: float, generate: float, train: float, longest: float, epochs: float = 1.0) -> float:
    """alpha -> infinity: 1 + K L_g / (N_s (mu_g + E mu_t)) (same source)."""
    return 1.0 + workers * longest / (samples * (generate + epochs * train))


def flash_queue_bound(scheduled: float, workers: float, generate: float, longest: float) -> float:
    """Mean completion seconds a sample under queue scheduling: mu_g / K + L_g / Q (same source)."""
    return generate / workers + longest / scheduled


def overlapped_step(generate: float, learn: float, *, sync: float = 0.0) -> float:
    """One-step overlap: wait + learn with wait = max(0, generate - learn) (verl, one_step_off.md)."""
    return max(generate, learn) + sync


def interval_step(generate: float, learn: float, interval: int, *, sync: float = 0.0) -> float:
    """Weights go out every `interval` updates and samplers wait for them: inside a window learning overlaps with sampling.

    (generate + (k - 1) max + learn + sync) / k a step: what stays exposed is paid once a window (Trinity-RFT, arXiv 2505.17826, sync_interval).
    """
    return max(generate, learn) + (min(generate, learn) + sync) / interval
