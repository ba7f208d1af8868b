"""Key steps in the report: its section over made runs whose numbers are known, and over runs without marks."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from fakes.made_events import active, lines_of, run_started, statistics, updated, window
from fakes.report_runs import SPLIT, made_events, verified, write_run
from headrace import events as ev
from headrace.report.figures_key_steps import key_step_figures, other_ages, redrawn_shares, rollouts_out
from headrace.report.key_steps import has_key_steps, key_step_lead, mean_seconds_out
from headrace.report.page import write_report
from headrace.report.record import load_run

BOUND = "[pool]\nmax_key_staleness = 2\n"


def charts_of(directory: Path) -> dict[str, Any]:
    return {chart.title: chart for chart in key_step_figures(load_run(directory))}


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six updates; each with 10 key tokens of age 0 and 2 alike and 30 other tokens, 5 of age 0 and 25 of age 2."""
    return write_run(tmp_path_factory.mktemp("marked") / "run", made_events(text="plain"), extra=BOUND)


def test_section_says_how_old_key_steps_were_and_what_verification_did(marked: Path) -> None:
    assert key_step_lead(load_run(marked)) == (
        "72 key steps were offered and 54 trained; their tokens were 1.0 updates old on average and 2 at most, the other tokens 1.7 and 2. "
        "22\u00a0% of the trained key steps were over their bound of 2 updates. "
        "12 times a finished rollout was verified, and 50\u00a0% of these times it was cut."
    )
    text = write_report([marked], marked / "report.html").path.read_text(encoding="utf-8").replace("\u00a0", " ")
    section = text.partition("<h2>Key steps</h2>")[2].partition("<h2>")[0]
    for cell in ("54", "12 (22 %)", "12 refreshed", "6 (50 %)", "24 (9 %)", "0.3 s (10 %)", "180", "6</td>", "40 %", "3 to 7 of 9 groups might be outstanding"):
        assert cell in section, cell


def test_ages_of_key_steps_stand_beside_those_of_other_tokens_and_the_bound(marked: Path) -> None:
    traces = {trace["name"]: trace["y"] for trace in charts_of(marked)["Age of key steps and of other tokens"].data}
    assert traces["key steps, mean"] == [1.0] * 6
    assert traces["other tokens, mean"] == pytest.approx([50 / 30] * 6)
    assert traces["pool.max_key_staleness (dashed)"] == [2, 2]


def test_share_over_the_bound_is_of_each_batch_not_of_the_run_so_far(tmp_path: Path) -> None:
    """Totals of 10, 20, 30 trained and 0, 0, 9 over: the third batch has 90 %."""
    timed: list[tuple[float, ev.Event]] = [(0.0, run_started(SPLIT)), (0.0, window("start"))]
    for update, over in enumerate((0, 0, 9), start=1):
        steps = {"offered": 10 * update, "trained": 10 * update, "over_bound": over, "skipped": {}, "failed": {}, "pooled": 0, "in_flight": 0}
        timed.append((float(update), updated(update, numbers=statistics({3: 5}, keys={3: 5}))))
        timed.append((float(update), ev.LedgerClosed(ledger={"at_update": update, "closes": True, "key_steps": steps})))
    chart = charts_of(write_run(tmp_path / "run", timed))["Key steps over their bound"]
    assert (chart.data[0]["x"], chart.data[0]["y"]) == ([1, 2, 3], pytest.approx([0.3, 0.3, 0.3]))  # smoothed over what lies within two batches


def test_bars_of_verified_rollouts_count_each_once(marked: Path) -> None:
    bars = charts_of(marked)["Verified rollouts"].data
    assert [sum(bar["y"]) for bar in bars] == [6, 6]
    assert all(len(bar["x"]) == len(bar["y"]) <= 61 for bar in bars)


def test_other_tokens_are_all_but_those_of_key_steps() -> None:
    assert other_ages({"staleness_histogram": {"0": 4, "3": 2}, "key_staleness_histogram": {"0": 4, "3": 1}}) == (3.0, 3)
    assert other_ages({"staleness_histogram": {"0": 4}, "key_staleness_histogram": {"0": 4}}) is None, "every token is a key token"
    assert other_ages({"staleness_histogram": {"0": 4}}) is None, "a log from before they were told apart"


