"""Fits find a synthetic truth again in few, noisy points, and stay sensible where the points say little."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from headrace.planner.fits import DecodeFit, LearnFit, fit_decode, fit_learn

GPU = DecodeFit(floor_seconds=11e-3, seconds_per_sequence=8e-5, seconds_per_context_token=4e-8, seconds_per_extra_token=6e-5, sharpness=2.0)
CPU = DecodeFit(floor_seconds=8e-4, seconds_per_sequence=5e-5, seconds_per_context_token=6e-7, seconds_per_extra_token=4e-5, sharpness=1.0)
CASES = {"gpu": (GPU, (300.0, 1500.0, 6000.0)), "cpu": (CPU, (10.0, 30.0, 90.0))}


def points(truth: DecodeFit, contexts: tuple[float, ...], *, noise: float = 0.0, seed: int = 0) -> list[tuple[float, float, float, float, float]]:
    random = np.random.default_rng(seed)
    made = []
    for running in (1, 3, 9, 27, 81, 243):
        for context in contexts:
            extra = float(running) if context == contexts[0] else 0.0
            made.append((float(running), context, extra, truth.seconds(running, context, extra) * math.exp(noise * random.normal()), 40.0))
    return made


@pytest.mark.parametrize("name", CASES)
def test_decode_fit_predicts_batches_and_contexts_between_its_noisy_points(name: str) -> None:
    truth, contexts = CASES[name]
    fit = fit_decode(points(truth, contexts, noise=0.05))
    for running in (2, 16, 50, 150):
        for context in (contexts[0] * 1.5, contexts[1] * 1.5):
            assert fit.seconds(running, context) == pytest.approx(truth.seconds(running, context), rel=0.08)
    assert 0.02 < fit.relative_error < 0.1


def test_decode_fit_is_not_pulled_away_by_a_few_steps_that_something_interrupted() -> None:
    made = points(GPU, CASES["gpu"][1], noise=0.03)
    for index in (2, 9):
        made[index] = (*made[index][:3], made[index][3] * 8, made[index][4])
    fit = fit_decode(made)
    for running in (4, 64, 200):
        assert fit.seconds(running, 1500.0) == pytest.approx(GPU.seconds(running, 1500.0), rel=0.12)


def test_decode_fit_of_one_point_goes_through_it_and_grows_with_the_batch() -> None:
    fit = fit_decode([(16.0, 100.0, 0.0, 5e-3, 10.0)])
    assert fit.seconds(16, 100) == pytest.approx(5e-3, rel=0.02)
    assert fit.seconds(1, 100) < 5e-3 < fit.seconds(64, 100) < 4 * 5e-3 * 1.01


def test_more_sequences_never_give_fewer_tokens_a_second() -> None:
    for truth, _ in CASES.values():
        rates = [truth.tokens_per_second(running, 500.0) for running in range(1, 400)]
        assert rates == sorted(rates)


def test_smallest_batch_for_a_rate_gives_that_rate() -> None:
    running = GPU.smallest_running(2000.0, 1500.0, 512)
    assert running is not None and GPU.tokens_per_second(running, 1500.0) == pytest.approx(2000.0, rel=1e-6)
    assert GPU.smallest_running(1e9, 1500.0, 512) is None


def test_decode_seconds_of_nothing_are_nothing_and_large_powers_do_not_overflow() -> None:
    assert GPU.seconds(0) == 0.0
    assert math.isfinite(replace(GPU, sharpness=300.0, floor_seconds=1e-9).seconds(1000, 1e6))


LEARNER = LearnFit(overhead_seconds=2.0, seconds_per_micro_batch=0.05, seconds_per_token=1e-4, seconds_per_exchange=0.4)


def test_learner_fit_predicts_more_ranks_and_other_batches_than_it_saw() -> None:
    random = np.random.default_rng(1)
    made = [(ranks, 8192, tokens, LEARNER.seconds(ranks, 8192, tokens) * math.exp(0.03 * random.normal())) for ranks in (1, 2, 4) for tokens in (5e4, 2e5, 8e5)]
    fit = fit_learn(made)
    for ranks, tokens in ((8, 4e5), (2, 1.6e6), (1, 1e5)):
        assert fit.seconds(ranks, 8192, tokens) == pytest.approx(LEARNER.seconds(ranks, 8192, tokens), rel=0.1)


def test_overhead_keeps_twice_the_ranks_from_halving_an_update() -> None:
    fit = fit_learn([(1, 8192, tokens, LEARNER.seconds(1, 8192, tokens)) for tokens in (2e4, 5e4, 2e5, 8e5)])
    assert 0.5 < fit.seconds(2, 8192, 4e5) / fit.seconds(1, 8192, 4e5) < 0.56


def test_learner_fit_of_points_alike_takes_all_time_for_work() -> None:
    fit = fit_learn([(2, 4096, 10_000.0, 1.0), (2, 4096, 10_100.0, 1.01)])
    assert fit.overhead_seconds == 0.0 and fit.seconds(2, 4096, 20_000.0) == pytest.approx(2.0, rel=0.01)
