"""Whatever is killed, stopped or interrupted, at whatever moment: the run goes on with a successor, or ends with the right code and the
right name; nothing of it stays, and what it had saved is whole (I13, cases 6 and 7). Random moments under a fixed seed; how many is set by
HEADRACE_CHAOS.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from end_to_end.conftest import LETTERS, FinishedRun
from end_to_end.test_runs import left_behind
from headrace.config_loading import load_settings
from headrace.errors import WaitTimeoutError, WorkerLostError
from headrace.event_log import read_events
from headrace.runtime import processes
from headrace.runtime.local import run_local

ROUNDS = int(os.environ.get("HEADRACE_CHAOS", "30"))
GONE_SECONDS = 5.0
USER_CODE = "user code"
ENDLESS = ("run.num_updates=100000", "pool.no_signal=train", "checkpoint.every_updates=3", "evaluation.every_updates=5")

# plain `def` rewards run in user processes, which are hit too
TASK = (LETTERS / "task.py").read_text() + "\n\ndef reward(task, answer):\n    return 0.1 * answer.count('b')\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/task.py").write_text(TASK)
    text = (LETTERS / "recipe.toml").read_text().replace("[task]\n", '[task]\nreward = "task:reward"\n')
    (tmp_path / "recipe/recipe.toml").write_text(text)
    return tmp_path / "recipe"


class Roles:
    """The role processes as they are started: name -> pid, and an event at each start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pids: dict[str, int] = {}
        start = processes.RoleProcess._start

        async def noted(role: processes.RoleProcess) -> None:
            await start(role)
            assert role.pid is not None
            self.pids[role.name] = role.pid

        monkeypatch.setattr(processes.RoleProcess, "_start", noted)


def check_what_is_left(directory: Path) -> None:
    """Events read back to the last line; every checkpoint that has its name is whole."""
    if not directory.exists():
        return  # it never started
    raw = (directory / "events.jsonl").read_bytes()
    events = list(read_events(directory / "events.jsonl"))
    assert raw.endswith(b"\n") and events[0]["event"] == "run_started" and events[-1]["event"] == "run_finished"
    assert all(event["ledger"]["closes"] for event in events if event["event"] == "ledger")
    saved = sorted(path for path in (directory / "checkpoints").iterdir() if path.name.startswith("update_"))
    told = [event["path"] for event in events if event["event"] == "checkpoint_saved"]
    assert not told or str(saved[-1]) >= told[-1], "the last checkpoint that the log names is there, or a newer one"
    for checkpoint in saved:
        load_whole(checkpoint)


def is_under_way(directory: Path) -> bool:
    """Every role is up. Before that a lost one means that the run cannot start."""
    return (directory / "events.jsonl").exists() and (directory / "events.jsonl").stat().st_size > 0


