"""Quantile tables: what is drawn from one is what went into it."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.planner.distributions import Distribution


@pytest.fixture
def lengths() -> np.ndarray:
    return np.exp(np.random.default_rng(3).normal(4.0, 0.8, 4000))


def test_mean_deviation_and_tail_of_the_values_survive_the_table(lengths: np.ndarray) -> None:
    table = Distribution.of(lengths.tolist())
    assert table.mean == pytest.approx(lengths.mean())
    assert table.table_mean == pytest.approx(lengths.mean(), rel=0.02)
    assert table.deviation == pytest.approx(lengths.std(), rel=0.06)
    assert table.quantile(0.99) == pytest.approx(np.quantile(lengths, 0.99), rel=0.01)
    assert table.most == pytest.approx(lengths.max())


@pytest.mark.parametrize("size", [2, 8, 16])
def test_expected_largest_of_a_group_agrees_with_drawn_groups(lengths: np.ndarray, size: int) -> None:
    drawn = np.random.default_rng(5).choice(lengths, size=(6000, size)).max(axis=1).mean()
    assert Distribution.of(lengths.tolist()).expected_max(size) == pytest.approx(drawn, rel=0.04)


def test_stratified_values_have_the_mean_of_as_many_draws_and_their_expected_largest(lengths: np.ndarray) -> None:
    table = Distribution.of(lengths.tolist())
    values = table.stratified(128)
    assert sum(values) / 128 == pytest.approx(table.table_mean, rel=0.02)
    assert values == sorted(values) and values[-1] >= table.expected_max(128) * 0.999


def test_share_above_inverts_the_quantiles(lengths: np.ndarray) -> None:
    table = Distribution.of(lengths.tolist())
    for level in (0.03, 0.4, 0.77, 0.985):
        assert 1 - table.share_above(table.quantile(level)) == pytest.approx(level)
    assert table.share_above(-1.0) == 1.0 and table.share_above(table.most) == 0.0


def test_scaling_for_a_what_if_scales_every_value_the_mean_and_the_drift(lengths: np.ndarray) -> None:
    table = Distribution.of(lengths.tolist(), np.arange(len(lengths)).tolist())
    longer = table.scaled(1.5)
    assert longer.mean == pytest.approx(1.5 * table.mean) and longer.quantile(0.9) == pytest.approx(1.5 * table.quantile(0.9))
    assert longer.tailness(8) == pytest.approx(table.tailness(8))


def test_a_cap_lowers_only_what_lies_above_it(lengths: np.ndarray) -> None:
    table = Distribution.of(lengths.tolist())
    capped = table.capped(100.0)
    assert capped.most == 100.0 and capped.quantile(0.1) == table.quantile(0.1) and capped.mean < table.mean


def test_lengths_that_grow_with_the_updates_show_as_drift_and_noise_does_not() -> None:
    random = np.random.default_rng(7)
    updates = np.repeat(np.arange(100), 16)
    noise = random.normal(50, 10, len(updates))
    assert Distribution.of(np.abs(noise).tolist(), updates.tolist()).drift_per_update == 0.0
    assert Distribution.of(np.abs(noise + 0.2 * updates).tolist(), updates.tolist()).drift_per_update == pytest.approx(0.2, abs=0.03)


def test_lognormal_has_the_mean_and_nearly_the_deviation_asked_for() -> None:
    table = Distribution.lognormal(10.0, 6.0)
    assert table.table_mean == pytest.approx(10.0, rel=0.02) and table.deviation == pytest.approx(6.0, rel=0.06)
    assert Distribution.lognormal(0.0, 1.0).most == 0.0


def test_few_values_are_not_taken_for_more_than_they_show() -> None:
    one = Distribution.of([5.0])
    assert one.quantile(0.0) == one.most == 5.0 and one.tailness(8) == pytest.approx(1.0)
    assert Distribution.of([1.0, 3.0]).table_mean == pytest.approx(2.0)


def test_tasks_of_unlike_lengths_are_no_drift_however_many_members_their_groups_have() -> None:
    """By single values, 64 members of each of 40 tasks, chance looks like a clear trend in most runs."""
    found, by_value = 0, 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        tasks = np.repeat(random.lognormal(2.5, 0.6, 40), 64)
        groups, updates = np.repeat(np.arange(40), 64).tolist(), np.repeat(np.arange(40.0) / 4, 64).tolist()
        found += Distribution.of(tasks.tolist(), updates, groups).drift_per_update != 0.0
        by_value += Distribution.of(tasks.tolist(), updates).drift_per_update != 0.0
    assert found <= 2 and by_value >= 10
