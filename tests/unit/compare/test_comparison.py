"""The statistics of compare against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from fakes.made_events import active, evaluated, lines_of, run_started, taken, updated, window
from fakes.made_events import statistics as update_statistics
from headrace import events as ev
from headrace.cli.compare import print_comparison
from headrace.cli.output import Output
from headrace.report.comparison import (
    CurvePoint,
    MeasuredRun,
    as_json,
    compare_arm,
    default_target,
    evaluation_curve,
    final_mean,
    jitter,
    mean_and_interval,
    measure_run,
    measured_capacity,
    noise_floor,
    t_quantile_975,
    time_to_reward,
    verdict,
    with_capacity,
)
from headrace.report.summary import summarize


def curve(*means: float, seconds: Sequence[float] | None = None) -> tuple[CurvePoint, ...]:
    times = seconds or [10.0 * index for index in range(len(means))]
    return tuple(CurvePoint(version=index, seconds=times[index], mean=mean, half_width=0.02) for index, mean in enumerate(means))


def made(arm: str, seed: int, points: Sequence[CurvePoint], *, repeats: Sequence[float] = ()) -> MeasuredRun:
    return MeasuredRun(
        arm=arm, seed=seed, run_dir=f"{arm}-{seed}", curve=tuple(points), repeat_differences=tuple(repeats), num_updates=len(points) - 1, wall_seconds=50.0,
        checkpoint_seconds=1.0, occupancy=0.5, attainable_occupancy=0.8, busy_fraction=0.6, useful_tokens_per_second=100.0, staleness_mean=1.0, staleness_max=4,
    )  # fmt: skip


def constant(arm: str, seed: int, final: float, reached_at: float) -> MeasuredRun:
    """Reaches its final value at once, at that time."""
    return made(arm, seed, curve(-9.0, final, final, final, seconds=[0.0, 1.0, 2.0, reached_at]))


def test_final_value_is_the_mean_of_the_last_three_evaluations() -> None:
    assert final_mean(curve(0.0, 9.0, 0.6, 0.9, 0.3)) == pytest.approx(0.6)


def test_reward_is_reached_when_the_mean_of_three_is_and_not_when_one_is() -> None:
    # means of three, each at the time of its last: .43 at 20, .70 at 30, .90 at 40
    points = curve(0.1, 0.9, 0.3, 0.9, 1.5)
    assert time_to_reward(points, 0.4) == 20.0
    assert time_to_reward(points, 0.7) == 30.0
    assert time_to_reward(points, 0.71) == 40.0
    assert time_to_reward(points, 0.95) is None


def test_a_mean_at_the_target_has_reached_it() -> None:
    assert time_to_reward(curve(0.5, 0.5, 0.5), 0.5) == 20.0


def test_a_curve_that_falls_below_the_target_again_has_not_reached_it_before() -> None:
    points = curve(0.9, 0.9, 0.9, 0.0, 0.9, 0.9, 0.9)
    assert time_to_reward(points, 0.8) == 60.0
    assert time_to_reward(curve(0.9, 0.9, 0.9, 0.0), 0.8) is None


def test_two_evaluations_reach_nothing() -> None:
    assert time_to_reward(curve(1.0, 1.0), 0.5) is None


def test_jitter_leaves_the_climb_out() -> None:
    # final .95; from .90 on (>= .855) the differences are .04, .02, -.03
    points = curve(0.2, 0.5, 0.9, 0.94, 0.96, 0.93)
    expected = statistics.stdev([0.04, 0.02, -0.03])
    assert final_mean(points) == pytest.approx(0.9433333)
    assert jitter(points) == pytest.approx(expected)
    climbing = statistics.stdev([0.3, 0.4, 0.04, 0.02, -0.03])
    assert jitter(points) != pytest.approx(climbing)


def test_jitter_of_a_metric_below_zero_starts_near_its_final_value() -> None:
    # final -2: counts from -2.2 on
    points = curve(-9.0, -5.0, -2.1, -2.2, -1.9, -1.9)
    assert jitter(points) == pytest.approx(statistics.stdev([-0.1, 0.3, 0.0]))


def test_jitter_of_too_few_points_is_unknown() -> None:
    assert jitter(curve(0.1, 0.1, 0.9, 0.95)) is None


def test_noise_floor_is_the_root_mean_square_of_repeated_evaluations() -> None:
    runs = [made("a", 0, curve(1.0), repeats=[0.03, -0.04]), made("b", 0, curve(1.0), repeats=[0.0])]
    assert noise_floor(runs) == pytest.approx(math.sqrt((0.0009 + 0.0016) / 3))
    assert noise_floor([made("a", 0, curve(1.0))]) == 0.0, "an exact evaluation has none"


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (10, 2.2281), (11, 2.2010), (15, 2.1314), (20, 2.0860), (30, 2.0423), (120, 1.9799)]
)
def test_t_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert t_quantile_975(degrees) == pytest.approx(quantile, abs=2e-4)


def test_interval_over_seeds_is_students() -> None:
    mean, interval = mean_and_interval([0.90, 0.92, 0.97])
    deviation = statistics.stdev([0.90, 0.92, 0.97])
    half = 4.3027 * deviation / math.sqrt(3)
    assert mean == pytest.approx(0.93)
    assert interval == pytest.approx((0.93 - half, 0.93 + half))
    assert mean_and_interval([0.9]) == (0.9, None)


def test_differences_are_paired_by_seed() -> None:
    """Seeds differ by .2, the arms by .01 in each: only pairs can see it."""
    baseline = [constant("sync", seed, 0.5 + 0.2 * seed, 40.0) for seed in range(3)]
    arm = [constant("async", seed, 0.51 + 0.2 * seed + tiny, 10.0) for seed, tiny in zip((2, 0, 1), (0.001, 0.0, -0.001), strict=True)]
    one = compare_arm(arm, baseline, 0.4)
    assert one.final_difference == pytest.approx(0.01)
    assert one.difference_interval95 is not None
    assert one.difference_interval95[0] > 0
    assert one.resolved


def test_a_difference_whose_interval_holds_zero_is_not_resolved() -> None:
    baseline = [constant("sync", seed, 0.9, 40.0) for seed in range(3)]
    arm = [constant("async", seed, 0.9 + change, 10.0) for seed, change in enumerate((-0.03, 0.0, 0.02))]
    one = compare_arm(arm, baseline, 0.8)
    assert not one.resolved
    assert "not resolved; more than" in verdict([one], 0.8)


def test_one_seed_resolves_nothing_and_says_so() -> None:
    one = compare_arm([constant("async", 0, 0.5, 10.0)], [constant("sync", 0, 0.9, 40.0)], 0.4)
    assert one.difference_interval95 is None
    assert not one.resolved
    text = verdict([one], 0.4)
    assert "differs by -0.4000: not resolved, one seed has no interval" in text
    assert "0.25 x the time of sync (1 seed)" in text


def test_time_ratio_is_the_geometric_mean_over_pairs() -> None:
    baseline = [constant("sync", seed, 0.9, 40.0) for seed in range(2)]
    one = compare_arm([constant("async", 0, 0.9, 10.0), constant("async", 1, 0.9, 40.0)], baseline, 0.8)
    assert one.time_ratio == pytest.approx(0.5)
    assert one.time_ratio_interval95 is not None
    assert one.time_ratio_interval95[0] * one.time_ratio_interval95[1] == pytest.approx(0.25), "symmetric on the logarithm"


def test_two_seeds_that_bound_no_ratio_are_said_not_to() -> None:
    slow = [constant("async", 0, 0.9, 20.0), constant("async", 1, 0.9, 2.0)]
    one = compare_arm(slow, [constant("sync", seed, 0.9, 10.0) for seed in (0, 1)], 0.8)
    assert one.time_ratio_interval95 is not None and one.time_ratio_interval95[1] > 1000
    text = verdict([one], 0.8)
    assert "(2 seeds, which do not bound it: use --seeds 3 or more)" in text and f"{one.time_ratio_interval95[1]:.2f}" not in text
    alike = compare_arm([constant("async", seed, 0.9, 5.0 + 0.01 * seed) for seed in (0, 1)], [constant("sync", seed, 0.9, 10.0) for seed in (0, 1)], 0.8)
    assert "95 % interval 0." in verdict([alike], 0.8)


def test_seeds_that_miss_the_target_are_counted_in_the_verdict_not_hidden() -> None:
    baseline = [constant("sync", seed, 0.9, 40.0) for seed in range(3)]
    arm = [constant("async", 0, 0.9, 10.0), constant("async", 1, 0.5, 10.0), constant("async", 2, 0.5, 10.0)]
    one = compare_arm(arm, baseline, 0.8)
    assert (one.num_reached, one.num_baseline_reached) == (1, 3)
    assert one.time_ratio == pytest.approx(0.25)
    assert "async does not in 2 of 3 seeds" in verdict([one], 0.8)
    never = compare_arm(arm[1:], baseline, 0.8)
    assert never.time_ratio is None
    assert "In no seed do both async and sync reach 0.800 (async does not in 2 of 2 seeds); async's runs took 1.00 x as long" in verdict([never], 0.8)


def test_a_worse_arm_is_called_worse() -> None:
    baseline = [constant("sync", seed, 0.9, 40.0) for seed in range(3)]
    arm = [constant("async", seed, 0.8 + 0.001 * seed, 10.0) for seed in range(3)]
    assert verdict([compare_arm(arm, baseline, 0.7)], 0.7).endswith(": worse.")


def test_arms_without_a_common_seed_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="no seed in common"):
        compare_arm([constant("a", 0, 0.9, 1.0)], [constant("b", 1, 0.9, 1.0)], 0.8)


def test_target_is_a_hundredth_below_the_baseline() -> None:
    assert default_target([constant("sync", 0, 0.90, 1.0), constant("sync", 1, 0.94, 1.0)]) == pytest.approx(0.91)


def finished_run() -> list[dict[str, Any]]:
    """Window 10 to 20: sampler runs 8 sequences for 10 s, learner busy 4 s; evaluated afterwards, in another order."""
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": 8}, {"name": "learner-0", "role": "learner", "capacity": 1}]
    ledger = {"at_update": 2, "lineage": 0, "closes": True, "tokens": {"generated": 900, "trained": 400}}
    published = [(at, ev.WeightsPublished(version=version, lineage=0, bytes=1, seconds=0.0)) for version, at in ((0, 9.0), (1, 14.0), (2, 19.5))]
    numbers = update_statistics({0: 100, 2: 100})
    return lines_of(
        sorted(
            [
                (0.0, run_started(devices)), *published, (10.0, window("start")), (13.9, taken(0, 3.9)),
                (14.0, updated(1, seconds=2.0, busy=2.0, numbers=numbers)),
                (14.5, ev.CheckpointSaved(version=1, lineage=0, path="x/update_000001", seconds=0.5)),
                (19.4, updated(2, seconds=2.0, busy=2.0, numbers=numbers)), (19.5, ev.LedgerClosed(ledger=ledger)),
                (20.0, active("sampler-0", 10.0, running={8: 10.0}, tokens=900)), (20.0, window("end")),
                (21.0, ev.CheckpointSaved(version=2, lineage=0, path="x/update_000002", seconds=0.7)),
                (30.0, evaluated(2, 0.8)), (31.0, evaluated(0, 0.2)), (32.0, evaluated(1, 0.5)),
            ],
            key=lambda pair: pair[0],
        )
    )  # fmt: skip


def test_evaluations_made_afterwards_stand_at_the_time_their_weights_were_published() -> None:
    points = evaluation_curve(finished_run())
    assert [(point.version, point.seconds, point.mean) for point in points] == [(0, 0.0, 0.2), (1, 4.0, 0.5), (2, 9.5, 0.8)]
    assert points[0].half_width == pytest.approx(0.1)


def test_a_summary_knows_the_start_from_the_end_also_when_both_were_evaluated_afterwards() -> None:
    found = summarize(finished_run())["evaluation"]
    assert (found["before"]["mean"], found["after"]["version"]) == (0.2, 1)


def test_only_checkpoints_written_inside_the_window_count_as_its_time() -> None:
    assert measure_run(finished_run(), arm="a", seed=0, run_dir="d", capacity=None).checkpoint_seconds == pytest.approx(0.5)


def test_occupancy_is_of_the_common_capacity() -> None:
    lines = finished_run()
    assert measured_capacity(lines) == [8], "the learner's does not count"
    own = measure_run(lines, arm="a", seed=0, run_dir="d", capacity=None)
    common = measure_run(lines, arm="a", seed=0, run_dir="d", capacity=16)
    assert own.occupancy == pytest.approx((1.0 + 0.4) / 2)
    assert common.occupancy == pytest.approx((0.5 + 0.4) / 2)
    assert own.busy_fraction == common.busy_fraction
    assert lines[0]["devices"][0]["capacity"] == 8, "the log itself stays as it was"


def test_a_learner_keeps_its_capacity_of_one() -> None:
    assert [device["capacity"] for device in with_capacity(finished_run(), 16)[0]["devices"]] == [16, 1]


def test_useful_tokens_are_the_trained_ones() -> None:
    run = measure_run(finished_run(), arm="a", seed=0, run_dir="d", capacity=None)
    assert run.useful_tokens_per_second == pytest.approx(2 * 200 / 10)
    assert (run.staleness_mean, run.staleness_max) == (1.0, 2)


def test_key_steps_of_a_run_are_measured_where_there_are_any() -> None:
    lines = finished_run()
    assert measure_run(lines, arm="a", seed=0, run_dir="d", capacity=None).key_staleness_mean is None
    keyed = []
    for line in lines:
        if line["event"] == "updated":
            numbers = {"key_staleness_mean": 1.5, "key_staleness_max": 2, "key_staleness_histogram": {"0": 1, "2": 3}}
            line = {**line, "statistics": {**line["statistics"], **numbers}}
        if line["event"] == "ledger":
            line = {**line, "ledger": {**line["ledger"], "key_steps": {"offered": 9, "trained": 8, "over_bound": 2}}}
        keyed.append(line)
    run = measure_run(keyed, arm="a", seed=0, run_dir="d", capacity=None)
    assert (run.key_staleness_mean, run.key_staleness_max, run.key_over_bound_fraction) == (1.5, 2, 0.25)


@pytest.mark.parametrize("marked", [False, True])
def test_table_has_columns_of_key_steps_where_an_arm_has_them(marked: bool, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {"sync": [constant("sync", 0, 0.9, 40.0)], "async": [constant("async", seed, 0.9, 10.0) for seed in (0, 1)]}
    if marked:
        numbers = [{"key_staleness_mean": mean, "key_staleness_max": oldest, "key_over_bound_fraction": mean / 10} for mean, oldest in ((1.0, 4), (2.0, 7))]
        runs["async"] = [dataclasses.replace(run, **changes) for run, changes in zip(runs["async"], numbers, strict=True)]
    result = {**as_json(runs, {"sync": {}, "async": {}}, [], 0.8), "seeds": [0, 1], "capacity": 8, "report": "r", "run_dir": "d"}
    print_comparison(runs, result, Output(command="compare", json=False))
    table = capsys.readouterr().out
    assert ("over bound" in table) is marked
    assert ("1.5 (max 7)" in table and "15%" in table) is marked
    assert result["arms"][1]["runs"][1]["key_over_bound_fraction"] == (0.2 if marked else None)


def test_repeats_become_differences_of_the_same_weights() -> None:
    run = measure_run(finished_run(), arm="a", seed=0, run_dir="d", capacity=None, repeats={1: 0.53, 2: 0.76})
    assert run.repeat_differences == pytest.approx((0.03, -0.04))


def test_the_object_has_the_keys_that_others_rely_on() -> None:
    runs = {"sync": [constant("sync", 0, 0.9, 40.0)], "async": [constant("async", 0, 0.9, 10.0)]}
    one = compare_arm(runs["async"], runs["sync"], 0.8)
    found = as_json(runs, {"sync": {"run.mode": "sync"}, "async": {}}, [one], 0.8)
    assert {"target_reward", "arms", "comparisons", "verdict"} <= found.keys()
    assert {"name", "settings", "runs"} <= found["arms"][0].keys()
    assert {
        "seed", "run_dir", "wall_seconds", "time_to_reward_seconds", "final_mean", "jitter", "occupancy", "busy_fraction", "useful_tokens_per_second",
        "staleness_mean", "staleness_max", "predicted_seconds", "key_staleness_mean", "key_staleness_max", "key_over_bound_fraction",
    } <= found["arms"][0]["runs"][0].keys()  # fmt: skip
    assert {
        "arm", "baseline", "final_difference", "difference_interval95", "time_ratio", "time_ratio_interval95", "resolved",
    } <= found["comparisons"][0].keys()  # fmt: skip
    assert found["comparisons"][0]["time_ratio"] == pytest.approx(0.25)