def load_whole(checkpoint: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its thread, in this process, would look like one that the run left behind
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    AutoTokenizer.from_pretrained(checkpoint)
    assert load_file(checkpoint / "optimizer.safetensors")
    json.loads((checkpoint / "learner.json").read_text())


def run_and_hit(recipe: Path, directory: Path, hit: Callable[[threading.Event], None], *overrides: str) -> BaseException | None:
    """Runs the recipe here while a thread does `hit`; what the run raised."""
    over = threading.Event()
    thread = threading.Thread(target=hit, args=(over,))
    thread.start()
    try:
        asyncio.run(run_local(load_settings(recipe, [*ENDLESS, *overrides]), directory))
    except BaseException as error:
        return error
    finally:
        over.set()
        thread.join()
    return None


@pytest.fixture
def settled(model_cache: Path, tmp_path: Path, recipe: Path) -> dict[str, Any]:
    """The forkserver runs and the model is cached; what this process has then."""
    asyncio.run(run_local(load_settings(recipe, ["run.num_updates=1"]), tmp_path / "warm"))
    return left_behind()


@pytest.mark.slow
def test_kill_9_of_samplers_and_evaluator_at_random_moments_costs_no_update(
    settled: dict[str, Any], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One to three kills a run, of what is running just then; user processes among them, which their worker replaces by itself."""
    draw = random.Random(7)
    killed: list[str] = []
    for index in range(ROUNDS):
        roles, directory = Roles(monkeypatch), tmp_path / f"run{index}"
        kills = [(draw.choice(["sampler-0", "sampler-0", "sampler-1", "evaluator", USER_CODE]), draw.uniform(0.0, 2.0)) for _ in range(draw.randint(1, 3))]

        def hit(over: threading.Event, kills: list[tuple[str, float]] = kills, roles: Roles = roles, directory: Path = directory) -> None:
            while not over.wait(0.01) and not is_under_way(directory):
                pass
            for name, delay in kills:
                over.wait(delay)
                if over.is_set():
                    return
                if name == USER_CODE:
                    killed.extend(kill(pid) for pid in user_processes(roles)[:1])
                elif name in roles.pids and psutil.pid_exists(roles.pids[name]):
                    os.kill(roles.pids[name], signal.SIGKILL)
                    killed.append(name)

        error = run_and_hit(
            recipe, directory, hit, "run.num_updates=60", f"run.num_samplers={1 + index % 2}", "run.pin_devices=false", "limits.max_restarts=10"
        )
        assert error is None, (index, kills, error)
        events = list(read_events(directory / "events.jsonl"))
        assert [event["version"] for event in events if event["event"] == "updated"] == list(range(1, 61)), (index, kills)
        assert events[-1]["status"] == "done"
        check_what_is_left(directory)
        check_nothing_runs(settled)
        lost = {event["role"] for event in events if event["event"] == "role_lost"}
        assert lost <= {name for name, _ in kills} and all(event["restarted"] for event in events if event["event"] == "role_lost")
        monkeypatch.undo()
    assert len(killed) > ROUNDS / 2


@pytest.mark.slow
def test_a_sampler_that_is_killed_again_and_again_ends_the_run_with_the_cause(
    settled: dict[str, Any], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = Roles(monkeypatch)

    def hit(over: threading.Event) -> None:
        seen = 0
        while not over.wait(0.05):
            pid = roles.pids.get("sampler-0", 0)
            if pid not in (0, seen) and is_under_way(tmp_path / "run"):
                seen = pid
                os.kill(pid, signal.SIGKILL)

    error = run_and_hit(recipe, tmp_path / "run", hit, "limits.max_restarts=2")
    assert isinstance(error, WorkerLostError) and error.exit_code == 1
    assert str(error).startswith("sampler-0 was lost 3 times within 600 s") and "Process sampler-0 was ended by signal SIGKILL" in str(error)
    losses = [event for event in read_events(tmp_path / "run/events.jsonl") if event["event"] == "role_lost"]
    assert [event["restarted"] for event in losses] == [True, True, False]
    check_nothing_runs(settled)


@pytest.mark.slow
def test_kill_9_of_what_cannot_restart_is_named_and_leaves_nothing(
    settled: dict[str, Any], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(9)
    hits: list[str] = []
    for index in range(ROUNDS):
        roles, directory = Roles(monkeypatch), tmp_path / f"run{index}"
        name, delay = draw.choice(["learner-0", "sampler-0", "evaluator", "preparation", USER_CODE]), draw.uniform(0.0, 3.0)

        def hit(over: threading.Event, name: str = name, delay: float = delay, roles: Roles = roles) -> None:
            """A lost user process is no end of the run: it is replaced. So a sampler goes after it."""
            victim = "sampler-0" if name == USER_CODE else name
            while victim not in roles.pids and not over.wait(0.002):
                pass
            over.wait(0.0 if name == "preparation" else delay)
            if name == USER_CODE:
                hits.extend(kill(pid) for pid in user_processes(roles))
                over.wait(2.0)
            kill(roles.pids[victim])
            hits.append(name)

        error = run_and_hit(recipe, directory, hit, "limits.max_restarts=0")
        assert isinstance(error, WorkerLostError), (index, name, delay, error)
        assert f"Process {'sampler-0' if name == USER_CODE else name} was ended by signal SIGKILL" in str(error)
        assert error.exit_code == 1
        check_nothing_runs(settled)
        check_what_is_left(directory)
        monkeypatch.undo()
    assert len(set(hits)) >= min(4, ROUNDS), "every kind of process was hit"


def check_nothing_runs(settled: dict[str, Any]) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while left_behind() != settled and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_behind() == settled


def named_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}  # those are other programs': none of ours has a name


def kill(pid: int) -> str:
    os.kill(pid, signal.SIGKILL)
    return USER_CODE


def user_processes(roles: Roles) -> list[int]:
    """They lead process groups of their own."""
    return [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in roles.pids.values() and os.getpgid(child.pid) == child.pid]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sampler-0", "evaluator"])
def test_a_stopped_role_is_named_after_its_limit(settled: dict[str, Any], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Case 6 on real processes: SIGSTOP is what a machine that hangs looks like."""
    roles, events = Roles(monkeypatch), tmp_path / "run/events.jsonl"

    def hit(over: threading.Event) -> None:
        while not over.wait(0.02) and '"updated"' not in (events.read_text() if events.exists() else ""):
            pass
        os.kill(roles.pids[name], signal.SIGSTOP)

    limits = ["limits.report_seconds=3", "limits.stop_seconds=1", "limits.max_restarts=0"]
    error = run_and_hit(recipe, tmp_path / "run", hit, *limits, "evaluation.every_updates=2")
    assert isinstance(error, WaitTimeoutError if name == "sampler-0" else WorkerLostError)
    assert str(error).startswith(f"conductor waits for a sign of life from {name}: no answer in 3 s.") and "limits.report_seconds" in str(error)
    assert left_behind() == settled
    check_what_is_left(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sampler-0", "evaluator"])
def test_a_role_that_hangs_is_replaced_after_its_limit(
    settled: dict[str, Any], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    roles, events = Roles(monkeypatch), tmp_path / "run/events.jsonl"

    def hit(over: threading.Event) -> None:
        while not over.wait(0.02) and '"updated"' not in (events.read_text() if events.exists() else ""):
            pass
        os.kill(roles.pids[name], signal.SIGSTOP)

    error = run_and_hit(recipe, tmp_path / "run", hit, "limits.report_seconds=3", "run.num_updates=30", "evaluation.every_updates=2")
    assert error is None
    told = list(read_events(events))
    (lost,) = [event for event in told if event["event"] == "role_lost"]
    assert lost["role"] == name and f"conductor waits for a sign of life from {name}: no answer in 3 s." in lost["error"]
    assert [event["version"] for event in told if event["event"] == "updated"] == list(range(1, 31))
    check_nothing_runs(settled)
    check_what_is_left(tmp_path / "run")


@pytest.mark.slow
def test_ctrl_c_at_any_moment_ends_with_130_and_leaves_nothing(model_cache: Path, tmp_path: Path, recipe: Path, settled: dict[str, Any]) -> None:
    """From the first moment of the command on, also while Python starts and the forkserver loads torch; sometimes up to four times."""
    draw = random.Random(130)
    for index in range(ROUNDS):
        directory = tmp_path / f"run{index}"
        command = [sys.executable, "-m", "headrace.cli", "run", str(recipe), "--json", "--run-dir", str(directory), *ENDLESS]
        temporary = tmp_path / f"temporary{index}"
        temporary.mkdir()
        shared = named_memory()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, "TMPDIR": str(temporary)}
        )
        try:
            time.sleep(0.3 + draw.random() ** 2 * 14.0)
            family = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGINT)
            again = draw.choice([0, 0, 0, 1, 1, 2, 3])
            for _ in range(again):
                time.sleep(draw.uniform(0.0, 0.5))
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)
            started = time.monotonic()
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        seconds = time.monotonic() - started
        assert process.returncode == 130, (index, process.returncode, err)
        assert "Traceback" not in err, (index, err)
        assert json.loads(out)["status"] == "interrupted"
        assert seconds < 15, (index, seconds)
        _, alive = psutil.wait_procs(family, timeout=GONE_SECONDS)
        assert not alive, (index, again, alive)
        assert named_memory() <= shared, index
        assert not [name for name in os.listdir(temporary) if name.startswith(("headrace", "pymp"))], index  # torch keeps a cache there
        if not again:
            check_what_is_left(directory)


def test_chaos_helpers_see_what_is_torn(run_letters: Callable[..., FinishedRun]) -> None:
    """The checks above can fail."""
    run = run_letters("run.num_updates=1")
    check_what_is_left(run.directory)
    weights = next(iter(run.directory.glob("checkpoints/*/model.safetensors")))
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(Exception, match=r"[Hh]eader|incomplete|size|MetadataIncompleteBuffer"):
        check_what_is_left(run.directory)
