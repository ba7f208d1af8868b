"""What the governor did, in the report and in the lines of progress."""

from __future__ import annotations

import io
from pathlib import Path

from fakes.made_events import lines_of, run_started, updated, window
from fakes.report_runs import made_events, write_run
from headrace import events as ev
from headrace.report.governor import governor_lead, governor_parts
from headrace.report.page import write_report
from headrace.report.progress import ProgressView
from headrace.report.record import load_run

SPLIT = [{"name": "sampler-0", "role": "sampler", "capacity": 8}, {"name": "learner-0", "role": "learner", "capacity": 1}]


def governed(action: str, reason: str, *, version: int = 5) -> ev.Governed:
    return ev.Governed(action=action, reason=reason, version=version, lineage=1, max_staleness=4, effective_sample_size=0.25)


def test_the_report_lists_each_action_with_its_reason_and_escapes_it(tmp_path: Path) -> None:
    timed = [(0.0, run_started(SPLIT)), (1.0, window("start")), (2.0, updated(1)), (3.0, governed("tightened", "3 <updates> missed")), (4.0, window("end"))]
    run = load_run(write_run(tmp_path / "run", timed))
    assert governor_lead(run) == "Staleness bound lowered 1x."
    (text,) = governor_parts(run)
    for cell in ("staleness bound lowered", "3 &lt;updates&gt; missed", "0.25", "2.0 s"):
        assert cell in text
    page = tmp_path / "page.html"
    write_report([run.directory], page)
    assert "What the governor did" in page.read_text(encoding="utf-8")


def test_a_healthy_run_has_no_such_section(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", made_events()))
    assert governor_parts(run) == [] and governor_lead(run) is None


def test_progress_says_each_action_once() -> None:
    stream = io.StringIO()
    view = ProgressView(stream, width=lambda: 200)
    timed = [(0.0, run_started(SPLIT)), (3.0, governed("failed", "the reward fell", version=7)), (4.0, governed("refused", "the gradient explodes"))]
    for line in lines_of(timed):
        view.on_event(line)
    assert "governor at version 7: run judged failed: the reward fell\n" in stream.getvalue()
    assert "explodes" not in stream.getvalue(), "the refused update is told by its own event"
