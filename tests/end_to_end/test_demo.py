"""Case 18, the first run on a laptop: what `make demo` runs, in small form, in an empty directory and with an empty cache."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "run.num_updates=3", "warm_start.num_updates=3", "warm_start.batch_size=8", "pool.groups_per_batch=4", "pool.no_signal=train", "evaluation.num_tasks=16",
    "task.options.tool_seconds=0.002",
)  # fmt: skip


def demo_command(environment: Path, settings: str) -> list[str]:
    """What `make demo` would start where everything is installed in `environment`; the program itself is that of this test."""
    environment.mkdir()
    (environment / ".installed").touch()
    words = ["make", "--no-print-directory", "-n", "demo", f"VENV={environment}", f"DEMO={settings}"]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    program, *rest = shlex.split(printed)
    assert program == f"{environment}/bin/headrace", printed
    return [sys.executable, "-m", "headrace.cli", *rest]


@pytest.mark.slow
def test_make_demo_trains_the_shipped_recipe_and_ends_with_a_picture_and_where_everything_lies(tmp_path: Path) -> None:
    place = tmp_path / "home"
    place.mkdir()
    environment = {**os.environ, "HEADRACE_CACHE": str(tmp_path / "cache"), "HOME": str(place)}
    command = demo_command(tmp_path / "environment", " ".join(SMALL))
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = (place / "runs").iterdir()
    assert run.name.startswith("door-")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["version"] for event in events if event["event"] == "updated"] == [1, 2, 3]
    (checkpoint,) = [event["path"] for event in events if event["event"] == "checkpoint_saved"]
    assert (Path(checkpoint) / "config.json").is_file()
    for shown in ("update 3/3", "●  evaluation", "sampler-0", "learner-0", checkpoint, f"headrace report {run}"):
        assert shown in done.stdout, shown
    assert "Traceback" not in done.stdout + done.stderr
