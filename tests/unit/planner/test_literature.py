"""Published models, with the numbers that their papers print."""

from __future__ import annotations

import pytest

from headrace.planner import literature as lit


def test_pipeline_rate_is_the_slower_of_the_two_sides_and_highest_at_the_best_split() -> None:
    """PipelineRL, case study: N = 128, U(192) = 0.384, tau = 4.918."""
    best = lit.pipeline_best_split(128, 0.384, 4.918)
    assert best == pytest.approx(44.3, abs=0.1)
    assert lit.pipeline_best_split(128, 0.5, 4.918) < best  # larger batches, hence older data, need fewer samplers
    rates = {generating: lit.pipeline_rate(128, generating, 0.384, 4.918) for generating in range(1, 128)}
    assert max(rates, key=lambda generating: rates[generating]) == 44
    assert rates[44] == pytest.approx(16.9, abs=0.01)
    assert lit.conventional_rate(18.3, 26.02) == pytest.approx(10.74, abs=0.01)


def test_pipeline_lag_is_what_is_drawn_while_the_longest_is_written() -> None:
    assert lit.pipeline_max_lag(192, 44, 2.0, 1.0, 128) == 132
    assert lit.pipeline_max_lag(96, 44, 2.0, 1.0, 128) == 66


def test_pipeline_search_keeps_the_lag_and_is_faster_where_more_is_allowed() -> None:
    def efficiency(running: float) -> float:
        return min(1.0, running / 500)

    plans = [lit.pipeline_search(128, efficiency, 4.918, batch=128, tail=2.0, allowed_lag=lag, most_running=512) for lag in (33, 66, 133)]
    assert all(plan is not None and plan.max_lag <= lag for plan, lag in zip(plans, (33, 66, 133), strict=True))
    found = [plan for plan in plans if plan is not None]
    assert [plan.rate for plan in found] == sorted(plan.rate for plan in found)
    assert lit.pipeline_search(128, efficiency, 4.918, batch=1, tail=300.0, allowed_lag=1, most_running=512) is None


def test_flash_bound_falls_with_the_asynchronous_ratio_to_its_limit() -> None:
    values = {"samples": 256.0, "workers": 64.0, "generate": 10.0, "train": 3.0, "longest": 80.0}
    sync = lit.flash_sync_bound(**values)
    bounds = [lit.flash_async_bound(**values, async_ratio=ratio) for ratio in (0.0, 1.0, 2.0, 8.0)]
    assert bounds[0] == sync and bounds == sorted(bounds, reverse=True)
    assert sync / lit.flash_async_bound(**values, async_ratio=1e9) == pytest.approx(lit.flash_speedup_limit(**values))


def test_flash_share_puts_the_trainer_on_its_bound() -> None:
    values = {"samples": 256.0, "workers": 64.0, "generate": 10.0, "train": 3.0, "longest": 80.0}
    share = lit.flash_best_train_share(**values, async_ratio=2.0)
    assert 256 * 3.0 / (share * 64) == pytest.approx(lit.flash_async_bound(**values, async_ratio=2.0))
    assert share > lit.flash_best_train_share(**values, async_ratio=0.0)


def test_overlap_and_intervals_hide_the_shorter_side() -> None:
    assert lit.overlapped_step(100.0, 60.0, sync=5.0) == 105.0
    assert lit.interval_step(100.0, 60.0, 1, sync=5.0) == 165.0
    assert lit.interval_step(100.0, 60.0, 10**9, sync=5.0) == pytest.approx(100.0)
    assert lit.flash_queue_bound(512, 64, 10.0, 80.0) < lit.flash_queue_bound(256, 64, 10.0, 80.0)
