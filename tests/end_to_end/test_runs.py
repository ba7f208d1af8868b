"""The main job on real processes: asynchronous, synchronous split and colocated; what is left on disk, and that nothing else is."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from end_to_end.conftest import LETTERS, FinishedRun
from headrace.config_loading import load_settings
from headrace.errors import HeadraceError, WorkerLostError
from headrace.event_log import read_events
from headrace.runtime.local import evaluate_local, run_local

RunLetters = Callable[..., FinishedRun]


def role_processes() -> list[psutil.Process]:
    """Descendants that are not the forkserver or multiprocessing's resource tracker, which live as long as this process."""
    return [child for child in psutil.Process().children(recursive=True) if not _is_server(child)]


def _is_server(process: psutil.Process) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
    return process.parent() == psutil.Process() and ("forkserver" in line or "resource_tracker" in line)


def left_behind() -> dict[str, Any]:
    shared = Path("/dev/shm")
    return {
        "processes": [process.pid for process in role_processes()],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "shared memory": sorted(name for name in os.listdir(shared) if not name.startswith("sem.")) if shared.is_dir() else [],
        "sockets": len(psutil.Process().net_connections(kind="unix")),
        "descriptors": psutil.Process().num_fds(),
    }


def test_an_asynchronous_run_trains_and_leaves_a_model_that_transformers_loads(run_letters: RunLetters) -> None:
    run = run_letters("run.num_updates=5", "evaluation.every_updates=2", "checkpoint.every_updates=2")
    assert [event["version"] for event in run.named("weights_published")] == list(range(6))
    assert all(event["ledger"]["closes"] for event in run.named("ledger"))
    assert run.named("run_finished")[0]["status"] == "done"
    assert run.summary["evaluation"]["after"]["version"] == 5
    assert len(run.named("evaluated")) >= 3
    kept = {"update_000004", "update_000005", run.named("checkpoint_saved")[-1]["best"]}  # keep = 2, and the best: others have gone
    assert {path.name for path in (run.directory / "checkpoints").iterdir()} == kept
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert run.outcome.checkpoint is not None
    model = AutoModelForCausalLM.from_pretrained(run.outcome.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(run.outcome.checkpoint)
    assert tokenizer.decode(tokenizer.encode("abc?a")) == "abc?a"
    assert max(tokenizer.encode("abcd?")) < model.config.vocab_size


@pytest.mark.parametrize(
    "placement",
    [
        ["run.mode=sync", "run.placement=split"],
        ["run.mode=sync", "run.placement=colocated", "run.num_samplers=2", "run.num_learner_ranks=2"],
        ["run.mode=async", "pool.max_staleness=0"],
        ["run.mode=sync", "rollout.temperature=0.6"],
        ["run.mode=sync", "rollout.temperature=1.7"],
    ],
    ids=["split", "colocated", "async at bound 0", "cold", "hot"],
)
def test_on_policy_batches_have_ratio_one_in_the_real_system(run_letters: RunLetters, placement: list[str]) -> None:
    """I3, I4 and case 12, end to end: what the sampler saw and drew is what the learner computes, to 1e-4 in the log-probability,
    the temperature on both sides."""
    run = run_letters("run.num_updates=3", "learner.learning_rate=1e-3", *placement)
    statistics = [event["statistics"] for event in run.named("updated")]
    assert len(statistics) == 3
    for one in statistics:
        assert one["staleness_max"] == 0
        assert abs(one["ratio_max"] - 1) < 2e-4
        assert abs(one["kl_sampler_learner"]) < 1e-4
        assert one["gradient_norm"] > 0


def test_stale_tokens_have_ratios_other_than_one(run_letters: RunLetters) -> None:
    """The test above could not fail if ratios were always 1."""
    run = run_letters("run.num_updates=8", "learner.learning_rate=3e-3", "pool.max_staleness=6")
    statistics = [event["statistics"] for event in run.named("updated")]
    assert max(one["staleness_max"] for one in statistics) > 0
    assert max(one["ratio_variance"] for one in statistics) > 1e-6


def test_sampled_tokens_carry_the_versions_of_in_flight_updates(run_letters: RunLetters) -> None:
    run = run_letters("run.num_updates=8", "task.options.wait_seconds=0.03", "pool.max_staleness=8")
    spread = [event["versions"][1] - event["versions"][0] for event in run.named("rollout_finished") if event["versions"]]
    assert max(spread) >= 1, "no trajectory lived through an update"
    applied = [event["version"] for event in run.named("weights_applied")]
    assert applied == sorted(applied)


def test_nothing_is_left_after_a_run_that_ends_well(run_letters: RunLetters) -> None:
    """I13."""
    run_letters("run.num_updates=1", name="warm")
    before = left_behind()
    run_letters("run.num_updates=2")
    assert left_behind() == before


def test_nothing_is_left_after_a_run_that_is_cancelled(model_cache: Path, tmp_path: Path, run_letters: RunLetters) -> None:
    run_letters("run.num_updates=1", name="warm")
    before = left_behind()
    settings = load_settings(LETTERS, ["run.num_updates=1000", "checkpoint.every_updates=2"])

    async def cut_after_updates() -> None:
        seen = asyncio.Event()
        count = 0

        def on_event(event: dict[str, Any]) -> None:
            nonlocal count
            count += event["event"] == "updated"
            if count == 5:
                seen.set()

        async with asyncio.TaskGroup() as group:
            task = group.create_task(run_local(settings, tmp_path / "cut", subscribers=[on_event], evaluate=False))
            await seen.wait()
            task.cancel()

    asyncio.run(cut_after_updates())
    assert left_behind() == before
    last = list(read_events(tmp_path / "cut" / "events.jsonl"))[-1]
    assert (last["event"], last["status"]) == ("run_finished", "interrupted")
    assert last["version"] >= 5
    checkpoints = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    assert checkpoints
    from transformers import AutoModelForCausalLM

    for checkpoint in checkpoints:
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_a_killed_sampler_is_replaced_and_the_run_makes_all_its_updates(run_letters: RunLetters) -> None:
    run_letters("run.num_updates=1", name="warm")
    before = left_behind()

    def kill_sampler(event: dict[str, Any]) -> None:
        if event["event"] == "updated" and event["version"] == 2:
            next(process for process in multiprocessing.active_children() if process.name == "sampler-0").kill()

    run = run_letters("run.num_updates=8", "pool.max_staleness=1", subscribers=[kill_sampler])
    assert run.named("updated")[-1]["version"] == 8
    (lost,), (restarted,) = run.named("role_lost"), run.named("role_restarted")
    assert (lost["role"], lost["restarted"]) == ("sampler-0", True) and "SIGKILL" in lost["error"]
    again = [event for event in run.named("rollout_failed") if event["reason"] == "worker_lost"]
    assert len(again) == lost["rollouts"] > 0 and all(event["retried"] for event in again)
    ledger = run.named("ledger")[-1]["ledger"]
    assert ledger["closes"] and ledger["trajectories"]["failed"]["worker_lost"] == lost["rollouts"]
    joined = next(event for event in run.named("weights_applied") if event["time"] >= restarted["time"])
    assert joined["version"] >= 2, "it took up the newest weights before it sampled anything"
    assert left_behind() == before


def test_a_killed_role_that_may_not_restart_ends_the_run_with_its_name_and_nothing_left(model_cache: Path, tmp_path: Path, run_letters: RunLetters) -> None:
    run_letters("run.num_updates=1", name="warm")
    before = left_behind()
    settings = load_settings(LETTERS, ["run.num_updates=1000", "checkpoint.every_updates=1", "limits.max_restarts=0"])

    def kill_one(event: dict[str, Any]) -> None:
        if event["event"] == "updated" and event["version"] == 2:
            max(role_processes(), key=lambda process: process.create_time()).kill()

    with pytest.raises(WorkerLostError, match=r"Process (sampler|learner)-0 was ended by signal SIGKILL") as killed:
        asyncio.run(run_local(settings, tmp_path / "killed", subscribers=[kill_one], evaluate=False))
    assert re.search(rf"Go on from update_0000\d\d: headrace resume {tmp_path / 'killed'}\.", str(killed.value)), "the newest that was saved by then"
    assert left_behind() == before


def test_a_checkpoint_evaluates_to_what_the_run_said(run_letters: RunLetters, model_cache: Path) -> None:
    run = run_letters("run.num_updates=3")
    assert run.outcome.checkpoint is not None
    again = asyncio.run(evaluate_local(load_settings(run.directory / "config.toml"), run.outcome.checkpoint))
    assert again.metrics["logprob_of_a"] == pytest.approx(run.summary["evaluation"]["after"]["metrics"]["logprob_of_a"], abs=1e-4)


def test_two_runs_do_not_share_a_directory(run_letters: RunLetters) -> None:
    run = run_letters("run.num_updates=1")
    text = (run.directory / "events.jsonl").read_text()
    with pytest.raises(HeadraceError, match="not empty"):
        run_letters("run.num_updates=1")
    assert (run.directory / "events.jsonl").read_text() == text
