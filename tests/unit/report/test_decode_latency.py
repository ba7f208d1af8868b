"""The latency curve of the report shows what the steps took."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import profiled_run
from headrace.report.figures_speed import decode_latency, latency_curves
from headrace.report.record import load_run


def test_points_of_the_curve_are_the_mean_latencies_by_batch_and_context(tmp_path: Path) -> None:
    profiled_run.write_run(tmp_path / "run")
    chart = decode_latency(load_run(tmp_path / "run"))
    assert chart is not None
    for trace, context in zip(chart.data, (12, 23.5, 45), strict=True):
        assert trace["x"] == sorted(trace["x"]) and set(trace["x"]) <= {1, 2, 4, 8, 16, 32, 64}
        for running, milliseconds in zip(trace["x"], trace["y"], strict=True):
            assert milliseconds == pytest.approx(1e3 * profiled_run.DECODE.seconds(running, context, running), rel=0.1)


def test_runs_that_do_not_tell_steps_apart_have_no_curve(tmp_path: Path) -> None:
    profiled_run.write_run(tmp_path / "old", detail=False)
    assert decode_latency(load_run(tmp_path / "old")) is None


def test_a_kind_of_step_seen_once_is_left_out_and_halves_of_an_octave_stay_apart() -> None:
    work = [(10, 40, 40, 400, 0.1), (10, 60, 60, 600, 0.2), (1, 9, 9, 90, 5.0)]
    (points,) = latency_curves([{"decode_work": work}]).values()
    assert [(point["running"], point["seconds"]) for point in points] == [(4.0, 0.01), (6.0, 0.02)]
