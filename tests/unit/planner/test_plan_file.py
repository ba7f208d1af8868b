"""plan.json: keys that other programs rely on, what is refused, and the overlay for a recipe."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fakes.plan_profiles import plain_profile
from headrace.config_loading import load_settings
from headrace.errors import ConfigError
from headrace.planner.distributions import Distribution
from headrace.planner.plan import (
    Proposal,
    Request,
    load_overlay,
    load_proposal,
    overlay_settings,
    overlay_toml,
    proposal_as_json,
    proposal_from_json,
    save_proposal,
)
from headrace.planner.promise import promise_of_plan
from headrace.planner.proposal import make_proposal

KEYS = {"profile", "request", "best", "plans", "flat_region", "speedup_over_best_sync", "sensitivity", "estimated", "infeasible_reason"}
PLAN_KEYS = {
    "rank", "mode", "placement", "num_sampler_devices", "num_learner_devices", "tensor_parallel", "slots_per_sampler", "batch_trajectories", "group_size",
    "max_staleness", "selection", "quorum", "step_seconds", "production_rate", "consumption_rate", "staleness", "occupancy", "busy_fraction",
    "finish_seconds", "cost", "bottleneck", "why_not_better", "verified_by",
}  # fmt: skip


@pytest.fixture(scope="module")
def proposal() -> Proposal:
    profile = plain_profile(answers=Distribution.lognormal(1000, 800), learn_seconds_per_token=3e-4, errors=0.1)
    return make_proposal(profile, Request(num_gpus=8, batch_trajectories=(512,), group_size=8, price_per_gpu_hour=2.0))


@pytest.fixture(scope="module")
def values(proposal: Proposal) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(json.dumps(proposal_as_json(proposal), allow_nan=False))
    return written


def test_the_file_has_every_key_of_the_contract(values: dict[str, Any]) -> None:
    assert values.keys() >= KEYS
    for rank, plan in enumerate(values["plans"], start=1):
        assert plan.keys() >= PLAN_KEYS and plan["rank"] == rank
        assert plan["staleness"].keys() >= {"mean", "p95", "max"}
        assert plan["finish_seconds"].keys() >= {"p50", "p90"} and plan["cost"].keys() >= {"p50", "p90"}
        assert plan["verified_by"] == "closed form" and plan["why_not_better"]
    assert all(one.keys() >= {"input", "elasticity"} for one in values["sensitivity"])
    assert values["best"] == values["plans"][0]
    assert set(values["flat_region"]) <= {plan["rank"] for plan in values["plans"]} and 1 in values["flat_region"]


def test_without_a_price_cost_keeps_its_keys(proposal: Proposal) -> None:
    free = make_proposal(proposal.profile, Request(num_gpus=2, batch_trajectories=(512,), group_size=8))
    written = proposal_as_json(free)
    assert written["plans"][0]["cost"] == {"p10": None, "p50": None, "p90": None}
    assert proposal_from_json(json.loads(json.dumps(written))).plans[0].cost is None


def test_a_file_loads_back_as_it_was_written(proposal: Proposal, tmp_path: Path) -> None:
    save_proposal(proposal, tmp_path / "plan.json")
    assert load_proposal(tmp_path / "plan.json") == proposal


def test_plans_stand_by_throughput_and_within_the_request(proposal: Proposal) -> None:
    rates = [plan.rate for plan in proposal.plans[1:]]
    assert rates == sorted(rates, reverse=True) and proposal.plans[0].rate >= 0.995 * rates[0]
    for plan in proposal.plans:
        assert plan.max_staleness <= 8 and plan.staleness.mean <= plan.staleness.p95 <= plan.staleness.max <= 8
        devices = plan.num_sampler_devices if plan.placement == "colocated" else plan.num_sampler_devices + plan.num_learner_devices
        assert devices <= 8
        assert plan.finish_seconds.p10 <= plan.finish_seconds.p50 <= plan.finish_seconds.p90


@pytest.mark.parametrize(
    ("damage", "key"),
    [
        (lambda values: values["plans"][0].pop("step_seconds"), "plans.0.step_seconds"),
        (lambda values: values["plans"][1].update(mode="both"), "plans.1.mode"),
        (lambda values: values["request"].update(num_gpus=0), "request.num_gpus"),
        (lambda values: values["profile"].pop("decode"), "decode"),
        (lambda values: values.update(schema=7), "schema"),
        (lambda values: values.pop("plans"), "PLAN"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(values: dict[str, Any], damage: Any, key: str) -> None:
    damaged = json.loads(json.dumps(values))
    damage(damaged)
    with pytest.raises(ConfigError) as caught:
        proposal_from_json(damaged, file="plan.json")
    assert [problem.key for problem in caught.value.problems] == [key]
    assert "plan.json" in str(caught.value)


def test_a_rank_that_is_not_there_is_answered_with_those_that_are(proposal: Proposal) -> None:
    with pytest.raises(ConfigError, match=f"rank 99.*1 to {len(proposal.plans)}"):
        proposal.plan(99)


def test_the_overlay_turns_a_recipe_into_the_plan(proposal: Proposal, tmp_path: Path) -> None:
    save_proposal(proposal, tmp_path / "plan.json")
    for plan in proposal.plans:
        settings = load_settings("door", plan=("plan.json", load_overlay(tmp_path / "plan.json", rank=plan.rank))).settings
        assert (settings.run.mode, settings.run.placement) == (plan.mode, plan.placement)
        assert settings.run.num_samplers * plan.tensor_parallel == plan.num_sampler_devices
        assert plan.placement == "colocated" or settings.run.num_learner_ranks == plan.num_learner_devices
        assert settings.batch_trajectories == plan.batch_trajectories and settings.sampler.max_running == plan.slots_per_sampler
        assert plan.mode == "sync" or settings.pool.max_staleness == plan.max_staleness


def test_a_run_is_promised_what_its_plan_says_as_long_as_it_keeps_the_plans_settings(proposal: Proposal, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_proposal(proposal, path)
    planned = load_overlay(path)
    updates = proposal.plans[0].num_updates

    def promised(*overrides: str) -> dict[str, object] | None:
        resolved = load_settings("door", [f"run.num_updates={2 * updates}", *overrides], plan=(str(path), planned))
        return promise_of_plan((str(path), planned), None, resolved)

    promise, best = promised(), proposal.plans[0]
    assert promise is not None and promise["by"] == "plan.json, rank 1"
    assert promise["finish_seconds"] == pytest.approx({name: 2 * getattr(best.finish_seconds, name) for name in ("p10", "p50", "p90")})
    assert (promise["staleness_mean"], promise["occupancy"]) == (best.staleness.mean, best.occupancy)
    assert promised("sampler.max_running=3") is None


def test_overlay_as_toml_says_the_same_as_the_plan(proposal: Proposal, tmp_path: Path) -> None:
    best = proposal.plans[0]
    (tmp_path / "settings.toml").write_text(overlay_toml(best, num_updates=70), encoding="utf-8")
    sections = tomllib.loads((tmp_path / "settings.toml").read_text(encoding="utf-8"))
    flat = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    assert flat == overlay_settings(best) | {"run.num_updates": 70}
    resolved = load_settings("door", ["run.num_updates=3"], plan=("settings.toml", load_overlay(tmp_path / "settings.toml")))
    assert resolved.settings.run.num_updates == 3 and resolved.origins["run.num_updates"] == "command line"
    assert resolved.origins["sampler.max_running"] == "settings.toml" and resolved.settings.sampler.max_running == best.slots_per_sampler


def test_an_overlay_with_a_wrong_key_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("[pool]\nmax_stalness = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"settings\.toml: unknown key 'pool\.max_stalness'.*pool\.max_staleness"):
        load_settings("door", plan=("settings.toml", load_overlay(tmp_path / "settings.toml")))
    (tmp_path / "flat.toml").write_text("num_samplers = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="not in a section"):
        load_overlay(tmp_path / "flat.toml")
    with pytest.raises(ConfigError, match="--rank cannot choose"):
        load_overlay(tmp_path / "settings.toml", rank=2)