def test_redrawn_share_is_of_the_rollout_as_it_came_back(tmp_path: Path) -> None:
    """10 tokens, the last 8 cut, 3 drawn instead: 5 tokens, 60 % of them new. A second verification starts from these."""
    first, second = verified(1, 0, "short", refreshed=8), verified(1, 0, "short", refreshed=2)
    timed: list[tuple[float, ev.Event]] = [entry for entry in made_events(num_updates=1) if not isinstance(entry[1], ev.RolloutVerified)]
    timed += [(9.0, _with(first, tokens=85)), (9.5, _with(second, tokens=83))]
    run = load_run(write_run(tmp_path / "run", timed))
    lines = run.events("rollout_verified")
    assert [line["redrawn"] for line in lines] == [85 - 90 + 8, 83 - 85 + 2]
    assert redrawn_shares(lines) == pytest.approx([3 / 85, 0.0])
    assert sorted(each.tokens for each in run.rollouts) == [10, 83], "lengths are those of the newest version of a rollout"


def test_mean_time_out_is_that_of_rollouts_followed_one_by_one() -> None:
    draw = random.Random(1)
    spans = sorted((start := draw.uniform(0, 50), start + draw.expovariate(1.0)) for _ in range(200))
    asked = [(start, {"event": "verification_asked", "time": start, "role": "s", "rollouts": 1}) for start, _ in spans]
    back = [(end, {"event": "rollout_verified", "time": end, "role": "s"}) for _, end in spans]
    lines = [line for _, line in sorted([*asked, *back], key=lambda each: each[0])]
    assert mean_seconds_out(rollouts_out(lines)) == pytest.approx(sum(end - start for start, end in spans) / len(spans))
    assert mean_seconds_out([]) is None


def test_run_without_marks_and_verification_has_no_such_section(tmp_path: Path) -> None:
    timed: list[tuple[float, ev.Event]] = [(0.0, run_started(SPLIT)), (0.0, window("start")), (1.0, updated(1, numbers=statistics({1: 5})))]
    timed.append((1.0, active("sampler-0", 1.0, running={8: 1.0}, num_parked=3)))
    directory = write_run(tmp_path / "run", timed)
    assert not has_key_steps(load_run(directory)) and key_step_lead(load_run(directory)) is None
    assert "<h2>Key steps</h2>" not in write_report([directory], tmp_path / "r.html").path.read_text(encoding="utf-8")


def test_log_from_before_key_tokens_were_counted_shows_all_tokens_instead(tmp_path: Path) -> None:
    timed: list[tuple[float, ev.Event]] = [(0.0, run_started(SPLIT)), (0.0, window("start"))]
    timed += [(float(update), updated(update, numbers=statistics({1: 5, 4: 5}, key_mean=1.0, key_max=1))) for update in (1, 2)]
    directory = write_run(tmp_path / "run", timed)
    names = [trace["name"] for trace in charts_of(directory)["Age of key steps and of other tokens"].data]
    assert "all tokens, mean" in names and not any(name.startswith("other") for name in names)


@pytest.mark.parametrize("count", range(1, 40))
def test_any_beginning_of_a_run_with_key_steps_can_be_drawn(tmp_path: Path, count: int) -> None:
    run = load_run(write_run(tmp_path / "run", made_events()[:count], extra=BOUND))
    key_step_figures(run)
    assert (key_step_lead(run) is None) is not has_key_steps(run)


def test_verification_of_a_rollout_that_never_ended_is_an_unreadable_line(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [*made_events(num_updates=1)])
    stray = lines_of([(0.0, verified(77, 0, "short"))])[0]

    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps(stray) + "\n")
    assert load_run(directory).unreadable == 1


def _with(event: ev.RolloutVerified, **changes: Any) -> ev.RolloutVerified:

    return dataclasses.replace(event, **changes)
