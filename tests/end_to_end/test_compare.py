"""`headrace compare` on real processes: both arms of a tiny recipe, cut by Ctrl-C and gone on with; `run --log tensorboard`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from end_to_end.conftest import LETTERS
from headrace.event_log import read_events

LIMIT_SECONDS = 240.0
SMALL = ["run.num_updates=3", "evaluation.num_tasks=4", "--seeds", "1"]


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headrace.cli", "compare", str(LETTERS), *SMALL, "--json", "--run-dir", str(directory), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    out, err = process.communicate(timeout=LIMIT_SECONDS)
    return process.returncode, json.loads(out), err


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def evaluations(directory: Path, name: str) -> list[int]:
    path = directory / "runs" / name / "events.jsonl"
    return [line["version"] for line in read_events(path) if line["event"] == "evaluated"] if path.is_file() else []


@pytest.mark.slow
def test_a_comparison_that_is_cut_goes_on_to_one_result(model_cache: Path, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    process = start(directory)
    wait_until(process, lambda: 1 in evaluations(directory, "sync-0"))
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    code, result, err = finish(process)
    assert code == 130, err
    assert result["status"] == "interrupted"
    assert f"--run-dir {directory}" in err, "how to go on"
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive

    first_events = (directory / "runs" / "sync-0" / "events.jsonl").read_text().splitlines()
    code, result, err = finish(start(directory))
    assert code == 0, err
    assert (directory / "runs" / "sync-0" / "events.jsonl").read_text().splitlines()[: len(first_events)] == first_events, "the run was not made again"
    assert evaluations(directory, "sync-0") == [0, 1, 2, 3]
    assert [arm["name"] for arm in result["arms"]] == ["sync", "async"]
    for arm in result["arms"]:
        (run,) = arm["runs"]
        assert [point["version"] for point in run["curve"]] == [0, 1, 2, 3]
        assert run["wall_seconds"] > 0 and 0 < run["occupancy"] <= 1 and run["useful_tokens_per_second"] > 0
    # the same weights, tasks and random streams: what both arms start from is evaluated to the same value
    assert result["arms"][0]["runs"][0]["curve"][0]["mean"] == result["arms"][1]["runs"][0]["curve"][0]["mean"]
    assert "one seed has no interval" in result["verdict"]
    assert result["comparisons"][0]["resolved"] is False
    assert Path(result["report"]).stat().st_size > 10_000
    assert json.loads((directory / "result.json").read_text())["verdict"] == result["verdict"]


@pytest.mark.slow
def test_what_compare_evaluates_is_what_the_run_itself_would_have(model_cache: Path, run_letters: Any, tmp_path: Path) -> None:
    """A checkpoint loaded from disk afterwards, and the weights pinned during the run, give one number."""
    import asyncio

    from headrace.config_loading import load_settings
    from headrace.runtime.local_evaluation import evaluate_checkpoints

    overrides = [
        "run.num_updates=2",
        "run.mode=sync",
        "run.placement=split",
        "evaluation.every_updates=1",
        "checkpoint.every_updates=1",
        "evaluation.num_tasks=8",
    ]
    run = run_letters(*overrides)
    inside = {event["version"]: event["mean"] for event in run.named("evaluated")}
    places = [(version, run.directory / "checkpoints" / f"update_{version:06d}") for version in (1, 2)]
    after = asyncio.run(evaluate_checkpoints(load_settings(LETTERS, overrides), places))
    assert {event.version: pytest.approx(event.mean, abs=1e-5) for event in after} == {version: inside[version] for version in (1, 2)}


@pytest.mark.slow
def test_a_run_logs_to_tensorboard_only_when_asked(model_cache: Path, tmp_path: Path) -> None:
    base = [sys.executable, "-m", "headrace.cli", "run", str(LETTERS), "run.num_updates=2", "evaluation.num_tasks=4", "--run-dir"]
    subprocess.run([*base, str(tmp_path / "plain")], check=True, capture_output=True, timeout=LIMIT_SECONDS)
    subprocess.run([*base, str(tmp_path / "logged"), "--log", "tensorboard"], check=True, capture_output=True, timeout=LIMIT_SECONDS)
    assert not (tmp_path / "plain" / "tensorboard").exists()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "logged" / "tensorboard"))
    found.Reload()
    rewards = [line["reward_mean"] for line in read_events(tmp_path / "logged" / "events.jsonl") if line["event"] == "updated"]
    assert [one.value for one in found.Scalars("train/reward")] == pytest.approx(rewards)
