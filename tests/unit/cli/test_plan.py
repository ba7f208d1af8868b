"""`headrace plan` and `headrace run --plan` as they are called."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from fakes.plan_profiles import plain_profile
from headrace.cli.main import main
from headrace.planner.distributions import Distribution
from headrace.planner.profile import save_profile


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    answers = Distribution.lognormal(1000, 800).capped(6000)
    save_profile(plain_profile(answers=answers, learn_seconds_per_token=3e-4, errors=0.1), tmp_path / "profile.json")
    return tmp_path / "profile.json"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, the object on stdout, what people see)."""
    code = main([*arguments, "--json"])
    printed = capsys.readouterr()
    values: dict[str, Any] = json.loads(printed.out)
    return code, values, printed.err


def test_a_plan_is_written_printed_and_told(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, values, text = call(capsys, "plan", "profile.json", "--gpus", "8", "--batch", "512", "--price", "2", "--rollouts", "0")
    assert code == 0 and values["status"] == "done" and values["error"] is None
    written = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert all(values[key] == written[key] for key in written)
    assert values["best"]["num_sampler_devices"] + values["best"]["num_learner_devices"] == 8
    assert "learner:sampler devices" in text and "production" in text and "headrace simulate plan.json" in text


def test_the_best_plans_are_checked_by_simulation(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, values, _ = call(capsys, "plan", "profile.json", "--gpus", "8", "--batch", "128", "--max-staleness", "4", "--rollouts", "6000")
    assert code == 0
    checked = [plan for plan in values["plans"] if plan["verified_by"] == "simulation"]
    assert 1 <= len(checked) <= 3 and values["best"]["verified_by"] == "simulation"
    assert {"sync", "async"} == {plan["mode"] for plan in checked}
    assert sum(plan["verification"]["num_rollouts"] for plan in checked) <= 6000
    for plan in checked:
        shown = plan["verification"]
        assert shown["step_seconds"] == pytest.approx(shown["closed_form_step_seconds"], rel=0.15)
        assert plan["staleness"]["max"] <= plan["max_staleness"]


def test_what_if_changes_the_answer_and_is_kept_in_the_file(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", "profile.json", "--gpus", "8", "--batch", "512", "--rollouts", "0")
    _, before, _ = call(capsys, *asked)
    _, after, text = call(capsys, *asked, "--what-if", "answers=2x,learn=0.5x", "--what-if", "decode=0.9x")
    assert after["request"]["what_if"] == {"answers": 2.0, "learn": 0.5, "decode": 0.9}
    assert after["best"]["finish_seconds"]["p50"] > before["best"]["finish_seconds"]["p50"]
    assert after["profile"]["distributions"]["answer_tokens"]["mean"] == 2 * before["profile"]["distributions"]["answer_tokens"]["mean"]
    assert "answers x 2" in text


def test_a_missed_deadline_fails_and_says_what_would_make_it(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", "profile.json", "--gpus", "4", "--batch", "512", "--rollouts", "0", "--updates", "100")
    _, values, _ = call(capsys, *asked)
    hours = values["best"]["finish_seconds"]["p50"] / 3600
    code, values, text = call(capsys, *asked, "--deadline", str(hours / 2))
    assert code == 1 and values["status"] == "failed"
    assert "is missed" in values["infeasible_reason"] and "devices would make it" in values["error"]["message"]
    assert values["plans"] and values["infeasible_reason"] in text
    assert call(capsys, *asked, "--deadline", str(2 * hours))[0] == 0


def test_too_few_devices_fail_and_say_how_many_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    save_profile(plain_profile(num_parameters=7 * 10**10, memory_bytes=8 * 10**10, kind="estimated"), tmp_path / "large.json")
    code, values, _ = call(capsys, "plan", "large.json", "--gpus", "4")
    assert code == 1 and values["best"] is None and values["plans"] == []
    assert "At least 16 are needed" in values["infeasible_reason"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("profile.json",), "--gpus"),
        (("profile.json", "--gpus", "0"), "at least 1"),
        (("profile.json", "--gpus", "many"), "many"),
        (("none.json", "--gpus", "4"), "cannot be read"),
        (("profile.json", "--gpus", "4", "--batch", "100"), "whole number of groups"),
        (("profile.json", "--gpus", "4", "--batch", "1,x"), "--batch"),
        (("profile.json", "--gpus", "4", "--what-if", "answer=2x"), "answers=1.5x"),
        (("profile.json", "--gpus", "4", "--max-staleness", "-1"), "at least 0"),
        (("profile.json", "--gpus", "4", "--deadline", "0"), "above 0"),
        (("profile.json", "--gpus", "10000000"), "can be shared out"),
        (("profile.json", "--gpus", "4", "--group-size", "100000000"), "more than 100,000"),
        (("profile.json", "--gpus", "4", "--batch", "100000000"), "more than 100,000"),
        (("profile.json", "--gpus", "4", "--rollouts", "0", "--out", "."), "cannot be written"),
    ],
)
def test_wrong_requests_exit_2_and_say_why(profile: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    code, values, text = call(capsys, "plan", *arguments)
    assert code == 2 and values["status"] == "failed"
    assert said in values["error"]["message"] and "Traceback" not in text


def test_a_run_takes_the_plan_and_shows_where_its_settings_came_from(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, planned, _ = call(capsys, "plan", "profile.json", "--gpus", "8", "--batch", "512", "--rollouts", "0", "--updates", "30", "--overlay", "over.toml")
    best = planned["best"]
    for given in (("--plan", "plan.json"), ("--plan", "over.toml")):
        code, values, _ = call(capsys, "run", "door", *given, "pool.max_staleness=1", "--dry-run")
        assert code == 0
        settings = values["settings"]
        assert settings["run.num_samplers"] == {"value": best["num_sampler_devices"], "origin": given[1]}
        assert settings["sampler.max_running"] == {"value": best["slots_per_sampler"], "origin": given[1]}
        assert settings["pool.max_staleness"] == {"value": 1, "origin": "command line"}
    assert settings["run.num_updates"] == {"value": 30, "origin": "over.toml"}
    code, values, _ = call(capsys, "run", "door", "--plan", "plan.json", "--rank", "2", "--dry-run")
    second = planned["plans"][1]
    assert (values["settings"]["run.num_samplers"]["value"], values["settings"]["run.mode"]["value"]) == (second["num_sampler_devices"], second["mode"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--plan", "none.json"), "cannot be read"),
        (("--plan", "profile.json"), "no plan"),
        (("--rank", "2"), "--plan"),
        (("--plan", "plan.json", "--rank", "99"), "rank 99"),
    ],
)
def test_a_plan_that_cannot_be_taken_exits_2(profile: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    call(capsys, "plan", "profile.json", "--gpus", "2", "--batch", "64", "--rollouts", "0")
    code, values, _ = call(capsys, "run", "door", *arguments, "--dry-run")
    assert code == 2 and said in values["error"]["message"]


def test_the_page_shows_every_plan_and_the_rates(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, values, text = call(capsys, "plan", "profile.json", "--gpus", "8", "--batch", "512", "--rollouts", "0", "--report", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert all(html.escape(plan["why_not_better"], quote=True) in page for plan in values["plans"])
    assert "Production and consumption" in page and values["flat_region_text"] in page and "page page.html" in text
    assert "http://" not in page.split('id="plotly"')[0]


def test_directories_of_the_files_asked_for_are_made(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("a/plan.json", "b/over.toml", "c/page.html")
    options = [word for pair in zip(("--out", "--overlay", "--report"), files, strict=True) for word in pair]
    code, _, text = call(capsys, "plan", "profile.json", "--gpus", "8", "--batch", "512", "--rollouts", "0", *options)
    assert code == 0 and all(Path(file).is_file() for file in files), text
