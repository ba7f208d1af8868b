"""How the command ends: Ctrl-C in any phase, SIGTERM, kill -9 of the conductor (case 7, I13)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from end_to_end.conftest import LETTERS

LIMIT_SECONDS = 120.0
GONE_SECONDS = 30.0
"""That the children of a killed conductor may take here; docs/resume.md says how long they do."""


class Command:
    """`headrace run letters` in a process group of its own, as a shell starts it."""

    def __init__(self, directory: Path, *overrides: str, ignores_ctrl_c: bool = False) -> None:
        command = [sys.executable, "-m", "headrace.cli", "run", str(LETTERS), "--json", "--run-dir", str(directory), "run.num_updates=100000", *overrides]
        self.directory = directory
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=ignore_ctrl_c if ignores_ctrl_c else None
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert self.process.poll() is None, self.process.stderr.read() if self.process.stderr else ""
            assert time.monotonic() < deadline, "the run did not get there"
            time.sleep(0.02)

    def has_event(self, name: str, count: int = 1) -> bool:
        path = self.directory / "events.jsonl"
        return path.exists() and path.read_text().count(f'{{"event":"{name}"') >= count

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not alive


@pytest.mark.parametrize("phase", ["starting", "run_started", "group_reserved", "updated"])
def test_ctrl_c_ends_the_run_cleanly_in_any_phase(model_cache: Path, tmp_path: Path, phase: str) -> None:
    command = Command(tmp_path / "run")
    command.wait_until(lambda: command.has_event(phase) if phase != "starting" else len(command.descendants()) > 2)
    family = command.descendants()
    os.killpg(command.process.pid, signal.SIGINT)  # a terminal sends it to the whole group, children included
    out, err = command.process.communicate(timeout=LIMIT_SECONDS)
    assert command.process.returncode == 130, err
    assert json.loads(out)["status"] == "interrupted"
    assert "Traceback" not in err
    assert gone(family, 10)
    if phase != "starting":
        last = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
        assert (last["event"], last["status"]) == ("run_finished", "interrupted")
        saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
        assert saved == ([f"update_{last['version']:06d}"] if last["version"] else []), "what was learned is saved"


@pytest.mark.parametrize("ignores_ctrl_c", [False, True], ids=["from a terminal", "in the background of a script"])
def test_sigterm_ends_the_run_like_ctrl_c(model_cache: Path, tmp_path: Path, ignores_ctrl_c: bool) -> None:
    command = Command(tmp_path / "run", ignores_ctrl_c=ignores_ctrl_c)
    command.wait_until(lambda: command.has_event("updated"))
    family = command.descendants()
    command.process.terminate()
    out, err = command.process.communicate(timeout=LIMIT_SECONDS)
    assert command.process.returncode == 130, err
    assert json.loads(out)["status"] == "interrupted"
    assert gone(family, 10)


def test_what_still_loads_when_the_conductor_is_killed_ends_by_itself(model_cache: Path, tmp_path: Path) -> None:
    """The forkserver listens to nobody while it loads torch."""

    def loads() -> bool:
        return any("multiprocessing.forkserver" in " ".join(child.cmdline()) for child in command.descendants())

    command = Command(tmp_path / "run")
    command.wait_until(loads)
    time.sleep(0.3)  # it has begun
    family = command.descendants()
    command.process.kill()
    command.process.communicate()
    assert gone(family, GONE_SECONDS)


@pytest.mark.parametrize("phase", ["group_reserved", "selection_taken", "updated"], ids=["at its start", "during an update", "while it samples"])
def test_children_end_by_themselves_whenever_the_conductor_is_killed(model_cache: Path, tmp_path: Path, phase: str) -> None:
    command = Command(tmp_path / "run", "checkpoint.every_seconds=0")
    command.wait_until(lambda: command.has_event(phase))
    family = command.descendants()
    assert len(family) >= 4
    command.process.kill()
    command.process.communicate()
    assert gone(family, GONE_SECONDS)


def test_children_end_by_themselves_when_the_conductor_is_killed(model_cache: Path, tmp_path: Path) -> None:
    command = Command(tmp_path / "run", "checkpoint.every_updates=3")
    command.wait_until(lambda: command.has_event("checkpoint_saved", 2))
    family = command.descendants()
    assert len(family) >= 4  # forkserver, sampler, learner, evaluator
    command.process.kill()
    command.process.communicate()
    assert gone(family, GONE_SECONDS)
    from transformers import AutoModelForCausalLM

    whole = sorted(path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith("update_"))
    assert whole
    for checkpoint in whole:
        AutoModelForCausalLM.from_pretrained(checkpoint)
