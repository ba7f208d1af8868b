"""Random streams and drawing: the numbers, the distribution, the log-probability."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampler.sampling import draw, stream_key, uniforms
from headrace.types import RolloutKey, SamplingParameters

KEY = stream_key(7, RolloutKey(3, 1, 0), 2)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_every_part_of_the_key_makes_another_stream() -> None:
    parts = [(s, g, m, a, t) for s in range(3) for g in range(4) for m in range(4) for a in range(2) for t in range(4)]
    keys = {stream_key(s, RolloutKey(g, m, a), t) for s, g, m, a, t in parts}
    assert len(keys) == len(parts)
    firsts = uniforms(sorted(keys), [0] * len(keys))
    assert len(set(firsts.tolist())) == len(parts)


def test_a_streams_numbers_do_not_depend_on_who_is_asked_beside_it() -> None:
    alone = uniforms([KEY], [5])[0]
    others = uniforms([1, 2, KEY, 4], [0, 9, 5, 5])
    assert others[2] == alone


def test_a_known_stream_stays_as_it_is() -> None:
    """The numbers are part of what a seed means: a change of this test is a change of every run (CHANGELOG, numerics)."""
    reference = []
    state = KEY
    for _ in range(3):  # SplitMix64 as published: add, then mix
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        reference.append(((z ^ (z >> 31)) >> 12) / 2**52)
    assert uniforms([KEY] * 3, [0, 1, 2]).tolist() == reference


def test_numbers_are_uniform_along_a_stream_and_across_streams() -> None:
    along = uniforms([KEY] * 64_000, range(64_000))
    across = uniforms([stream_key(0, RolloutKey(g, m, 0), 0) for g in range(1000) for m in range(64)], [0] * 64_000)
    for numbers in (along, across):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, 64, (0, 1))[0]
        assert chi_square(counts, np.full(64, 1000.0)) < 103  # 63 degrees of freedom, p = 0.001
        pairs = np.histogram2d(numbers[:-1], numbers[1:], 8, [[0, 1], [0, 1]])[0].ravel()
        assert chi_square(pairs, np.full(64, 63_999 / 64)) < 103


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_drawn_frequencies_match_the_distribution_and_its_logprobs(temperature: float) -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.4])
    number = 20_000
    draws = draw(logits.expand(number, -1), [SamplingParameters(temperature=temperature)] * number, uniforms([KEY] * number, range(number)))
    expected = torch.softmax(logits.double() / temperature, -1).numpy()
    counts = np.bincount(draws.tokens, minlength=6)
    assert chi_square(counts, expected * number) < 20.5  # 5 degrees of freedom, p = 0.001
    np.testing.assert_allclose(draws.logprobs, np.log(expected)[draws.tokens], atol=1e-12)


def test_rows_of_unlike_parameters_in_one_batch_are_drawn_each_by_its_own() -> None:
    logits = torch.tensor([[0.1, 2.0, 1.0, -1.0]]).expand(4, -1)
    parameters = [
        SamplingParameters(temperature=0.0),
        SamplingParameters(temperature=0.5),
        SamplingParameters(top_k=2),
        SamplingParameters(top_p=0.6),
    ]
    numbers = uniforms([KEY] * 4, [0, 1, 2, 3])
    together = draw(logits, parameters, numbers)
    for row in range(4):
        alone = draw(logits[row : row + 1], parameters[row : row + 1], numbers[row : row + 1])
        assert alone.tokens == [together.tokens[row]]
        assert alone.logprobs == pytest.approx([together.logprobs[row]])
    assert together.tokens[0] == 1
    assert together.logprobs[0] == pytest.approx(float(torch.log_softmax(logits[0].double(), -1)[1]))


def test_top_k_and_top_p_keep_the_likeliest_and_state_logprobs_of_what_is_kept() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2]))
    number = 2000
    for parameters, kept in ((SamplingParameters(top_k=2), {1: 4 / 7, 2: 3 / 7}), (SamplingParameters(top_p=0.75), {1: 4 / 9, 2: 3 / 9, 3: 2 / 9})):
        draws = draw(logits.expand(number, -1), [parameters] * number, uniforms([KEY] * number, range(number)))
        assert set(draws.tokens) == set(kept)
        for token, logprob in zip(draws.tokens, draws.logprobs, strict=True):
            assert logprob == pytest.approx(math.log(kept[token]), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.floats(-30, 30), st.just(-math.inf)), min_size=2, max_size=9), st.sampled_from([0.0, 0.25, 0.999999, 1 - 2.0**-52]))
def test_a_token_of_probability_zero_is_never_drawn(values: list[float], uniform: float) -> None:
    values[0] = 0.0
    draws = draw(torch.tensor([values]), [SamplingParameters()], np.array([uniform]))
    assert values[draws.tokens[0]] > -math.inf
    assert math.isfinite(draws.logprobs[0])
    assert draws.logprobs[0] <= 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_a_logit_that_is_not_finite_is_marked_and_the_others_are_drawn(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    draws = draw(logits, [SamplingParameters(temperature=temperature)] * 3, uniforms([KEY] * 3, [0, 1, 2]))
    assert math.isnan(draws.logprobs[1])
    assert [draws.logprobs[0], draws.logprobs[2]] == pytest.approx([math.log(0.25)] * 2)
