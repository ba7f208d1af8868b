"""Utilization, staleness and the rest of `run --json` on runs whose numbers are known (case 15)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fakes.made_events import active, evaluated, lines_of, run_started, statistics, taken, updated, window
from fakes.report_runs import verified
from headrace import events as ev
from headrace.report.spread import Spread
from headrace.report.summary import over_bound_fraction, summarize

SPLIT = [{"name": "sampler-0", "role": "sampler", "capacity": 8}, {"name": "learner-0", "role": "learner", "capacity": 1}]
COLOCATED = [{"name": "device-0", "role": "colocated", "capacity": 4}, {"name": "device-1", "role": "colocated", "capacity": 4}]


def split_run() -> list[dict[str, Any]]:
    """10 timed seconds. Sampler: 2 s at 8 of 8 slots, 4 s at 2 of 8, 1 s of prefill, 3 s idle. Learner: 2 updates of 2 s, 1.5 s of them busy."""
    return lines_of(
        [
            (0.0, run_started(SPLIT)),
            (4.0, evaluated(0, 0.2)),
            (5.0, window("start")),
            (10.0, active("sampler-0", 5.0, running={8: 2.0, 2: 1.0}, prefill=1.0, idle={"environment": 1.0}, tokens=600)),
            (10.0, taken(1, 4.0)),
            (12.0, updated(1, seconds=2.0, busy=1.5, reward=0.25, numbers=statistics({0: 30, 2: 10}))),
            (12.5, ev.WeightsPublished(version=1, lineage=0, bytes=8, seconds=0.5)),
            (13.0, taken(2, 0.5)),
            (15.0, active("sampler-0", 5.0, running={2: 3.0}, idle={"admission": 1.5, "weights": 0.5}, tokens=400)),
            (15.0, updated(2, seconds=2.0, busy=1.5, reward=0.75, numbers=statistics({1: 60}, key_mean=1.0, key_max=1))),
            (15.0, ev.LedgerClosed(ledger={"closes": True})),
            (15.0, window("end")),
            (16.0, ev.CheckpointSaved(version=2, lineage=0, path="runs/x/checkpoints/update_000002", seconds=0.5)),
            (18.0, evaluated(2, 0.7)),
            (18.0, ev.RunFinished(status="done", error=None, version=2, lineage=0)),
        ]
    )


def colocated_run() -> list[dict[str, Any]]:
    """10 s: both devices decode 4 s at full capacity, wait 1 s for tools, learn 4 s (3 s busy); the sampler calls 5 s of that `admission`."""
    return lines_of(
        [
            (0.0, run_started(COLOCATED, placement="colocated", mode="sync")),
            (0.0, window("start")),
            (10.0, active("sampler-0", 10.0, running={4: 4.0}, idle={"environment": 1.0, "admission": 5.0})),
            (10.0, active("sampler-1", 10.0, running={4: 2.0, 2: 2.0}, idle={"environment": 1.0, "admission": 5.0})),
            (10.0, updated(1, seconds=4.0, busy=3.0)),
            (10.0, window("end")),
        ]
    )


def test_split_run_has_the_known_utilization() -> None:
    summary = summarize(split_run())
    sampler, learner = summary["utilization"]["devices"]
    assert sampler["allocated_seconds"] == learner["allocated_seconds"] == 10.0
    assert sampler["busy_fraction"] == pytest.approx(0.7)
    assert sampler["occupancy"] == pytest.approx((2.0 * 1.0 + 4.0 * 0.25) / 10)
    assert sampler["idle_seconds"] == pytest.approx({"environment": 1.0, "admission": 1.5, "weights": 0.5})
    assert learner["busy_fraction"] == learner["occupancy"] == pytest.approx(0.3)
    assert learner["idle_seconds"] == pytest.approx({"batch": 4.5, "overhead": 1.0, "publish": 0.5, "other": 1.0})
    assert summary["utilization"]["busy_fraction"] == pytest.approx(0.5)
    assert summary["utilization"]["occupancy"] == pytest.approx(0.3)


def test_one_straggler_where_64_fit_is_busy_and_hardly_occupied() -> None:
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": 64}]
    lines = lines_of([(0.0, run_started(devices)), (0.0, window("start")), (10.0, active("sampler-0", 10.0, running={1: 10.0})), (10.0, window("end"))])
    utilization = summarize(lines)["utilization"]
    assert utilization["busy_fraction"] == pytest.approx(1.0)
    assert utilization["occupancy"] == pytest.approx(1 / 64)


def test_more_sequences_than_capacity_do_not_occupy_more_than_all_of_it() -> None:
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": 8}]
    lines = lines_of([(0.0, run_started(devices)), (0.0, window("start")), (4.0, active("sampler-0", 4.0, running={64: 2.0})), (4.0, window("end"))])
    assert summarize(lines)["utilization"]["occupancy"] == pytest.approx(0.5)


def test_colocated_device_sums_what_it_samples_and_what_it_learns() -> None:
    utilization = summarize(colocated_run())["utilization"]
    first, second = utilization["devices"]
    assert first["busy_fraction"] == second["busy_fraction"] == pytest.approx(0.7)
    assert first["occupancy"] == pytest.approx(0.7)
    assert second["occupancy"] == pytest.approx(0.6)
    assert first["idle_seconds"] == pytest.approx({"environment": 1.0, "admission": 2.0})
    assert utilization["occupancy"] == pytest.approx(0.65)
    assert utilization["attainable_occupancy"] == pytest.approx(1.0)


@pytest.mark.parametrize("make", [split_run, colocated_run])
def test_idle_reasons_sum_to_the_idle_time_of_each_device(make: Any) -> None:
    for device in summarize(make())["utilization"]["devices"]:
        idle = device["allocated_seconds"] * (1 - device["busy_fraction"])
        assert math.fsum(device["idle_seconds"].values()) == pytest.approx(idle)


def test_work_outside_the_timed_window_does_not_count() -> None:
    """One report covers 10 s, 4 of them timed; an update after the window is left out."""
    lines = lines_of(
        [
            (0.0, run_started(SPLIT)),
            (6.0, window("start")),
            (10.0, active("sampler-0", 10.0, running={8: 10.0}, tokens=1000)),
            (10.0, window("end")),
            (12.0, updated(1, seconds=2.0, busy=2.0)),
        ]
    )
    summary = summarize(lines)
    sampler, learner = summary["utilization"]["devices"]
    assert summary["wall_seconds"] == 4.0
    assert sampler["busy_fraction"] == pytest.approx(1.0)
    assert summary["tokens_per_second"] == pytest.approx(100.0)
    assert learner["busy_fraction"] == 0.0
    assert learner["idle_seconds"] == pytest.approx({"other": 4.0})


def test_attainable_occupancy_is_bound_by_the_busier_role() -> None:
    """Samplers at .3, learner at .3: both could be full. With a learner at .15 it can reach half when samplers are full."""
    assert summarize(split_run())["utilization"]["attainable_occupancy"] == pytest.approx(1.0)
    slower = [line if line["event"] != "updated" else {**line, "busy_seconds": 0.75} for line in split_run()]
    assert summarize(slower)["utilization"]["attainable_occupancy"] == pytest.approx((1.0 + 0.5) / 2)


def test_staleness_weighs_every_trained_token_alike() -> None:
    expected = {"mean": (2 * 10 + 60) / 100, "max": 2, "key_mean": 1.0, "key_max": 1}
    found = summarize(split_run())["staleness"]
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_staleness_of_key_steps_and_of_other_tokens_is_told_apart() -> None:
    """Batches of 10 and 2 key tokens: each token weighs alike. The oldest token is a key token."""
    numbers = [statistics({0: 20, 4: 5, 9: 5}, keys={0: 5, 9: 5}), statistics({1: 2, 3: 8}, keys={1: 2})]
    lines = lines_of([(0.0, run_started(SPLIT)), (0.0, window("start")), *((1.0 + i, updated(1 + i, numbers=each)) for i, each in enumerate(numbers))])
    found = summarize(lines)["staleness"]
    assert found == pytest.approx({"mean": 91 / 40, "max": 9, "key_mean": (45 + 2) / 12, "key_max": 9, "other_mean": (20 + 24) / 28, "other_max": 4})


def test_ages_of_other_tokens_are_unknown_where_the_log_does_not_tell_them_apart() -> None:
    found = summarize(split_run())["staleness"]
    assert (found["other_mean"], found["other_max"]) == (None, None)


def test_verification_pace_parking_and_late_updates_are_counted_from_their_events() -> None:
    paced: dict[str, Any] = {"limit_groups": 5, "max_groups": 9, "over_share": 0.2, "wait_seconds": 1.5}
    first = active("sampler-0", 1.0, running={8: 1.0}, verify_seconds=0.3, verify_tokens=50, num_parked=2, num_unkept=1, applied_updates=1)
    second = active("sampler-1", 1.0, running={8: 1.0}, verify_seconds=0.2, verify_tokens=20, applied_updates=3, apply_delay_seconds=2.0)
    timed: list[tuple[float, Any]] = [(0.0, run_started(SPLIT)), (0.0, window("start")), (0.2, ev.VerificationAsked(role="sampler-0", rollouts=5))]
    timed += [(0.5, verified(1, 0, "short"))]
    timed += [(0.5, verified(1, member, "short", refreshed=refreshed, refresh_seconds=seconds)) for member, refreshed, seconds in ((1, 7, 0.2), (2, 3, 0.1))]
    timed += [(1.0, first), (1.0, second), (1.1, ev.Paced(**{**paced, "limit_groups": 9}, reason="r")), (1.2, ev.Paced(**paced, reason="r"))]
    summary = summarize(lines_of(timed))
    tails, shares = summary["verification"].pop("tail_seconds"), summary["verification"].pop("tail_share")
    assert tails == pytest.approx({"median": 0.1, "p95": 0.2, "max": 0.2}, rel=0.01)
    whole = next(line["seconds"] for line in lines_of(timed) if line["event"] == "rollout_verified" and line["refreshed"])
    assert shares == pytest.approx({name: value / whole for name, value in tails.items()}, rel=0.02)
    assert summary["verification"] == pytest.approx(
        {"asked": 5, "out": 2, "rollouts": 3, "cut": 2, "refreshed_tokens": 10, "refreshed_key_steps": 2, "seconds": 0.5, "tokens": 70, "unkept": 1}
    )
    assert summary["pace"] == paced, "the newest"
    assert (summary["parked"], summary["apply_delay_seconds"]) == (2, 0.5)


def test_recomputed_tokens_are_summed_over_the_workers_and_the_fullest_worker_is_told() -> None:
    first = active("sampler-0", 1.0, running={8: 1.0}, prefill_tokens=50, recomputed_tokens=20, evicted_tokens=5, kv_slots=4)
    second = active("sampler-1", 1.0, running={8: 1.0}, prefill_tokens=10, recomputed_tokens=2, in_flight=9)
    timed: list[tuple[float, Any]] = [(0.0, run_started(SPLIT)), (1.0, first), (1.0, second)]
    cache = {"prefill_tokens": 60, "recomputed_tokens": 22, "evicted_tokens": 5, "slots": 4, "most_in_flight": 9}
    assert summarize(lines_of(timed))["cache"] == cache


def test_what_a_lost_worker_had_is_out_for_verification_no_more() -> None:
    lost = ev.RoleLost(role="sampler-1", error="e", rollouts=4, losses=1, restarted=True)
    timed: list[tuple[float, Any]] = [(0.0, run_started(SPLIT)), *((0.1, ev.VerificationAsked(role=f"sampler-{n}", rollouts=5 + n)) for n in (0, 1))]
    timed += [(0.2, verified(1, 0, "short")), (0.3, lost), (0.4, ev.VerificationAsked(role="sampler-1", rollouts=2))]
    assert [summarize(lines_of(timed[:end]))["verification"]["out"] for end in range(1, 7)] == [0, 5, 11, 10, 4, 6]


def test_share_over_the_bound_is_of_the_trained_key_steps() -> None:
    assert over_bound_fraction({"key_steps": {"offered": 100, "trained": 40, "over_bound": 10}}) == 0.25
    for nothing in (None, {}, {"closes": True}, {"key_steps": {"offered": 3, "trained": 0, "over_bound": 0}}):
        assert over_bound_fraction(nothing) is None


def test_summary_has_the_agreed_keys_and_values() -> None:
    summary = summarize(split_run())
    utilization = summary.pop("utilization")
    assert set(utilization) == {"busy_fraction", "occupancy", "attainable_occupancy", "devices"}
    assert set(utilization["devices"][0]) == {"name", "role", "capacity", "allocated_seconds", "busy_fraction", "occupancy", "idle_seconds"}
    before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
    assert (before["mean"], after["mean"], after["num_rollouts"], after["interval95"]) == (0.2, 0.7, 64, [0.6, 0.8])
    del summary["evaluation"], summary["staleness"]
    assert summary == {
        "recipe": "door", "runtime": "local", "mode": "async", "placement": "split", "seed": 3, "num_updates": 2, "planned_updates": 10, "lineage": 0,
        "startup_seconds": 2.5, "wall_seconds": 10.0, "tokens_per_second": 100.0,
        "useful_tokens_per_second": 10.0, "saturated_tokens_per_second": None, "ledger": {"closes": True},
        "checkpoint": "runs/x/checkpoints/update_000002",
        "failures": [], "pace": None, "parked": 0, "apply_delay_seconds": None,
        "cache": {"prefill_tokens": 0, "recomputed_tokens": 0, "evicted_tokens": 0, "slots": None, "most_in_flight": 1},
        "verification": {
            "asked": 0, "out": 0, "rollouts": 0, "cut": 0, "refreshed_tokens": 0, "refreshed_key_steps": 0, "seconds": 0.0, "tokens": 0, "unkept": 0,
            "tail_seconds": None, "tail_share": None,
        },
    }  # fmt: skip


def test_any_beginning_of_a_run_can_be_summarized() -> None:
    lines = split_run()
    for length in range(len(lines) + 1):
        summary = summarize(lines[:length])
        assert set(summary) == set(summarize(lines))


def test_run_cut_short_is_timed_to_its_last_event() -> None:
    lines = [line for line in split_run() if line["time"] <= 12.5]
    assert summarize(lines)["wall_seconds"] == 7.5


def test_second_window_after_a_resume_adds_to_the_first() -> None:
    lines = lines_of([(0.0, run_started(SPLIT)), (1.0, window("start")), (4.0, window("end")), (10.0, window("start")), (12.0, window("end"))])
    assert summarize(lines)["wall_seconds"] == 5.0


@pytest.mark.parametrize(("reported_seconds", "busy", "idle"), [(19.0, 0.5, {"environment": 10.0}), (10.0, 0.25, {"environment": 5.0, "unreported": 10.0})])
def test_missing_last_report_is_taken_like_the_others_but_a_long_silence_is_idle(reported_seconds: float, busy: float, idle: dict[str, float]) -> None:
    """Half of the reported time is decode at 20 tokens/s, of a window of 20 s."""
    half = reported_seconds / 2
    work = active("sampler-0", reported_seconds, running={8: half}, idle={"environment": half}, tokens=int(20 * half))
    lines = lines_of([(0.0, run_started(SPLIT)), (0.0, window("start")), (reported_seconds, work), (20.0, window("end"))])
    summary = summarize(lines)
    assert summary["tokens_per_second"] == pytest.approx(20 * busy)
    sampler = summary["utilization"]["devices"][0]
    assert sampler["busy_fraction"] == sampler["occupancy"] == pytest.approx(busy)
    assert sampler["idle_seconds"] == pytest.approx(idle)


def test_a_spread_is_right_within_one_percent_over_nine_decades() -> None:
    spread, values = Spread(), [1e-4 * 1.023**index for index in range(900)]
    assert spread.result() is None
    for value in reversed(values):
        spread.add(value)
    assert spread.result() == pytest.approx({"median": values[449], "p95": values[854], "max": values[-1]}, rel=0.0101)
    one = Spread()
    one.add(0.37)
    assert one.result() == pytest.approx({"median": 0.37, "p95": 0.37, "max": 0.37}, rel=0.0101)
