"""Real processes: the conductor is killed in the middle, and `headrace resume` ends the run (I12)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from end_to_end.conftest import LETTERS
from headrace.event_log import read_events

SETTINGS = ("pool.no_signal=train", "checkpoint.every_updates=4", "run.num_updates=400")


def headrace(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace.cli", *arguments]


def wait_for_checkpoint(events: Path, process: subprocess.Popen[bytes], number: int) -> None:
    deadline = time.monotonic() + 120
    while not (events.exists() and events.read_text().count('"checkpoint_saved"') >= number):
        assert process.poll() is None and time.monotonic() < deadline, "the run ended or hangs"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_whose_conductor_is_killed_is_resumed_to_its_end(model_cache: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = subprocess.Popen(
        headrace("run", str(LETTERS), "--run-dir", str(directory), *SETTINGS), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for_checkpoint(directory / "events.jsonl", process, 3)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    reached = max(line["version"] for line in read_events(directory / "events.jsonl") if line["event"] == "updated")
    assert reached < 400
    ended = subprocess.run(headrace("resume", str(directory), "--json", f"run.num_updates={reached + 4}"), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["command"], result["status"], result["num_updates"], result["lineage"]) == ("resume", "done", reached + 4, 1)
    assert result["ledger"]["closes"] and result["ledger"]["lineage"] == 1
    lines = list(read_events(directory / "events.jsonl"))
    resumed = next(line for line in lines if line["event"] == "run_resumed")
    updates = [line["version"] for line in lines[lines.index(resumed) :] if line["event"] == "updated"]
    assert updates == list(range(resumed["resumed_from_update"] + 1, reached + 5))
    assert resumed["pooled"] + resumed["void"] + resumed["lost"] > 0
    assert Path(result["checkpoint"]).name == f"update_{reached + 4:06d}"
    again = subprocess.run(headrace("resume", str(directory), "--json"), capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "nothing is left to do" in again.stderr
