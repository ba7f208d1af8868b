"""A run against what it was promised."""

from __future__ import annotations

from typing import Any

from headrace.report.finish import Finish
from headrace.report.promise import promise_advice, promise_text

PROMISED = {
    "by": "plan.json, rank 1",
    "finish_seconds": {"p10": 290.0, "p50": 310.0, "p90": 340.0},
    "step_seconds": 3.1,
    "staleness_mean": 1.9,
    "occupancy": 0.65,
    "busy_fraction": 0.8,
}


def summary(seconds: float, updates: int = 50, *, occupancy: float = 0.6, busy: float = 0.78) -> dict[str, Any]:
    return {
        "wall_seconds": seconds,
        "num_updates": updates,
        "planned_updates": 100,
        "staleness": {"mean": 2.1},
        "utilization": {"occupancy": occupancy, "busy_fraction": busy},
    }


def left(seconds: float) -> Finish:
    return Finish(seconds=seconds, low=0.9 * seconds, high=1.1 * seconds)


def test_text_names_who_promised_what_and_what_it_is_now() -> None:
    assert promise_text(PROMISED, summary(160.0), left(181.0)) == (
        "by plan.json, rank 1: 5 min 10 s (4 min 50 s to 5 min 40 s), now 5 min 41 s (+10%); staleness 1.90, is 2.10; occupancy 65%, is 60%"
    )
    assert "was 5 min 00 s (-3%)" in str(promise_text(PROMISED, summary(300.0, 100), None))


def test_a_run_that_was_cut_is_not_taken_to_have_finished() -> None:
    text = promise_text(PROMISED, summary(100.0, 40), None)
    assert text is not None and "now" not in text and "was" not in text


def test_nothing_promised_says_nothing() -> None:
    assert promise_text(None, summary(100.0), left(100.0)) is None
    assert promise_advice(None, summary(100.0), left(1000.0)) is None


def test_only_a_run_that_is_plainly_late_is_advised() -> None:
    assert promise_advice(PROMISED, summary(160.0), left(200.0)) is None  # 360 s, promised at most 340
    late = promise_advice(PROMISED, summary(160.0), left(250.0))
    assert late is not None and late.startswith("32% later than plan.json, rank 1 promised: devices are as busy as they should be")
    idle = promise_advice(PROMISED, summary(160.0, busy=0.4), left(250.0))
    assert idle is not None and "devices are busy 40% instead of 80%" in idle
    thin = promise_advice(PROMISED, summary(160.0, occupancy=0.3), left(250.0))
    assert thin is not None and "devices are filled 30% instead of 65%" in thin
