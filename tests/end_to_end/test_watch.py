"""headrace watch and trajectories on a real run, from before its first event to after its last."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from end_to_end.conftest import LETTERS
from headrace.event_log import read_events

SLOW = "task.options.wait_seconds=0.05"
"""The run must last for some of the workers' activity reports, one a second."""


def headrace(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "headrace.cli", *arguments, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_run_is_watched_from_its_start_to_its_end_and_its_trajectories_are_browsed(model_cache: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    arguments = [sys.executable, "-m", "headrace.cli", "run", str(LETTERS), "--run-dir", str(directory), "run.num_updates=30", SLOW]
    run = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seen: list[dict[str, Any]] = []
    try:
        pause = threading.Event()
        while run.poll() is None:
            if (directory / "config.toml").exists():
                seen.append(headrace("watch", str(directory), "--once"))
            pause.wait(0.2)
        assert run.wait(timeout=60) == 0
    finally:
        run.kill()
        run.wait()
    last = headrace("watch", str(directory))
    states = [each["state"] for each in seen]
    assert states == sorted(states, key=["starting", "running", "done"].index)
    assert "starting" in states
    assert [each["num_updates"] for each in seen] == sorted(each["num_updates"] for each in seen)
    assert (last["state"], last["num_updates"], last["ledger"]["closes"]) == ("done", 30, True)
    assert 0 < last["useful_tokens_per_second"] <= last["tokens_per_second"]
    assert last["saturated_tokens_per_second"] > 0
    for device in last["utilization"]["devices"]:
        unexplained = device["idle_seconds"].get("unreported", 0.0)
        assert unexplained < 0.5 * device["allocated_seconds"], device
    browsed = headrace("trajectories", str(directory), "--limit", "100000")
    assert browsed["recorded"] == browsed["matched"] == len(browsed["trajectories"])
    assert sum(row["trained_tokens"] for row in browsed["trajectories"]) == last["ledger"]["tokens"]["trained"]
    for row in browsed["trajectories"]:
        assert re.fullmatch(r"[abcd]{3}\?([abcd?]|<pad>|<end>|<unk>)+", row["text"]), "decoded by the checkpoint's tokenizer"
    recorded = [event for event in read_events(directory / "events.jsonl") if event["event"] == "trajectories_recorded"]
    assert [(event["trajectories"], event["lost"], event["failure"]) for event in recorded] == [(browsed["recorded"], 0, None)]
