"""Records check themselves, and a trajectory survives its bytes (cases 13, 14 and 16 rest on this)."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import errors
from headrace.errors import ConfigError, HeadraceError, Problem, WorkerLostError
from headrace.types import (
    FAILURES,
    Completion,
    EndReason,
    PolicyVersion,
    RolloutKey,
    StepRecord,
    StopReason,
    Trajectory,
    VersionCount,
    VersionSpan,
    check_spans,
)


def span(number: int, start: int, end: int, lineage: int = 0) -> VersionSpan:
    return VersionSpan(version=PolicyVersion(lineage, number), start=start, end=end)


def step(start: int, end: int, *spans: VersionSpan, key: float = 0.0) -> StepRecord:
    return StepRecord(action_start=start, action_end=end, version_spans=spans, key_weight=key, reward=0.0, stop_reason=StopReason.STOP)


def trajectory(**changes: Any) -> Trajectory:
    """Prompt 1 2, action 3 4 (version 5, then 6), observation 5, key action 6 (version 6)."""
    values: dict[str, Any] = {
        "key": RolloutKey(7, 1, 0), "task_id": "t", "task_kind": "default", "tokens": (1, 2, 3, 4, 5, 6), "sampler_logprobs": (-0.5, -1.0, 0.0),
        "steps": (step(2, 4, span(5, 2, 3), span(6, 3, 4)), step(5, 6, span(6, 5, 6), key=1.0)), "reward": 1.0, "end_reason": EndReason.DONE,
    }  # fmt: skip
    return Trajectory(**values | changes)


def test_later_lineage_is_newer_whatever_its_number() -> None:
    assert PolicyVersion(1, 3) > PolicyVersion(0, 100)
    assert str(PolicyVersion(0, 4)) == "4" and str(PolicyVersion(2, 4)) == "2:4"


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (span(1, 0, 3),),
        (span(1, 1, 4),),
        (span(1, 0, 2), span(2, 3, 4)),
        (span(1, 0, 3), span(2, 2, 4)),
        (span(2, 0, 2), span(1, 2, 4)),
        (span(1, 0, 2, lineage=1), span(9, 2, 4, lineage=0)),
        (span(1, 0, 0), span(1, 0, 4)),
        (span(1, 0, 5),),
    ],
)
def test_spans_that_do_not_tile_or_whose_version_falls_are_refused(spans: tuple[VersionSpan, ...]) -> None:
    with pytest.raises(ValueError, match=r"span|falls|end"):
        check_spans(spans, 0, 4)


def test_spans_that_tile_with_rising_versions_pass() -> None:
    check_spans((span(1, 0, 1), span(1, 1, 2), span(4, 2, 4)), 0, 4)
    check_spans((), 3, 3)


def test_completion_needs_one_log_probability_a_token() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 log-probabilities"):
        Completion(tokens=(1, 2), logprobs=(-1.0,), version_spans=(span(1, 0, 2),), stop_reason=StopReason.STOP)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sampler_logprobs": (-0.5, -1.0)}, "3 action tokens but 2"),
        ({"sampler_logprobs": (-0.5, 0.1, 0.0)}, "not finite or above 0"),
        ({"sampler_logprobs": (-0.5, float("-inf"), 0.0)}, "not finite or above 0"),
        ({"sampler_logprobs": (-0.5, float("nan"), 0.0)}, "not finite or above 0"),
        ({"tokens": (1, 2, 3, 4, 5)}, r"spans \[5, 6\) of 5 tokens"),
        ({"steps": (step(5, 6, span(6, 5, 6)), step(2, 4, span(5, 2, 4)))}, "step 1"),
        ({"steps": (step(2, 4, span(5, 2, 3)), step(5, 6, span(6, 5, 6)))}, "spans end at 3"),
    ],
)
def test_half_written_trajectory_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        trajectory(**changes)


def test_trajectory_survives_its_bytes() -> None:
    before = trajectory(error="é\n", end_reason=EndReason.ENVIRONMENT_ERROR, discarded_tokens=3, wait_seconds=1.25, temperature=0.7)
    assert Trajectory.from_bytes(before.to_bytes()) == before


numbers = st.floats(-50, 0, width=32)


@given(data=st.data(), lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=5), text=st.text())
def test_any_trajectory_survives_its_bytes(data: st.DataObject, lengths: list[tuple[int, int]], text: str) -> None:
    steps, position = [], 0
    for observed, acted in lengths:
        start = position + observed
        spans = [span(index, start + index, start + index + 1) for index in range(acted)]
        steps.append(step(start, start + acted, *spans, key=data.draw(st.sampled_from([0.0, 1.0, 2.5]))))
        position = start + acted
    total = sum(acted for _, acted in lengths)
    before = trajectory(
        task_id=text,
        tokens=tuple(data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=position, max_size=position))),
        sampler_logprobs=tuple(data.draw(st.lists(numbers, min_size=total, max_size=total))),
        steps=tuple(steps),
    )
    after = Trajectory.from_bytes(before.to_bytes())
    assert after == before
    assert after.summary() == before.summary()


def test_truncated_bytes_are_refused() -> None:
    payload = trajectory().to_bytes()
    with pytest.raises(ValueError, match="header says 3"):
        Trajectory.from_bytes(payload[:-4])


def test_summary_counts_tokens_by_version_and_mark() -> None:
    summary = trajectory(started_seconds=2.0, finished_seconds=5.0).summary()
    assert summary.versions == (
        VersionCount(version=PolicyVersion(0, 5), unmarked=1, key=0),
        VersionCount(version=PolicyVersion(0, 6), unmarked=1, key=1),
    )
    assert (summary.num_tokens, summary.num_action_tokens, summary.num_steps, summary.num_key_steps, summary.seconds) == (6, 3, 2, 1, 3.0)


@pytest.mark.parametrize("reason", list(EndReason))
def test_only_failures_leave_the_group(reason: EndReason) -> None:
    trained = {EndReason.DONE, EndReason.MAX_STEPS, EndReason.MAX_TOKENS, EndReason.MAX_SECONDS}
    assert trajectory(end_reason=reason).failed == (reason in FAILURES) == (reason not in trained)


@pytest.mark.parametrize("error", [WorkerLostError("gone.", remedy="Restart."), ConfigError([Problem(message="bad.", key="a.b", value=3)])])
def test_error_crosses_a_process_boundary_whole(error: HeadraceError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) and again.as_json() == error.as_json()


def test_wrong_use_ends_with_2_and_failed_work_with_1() -> None:
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, HeadraceError)]
    assert {kind.__name__ for kind in kinds if kind.exit_code == 2} == {"ConfigError", "RecipeError", "ModelError"}
    assert {kind.exit_code for kind in kinds} == {1, 2}
