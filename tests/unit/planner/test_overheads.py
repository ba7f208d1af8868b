"""What the conductor and the wires take is found in the times of a run's events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.planner.measure import Recording
from headrace.planner.overheads import REPORT_SECONDS, dispatch_seconds, environment_seconds, gap_seconds, handover_seconds, settled, step_seconds, work_share

SIZE = 4


def recording(**lines: Any) -> Recording:
    return Recording(started={}, settings={}, directory=Path("run"), **lines)


def rollout(group: int, member: int, **values: Any) -> dict[str, Any]:
    return {"group": group, "member": member, "attempt": 0, "time": 0.0, "seconds": 1.0, **values}


def test_handing_over_is_what_lies_between_taking_a_batch_and_its_update_beside_learning_publishing_and_waiting() -> None:
    found = handover_seconds(
        recording(
            taken=[{"selection": index, "time": 10.0 * index} for index in range(3)],
            updated=[{"selection": index, "version": index + 1, "time": 10.0 * index + 1.75, "seconds": 1.0, "transfer_seconds": 0.1} for index in range(3)],
            published=[{"version": index + 1, "seconds": 0.25} for index in range(3)],
            acknowledged=[{"version": index + 1, "wait_seconds": 0.125} for index in range(3)],
        )
    )
    assert found == pytest.approx(0.375)


def test_dispatch_is_what_a_rollout_takes_beside_its_own_seconds_and_the_wait_for_a_report() -> None:
    rollouts = [rollout(group, member, time=group + 1.0 + 0.03) for group in range(20) for member in range(SIZE)]
    rollouts[5]["time"] += 9.0  # its group waited for room
    assert dispatch_seconds(recording(rollouts=rollouts, reserved={group: float(group) for group in range(20)})) == pytest.approx(0.03 - REPORT_SECONDS / 2)


def test_a_rollout_that_was_tried_again_says_nothing_of_dispatch() -> None:
    rollouts = [rollout(group, 0, time=group + 5.0, attempt=1) for group in range(20)]
    assert dispatch_seconds(recording(rollouts=rollouts, reserved={group: float(group) for group in range(20)})) == 0.0


def test_groups_whose_long_rollouts_are_still_out_are_left_out_of_the_lengths() -> None:
    """Of the last 10 groups only the first members are there."""
    whole = [rollout(group, member) for group in range(40) for member in range(SIZE)]
    begun = [rollout(group, 0) for group in range(40, 50)]
    assert list(settled([*begun, *whole])) == whole


def test_rollouts_that_failed_for_good_do_not_make_a_group_unsettled() -> None:
    whole = [rollout(group, member) for group in range(48) for member in range(SIZE) if member or group % 2]
    assert list(settled(whole)) == whole


def test_at_least_half_of_the_rollouts_are_measured_however_short_the_run() -> None:
    begun = [rollout(group, 0) for group in range(10)]
    assert len(settled(begun)) >= 5


def test_steps_and_gaps_are_read_alike_from_events_that_counted_whole_steps_as_busy() -> None:
    new = {"busy_seconds": 3.0, "idle_seconds": {"bookkeeping": 1.0, "gather": 0.5, "rollouts": 1.5, "environment": 2.0}}
    new |= {"step_seconds": 4.0, "gap_seconds": 1.0, "environment_seconds": 3.0}
    old = {"busy_seconds": 4.0, "idle_seconds": {"gather": 1.0, "environment": 3.0}}
    for activity, share in ((new, 0.75), (old, 1.0)):
        assert (step_seconds(activity), gap_seconds(activity), environment_seconds(activity)) == (4.0, 1.0, 3.0)
        assert work_share([{"activity": activity}]) == share
    assert work_share([]) == 1.0
