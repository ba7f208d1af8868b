"""`headrace simulate`: of plans and of profiles."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.plan_profiles import plain_profile
from headrace.cli.main import main
from headrace.planner.distributions import Distribution
from headrace.planner.plan import Request, save_proposal
from headrace.planner.profile import save_profile
from headrace.planner.proposal import make_proposal

PROFILE = plain_profile(answers=Distribution.lognormal(300.0, 250.0), learn_seconds_per_token=1e-4)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    proposal = make_proposal(PROFILE, Request(num_gpus=4, batch_trajectories=(64,), group_size=8, num_updates=12))
    save_proposal(proposal, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def simulated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["simulate", *map(str, arguments), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_plan_is_simulated_as_it_says(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = json.loads(plan_file.read_text())["plans"]
    rank, devices = next((plan["rank"], plan["num_sampler_devices"] // plan["tensor_parallel"]) for plan in plans if plan["placement"] == "colocated")
    result = simulated(capsys, plan_file, "--rank", rank, "--run-dir", tmp_path / "run")
    assert (result["command"], result["status"], result["runtime"], result["rank"]) == ("simulate", "done", "simulated", rank)
    assert (result["mode"], result["placement"], result["num_updates"]) == ("sync", "colocated", 12)
    assert [device["role"] for device in result["utilization"]["devices"]] == ["colocated"] * devices
    assert (tmp_path / "run" / "events.jsonl").is_file()


def test_the_best_plan_is_taken_unless_told_otherwise(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = json.loads(plan_file.read_text())["best"]
    result = simulated(capsys, plan_file, "pool.max_staleness=1", "--updates", 5, "--seed", 3, "--run-dir", tmp_path / "run")
    assert (result["rank"], result["num_updates"], result["seed"]) == (1, 5, 3)
    settings = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert settings["sampler"]["max_running"] == best["slots_per_sampler"]
    assert settings["pool"]["max_staleness"] == 1
    assert settings["run"]["num_samplers"] == best["num_sampler_devices"] // best["tensor_parallel"]


def test_a_plan_for_more_devices_than_a_machine_has_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proposal = make_proposal(PROFILE, Request(num_gpus=160, batch_trajectories=(256,), group_size=8, num_updates=2, max_staleness=1))
    large = next(plan for plan in proposal.plans if plan.num_samplers + plan.num_learner_devices == 160)
    save_proposal(proposal, tmp_path / "plan.json")
    result = simulated(capsys, tmp_path / "plan.json", "--rank", large.rank, "--run-dir", tmp_path / "run")
    assert len(result["utilization"]["devices"]) == 160


def test_a_profile_is_simulated_with_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(PROFILE, tmp_path / "profile.json")
    settings = ("run.num_samplers=3", "pool.groups_per_batch=4", "--updates", 6, "--failures", 0.2)
    result = simulated(capsys, tmp_path / "profile.json", *settings, "--run-dir", tmp_path / "run")
    assert (result["rank"], result["num_updates"]) == (None, 6)
    assert [device["role"] for device in result["utilization"]["devices"]] == ["sampler"] * 3 + ["learner"]
    assert result["ledger"]["tokens"]["failed"]["environment_error"] > 0
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        (["missing.json"], "PLAN", "cannot be read"),
        (["profile.json", "--rank", "2"], "--rank", "is a profile"),
        (["profile.json", "run.num_samples=4"], "run.num_samples", "Did you mean 'run.num_samplers'?"),
        (["profile.json", "pool.verify=all"], "pool.verify", "made no verification of that kind"),
        (["text.json"], "PLAN", "is no JSON"),
        (["plan.json", "--rank", "99"], "--rank", "no plan of rank 99"),
        (["profile.json", "--failures", "1.5"], "--failures", "below 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_anything_is_written(
    arguments: list[str], key: str | None, says: str, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(PROFILE, tmp_path / "profile.json")
    (tmp_path / "text.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *arguments, "--run-dir", "run", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["key"] == key
    assert error["message"].count(f"{arguments[0]}") <= 1, "the file is named once"
    assert says in f"{error['message']} {error['remedy']}"
    assert not (tmp_path / "run").exists()


def test_an_estimated_profile_with_tensor_parallel_engines_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = replace(PROFILE, model=replace(PROFILE.model, tensor_parallel=2))
    save_proposal(make_proposal(profile, Request(num_gpus=8, batch_trajectories=(64,), group_size=8, num_updates=6)), tmp_path / "plan.json")
    best = json.loads((tmp_path / "plan.json").read_text())["best"]
    result = simulated(capsys, tmp_path / "plan.json", "--run-dir", tmp_path / "run")
    samplers = [device for device in result["utilization"]["devices"] if device["role"] != "learner"]
    assert len(samplers) == best["num_sampler_devices"] // best["tensor_parallel"]
