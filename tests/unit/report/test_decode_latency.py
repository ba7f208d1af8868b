"""The latency curve of the report shows what the steps took."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import profiled_run
from fakes.made_events import active, run_started, window
from fakes.report_runs import SPLIT, write_run
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


def test_curves_of_very_short_contexts_are_named_by_their_tokens(tmp_path: Path) -> None:
    reports = [active("sampler-0", 1.0, running={4: 0.5}, decode_work=tuple((10, 40, 40, 40 * context, 0.1) for context in (0, 1, 2, 5)))]
    run = load_run(write_run(tmp_path / "run", [(0.0, run_started(SPLIT)), (0.0, window("start")), *((1.0, one) for one in reports)]))
    chart = decode_latency(run)
    assert chart is not None
    assert [trace["name"] for trace in chart.data] == [
        "contexts under 1 token",
        "contexts of 1 token",
        "contexts of 2 to 3 tokens",
        "contexts of 4 to 7 tokens",
    ]
