"""What verification leaves is distributed as fresh draws under the new weights: chi-square over tables, many draws at once."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.sampler.sampling import draw, stream_key, uniforms
from headrace.sampler.verification import ACCEPT, REDRAW, accepts, redraw
from headrace.types import RolloutKey, SamplingParameters

NUM_DRAWS = 60_000
DRAW = 0
SMALLEST_P = 1e-3
"""The seeds are fixed: a test whose claim holds passes or fails once and for all."""


def p_value(counts: npt.NDArray[np.int64], probabilities: torch.Tensor) -> float:
    """Of the chi-square test that the counts come from these probabilities."""
    expected = probabilities.double() * int(counts.sum())
    statistic = ((torch.from_numpy(counts).double() - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))


@functools.cache
def streams(number: int, purpose: int) -> npt.NDArray[np.uint64]:
    """One for each of the draws, named as the sampler names them."""
    named = [number, purpose] if number else []
    return np.array([stream_key(0, RolloutKey(row, 0, 0), 0, *named) for row in range(NUM_DRAWS)], dtype=np.uint64)


def numbers(position: int, number: int, purpose: int) -> npt.NDArray[np.float64]:
    return uniforms(streams(number, purpose), np.full(NUM_DRAWS, position))  # type: ignore[arg-type]


def tables(num_contexts: int, vocabulary: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """[num_contexts, V] log-probabilities"""
    logits = scale * torch.randn(num_contexts, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.log_softmax(logits, -1)


def drawn(logprobs_RV: torch.Tensor, uniforms_R: npt.NDArray[np.float64]) -> torch.Tensor:
    return torch.tensor(draw(logprobs_RV, [SamplingParameters()] * len(logprobs_RV), uniforms_R).tokens)


def verified(old_RV: torch.Tensor, new_RV: torch.Tensor, tokens_R: torch.Tensor, position: int, number: int, lenience: float = 1.0) -> tuple[torch.Tensor, ...]:
    """(tokens, which of them were accepted)"""
    old_R, new_R = (table.gather(-1, tokens_R[:, None])[:, 0] for table in (old_RV, new_RV))
    stands_R = accepts(new_R, old_R, numbers(position, number, ACCEPT), lenience)
    return torch.where(stands_R, tokens_R, redraw(new_RV, old_RV, numbers(position, number, REDRAW))), stands_R


def test_verified_tokens_are_distributed_as_fresh_draws_and_relabelled_ones_are_not() -> None:
    old_RV, new_RV = (tables(1, 8, seed).expand(NUM_DRAWS, -1) for seed in (1, 2))
    tokens_R = drawn(old_RV, numbers(0, 0, DRAW))
    after_R, stands_R = verified(old_RV, new_RV, tokens_R, 0, 1)
    overlap = float(torch.minimum(old_RV[0].exp(), new_RV[0].exp()).sum())
    assert float(stands_R.double().mean()) == pytest.approx(overlap, abs=4 / NUM_DRAWS**0.5)  # no more is drawn again than must be
    assert p_value(np.bincount(after_R.numpy(), minlength=8), new_RV[0].exp()) > SMALLEST_P
    assert p_value(np.bincount(tokens_R.numpy(), minlength=8), new_RV[0].exp()) < 1e-12


def test_verified_sequences_of_three_tokens_are_distributed_as_fresh_ones_after_each_of_two_rounds() -> None:
    """The tokens after a rejected one are drawn again under the new weights; a second round compares with what the first one kept."""
    vocabulary, length = 4, 3
    num_contexts = sum(vocabulary**position for position in range(length))
    versions = [tables(num_contexts, vocabulary, 10 + version, scale=0.8) for version in range(3)]
    first = [sum(vocabulary**before for before in range(position)) for position in range(length)]  # where the contexts of a position begin

    sequences = torch.zeros(NUM_DRAWS, 0, dtype=torch.long)
    kept: list[torch.Tensor] = []
    for position in range(length):
        rows = versions[0][first[position] + index_of(sequences, vocabulary)]
        kept.append(rows)
        sequences = torch.cat([sequences, drawn(rows, numbers(position, 0, DRAW))[:, None]], -1)
    for number in (1, 2):
        after = torch.zeros(NUM_DRAWS, 0, dtype=torch.long)
        stands = torch.ones(NUM_DRAWS, dtype=torch.bool)
        for position in range(length):
            new_RV = versions[number][first[position] + index_of(after, vocabulary)]
            tokens, accepted = verified(kept[position], new_RV, sequences[:, position], position, number)
            fresh = drawn(new_RV, numbers(position, number, DRAW))
            after = torch.cat([after, torch.where(stands, tokens, fresh)[:, None]], -1)
            stands &= accepted
            kept[position] = new_RV
        sequences = after
        exact = sequence_probabilities(versions[number], vocabulary, length, first)
        counts = np.bincount(index_of(sequences, vocabulary).numpy(), minlength=vocabulary**length)
        assert p_value(counts, exact) > SMALLEST_P
        assert p_value(counts, sequence_probabilities(versions[number - 1], vocabulary, length, first)) < 1e-12


def index_of(sequences: torch.Tensor, vocabulary: int) -> torch.Tensor:
    index = torch.zeros(len(sequences), dtype=torch.long)
    for position in range(sequences.shape[1]):
        index = index * vocabulary + sequences[:, position]
    return index


def sequence_probabilities(table: torch.Tensor, vocabulary: int, length: int, first: list[int]) -> torch.Tensor:
    """[vocabulary^length]"""
    logprobs = torch.zeros(1, dtype=torch.float64)
    for position in range(length):
        logprobs = (logprobs[:, None] + table[first[position] : first[position] + vocabulary**position]).flatten()
    return logprobs.exp()


def test_lenience_keeps_more_tokens_and_comes_as_near_to_the_new_distribution_as_it_can() -> None:
    old_RV, new_RV = (tables(1, 8, seed).expand(NUM_DRAWS, -1) for seed in (1, 2))
    tokens_R = drawn(old_RV, numbers(0, 0, DRAW))
    after_R, stands_R = verified(old_RV, new_RV, tokens_R, 0, 1, lenience=2.0)
    old, new = old_RV[0].exp(), new_RV[0].exp()
    kept = torch.minimum(old, 2 * new)
    residual = (new - old).clamp(min=0)
    expected = kept + (1 - kept.sum()) * residual / residual.sum()
    assert float(stands_R.double().mean()) == pytest.approx(float(kept.sum()), abs=4 / NUM_DRAWS**0.5)
    assert p_value(np.bincount(after_R.numpy(), minlength=8), expected) > SMALLEST_P
    distance = float((expected - new).abs().sum() / 2)
    assert distance == pytest.approx(float((kept - new).clamp(min=0)[new < old].sum()))
    assert 0.01 < distance < float((old - new).abs().sum() / 2)


def test_equal_distributions_stand_and_a_token_that_has_become_impossible_does_not() -> None:
    same = tables(4, 6, 3)
    one = same[:, 2]
    assert bool(accepts(one, one, np.full(4, 1 - 2.0**-52)).all())
    assert not bool(accepts(torch.full((4,), -torch.inf, dtype=torch.float64), one, np.zeros(4)).any())


def test_a_redraw_gives_only_tokens_that_have_become_more_likely() -> None:
    old_RV, new_RV = tables(3, 6, 4), tables(3, 6, 5)
    for number in (0.0, 0.3, 0.7, 1 - 2.0**-52):
        tokens_R = redraw(new_RV, old_RV, np.full(3, number))
        assert bool((new_RV > old_RV).gather(-1, tokens_R[:, None]).all())
