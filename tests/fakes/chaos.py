"""A run in real processes whose sampler, learner or conductor is killed (SIGKILL) again and again, resumed where it ended, and looked at
afterwards: is everything that was rolled out trained once, retired with a reason, or pooled (I12)?"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fakes.chaos_child import PIDS, RECORDS
from headrace.event_log import EventFollower, read_events

TESTS = Path(__file__).parents[1]
LETTERS = TESTS / "end_to_end/letters"
CONDUCTOR = "conductor"
MAX_SECONDS = 120.0
"""For the run to make an update after a kill, to end after its last one."""
SETTINGS = ("pool.no_signal=train", "run.pin_devices=false", "run.num_samplers=2", "limits.max_restarts=1000", "limits.restart_window_seconds=1")


@dataclass(kw_only=True)
class Kill:
    role: str
    phase: str
    outcome: str = ""
    next_update_seconds: float | None = None
    """From the kill to the next update that the run makes; None: the next kill came first."""
    gone_seconds: float | None = None
    """From a conductor's end to that of its last child."""


@dataclass(kw_only=True)
class Story:
    kind: str
    """scripted | real"""
    directory: Path
    seed: int
    overrides: tuple[str, ...] = ()
    kills: list[Kill] = field(default_factory=list)
    num_resumed: int = 0
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.notes = self.directory.with_name(f"{self.directory.name}-notes")
        self.notes.mkdir(parents=True, exist_ok=True)
        self._draw = random.Random(self.seed)
        self._follower = EventFollower(self.directory / "events.jsonl")
        self._under_way = False
        self._first_update = False

    def tell(self, num_kills: int, *, roles: tuple[str, ...], delay_seconds: float, training_fraction: float = 0.0) -> None:
        """Kills until there were so many, each a random while after the one before, or, that fraction of them, after the run makes updates
        again. Then waits for an update."""
        if self._process is None:
            self._start()
        while len(self.kills) < num_kills and not self._is_done():
            if self._draw.random() < training_fraction:
                self._until(lambda: self._under_way and self._first_update)
            self._watch(self._draw.uniform(0.0, delay_seconds))
            if self._is_done():
                break
            self._kill(self._draw.choice(roles))
        if self.kills:
            self._until(lambda: self.kills[-1].next_update_seconds is not None)

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(MAX_SECONDS)

    def reached(self) -> int:
        """The last update, in whatever lineage."""
        return max((line["version"] for line in self.events() if line["event"] == "updated"), default=0)

    def finish(self, *overrides: str) -> None:
        """Goes on to the end, where it has ended before, and waits for that."""
        if self._process is None or self._process.poll() is not None:
            if self._is_done():
                return
            self._start(*overrides)
        assert self._process is not None
        self._process.wait(MAX_SECONDS)
        if self._process.returncode:
            raise AssertionError((self.notes / "stderr").read_text()[-3000:])

    def events(self) -> list[dict[str, Any]]:
        return list(read_events(self.directory / "events.jsonl"))

    def end(self) -> None:
        """Whatever still runs."""
        if self._process is not None and self._process.poll() is None:
            family = psutil.Process(self._process.pid).children(recursive=True)
            for one in (*family, self._process):
                one.kill()
            self._process.wait()

    def _start(self, *overrides: str) -> None:
        events = self.directory / "events.jsonl"
        begun = events.exists() and events.stat().st_size > 0
        if begun:
            self.num_resumed += 1
            command = ["resume", str(self.directory)]
        else:
            subprocess.run(["rm", "-rf", str(self.directory)], check=True)
            command = ["run", str(LETTERS), "--run-dir", str(self.directory), f"run.seed={self.seed}", *SETTINGS, *self.overrides]
        source = str(TESTS.parent / "src")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(TESTS)])}
        with (self.notes / "stderr").open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fakes.chaos_child", self.kind, str(self.notes), *command, *overrides],
                stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, env=environment,
            )  # fmt: skip
        self._under_way = self._first_update = False

    def _is_done(self) -> bool:
        assert self._process is not None
        return self._process.poll() == 0

    def _watch(self, seconds: float) -> None:
        """Follows the log for so long; starts a run again that has ended, which is what became of the last kill."""
        deadline = time.monotonic() + seconds
        while True:
            self._read()
            assert self._process is not None
            if self._process.poll() not in (None, 0):
                kill = self.kills[-1]
                if not kill.outcome.startswith("ended"):
                    kill.outcome = f"ended with exit code {self._process.returncode}, resumed"
                self._start()
            if self._process.poll() == 0 or time.monotonic() >= deadline:
                return
            time.sleep(0.01)

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + MAX_SECONDS
        while not condition() and not self._is_done():
            assert time.monotonic() < deadline, f"no update after {self.kills[-1:]}: {(self.notes / 'stderr').read_text()[-2000:]}"
            self._watch(0.05)

    def _read(self) -> None:
        for line in self._follower.new_events():
            kill = self.kills[-1] if self.kills else None
            match line["event"]:
                case "run_started" | "run_resumed":
                    self._under_way, self._first_update = True, False
                    if line.get("cause") == "learner_lost":
                        self._note("learner-0", "went back to a checkpoint inside the run")
                case "role_lost":
                    self._under_way = self._under_way and line["role"] != "learner"
                case "role_restarted":
                    self._note(line["role"], "replaced inside the run")
                case "updated":
                    self._first_update = True
                    if kill is not None and kill.next_update_seconds is None and self._killed_line < self._lines:
                        kill.next_update_seconds = time.monotonic() - self._killed_at
            self._lines += 1

    def _note(self, role: str, outcome: str) -> None:
        """Of the newest kill of this role, and of those before that it had no time to recover from."""
        for kill in reversed(self.kills):
            if kill.role == role:
                if kill.outcome:
                    return
                kill.outcome = outcome

    _lines = 0
    _killed_line = 0
    _killed_at = 0.0

    def _kill(self, role: str) -> None:
        self._read()
        assert self._process is not None
        if role == CONDUCTOR:
            pid = self._process.pid
        else:
            started = [line.split() for line in (self.notes / PIDS).read_text().splitlines()] if (self.notes / PIDS).exists() else []
            pid = next((int(number) for name, number in reversed(started) if name == role), 0)
            if not pid or not is_child(pid, self._process.pid):
                return  # it has not started yet
        phase = self._phase()
        family = psutil.Process(self._process.pid).children(recursive=True) if role == CONDUCTOR else []
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.kills.append(Kill(role=role, phase=phase))
        self._killed_at, self._killed_line = time.monotonic(), self._lines
        if role == CONDUCTOR:
            self._process.wait()
            while alive := [one for one in family if is_alive(one)]:
                assert time.monotonic() < self._killed_at + 20.0, f"children outlive their conductor, killed {phase}: {[one.cmdline() for one in alive]}"
                time.sleep(0.01)
            self.kills[-1].gone_seconds = time.monotonic() - self._killed_at
            self.kills[-1].outcome = "ended, resumed"
            self._read()  # what it had still written
            self._killed_line, self.kills[-1].next_update_seconds = self._lines, None
            self._start()

    def _phase(self) -> str:
        checkpoints = self.directory / "checkpoints"
        saving = checkpoints.exists() and any(
            path.name.endswith(".partial") or (path.name.startswith("update_") and not (path / "run_state.json").exists())
            for path in list(checkpoints.iterdir())
        )
        if not self._under_way:
            return "starting or going back"
        if saving:
            return "saving"
        return "training" if self._first_update else "before its first update"


def is_alive(process: psutil.Process) -> bool:
    """A zombie is dead: it waits for init to take note of it, which may take seconds."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_child(pid: int, parent: int) -> bool:
    try:
        return any(one.pid == parent for one in psutil.Process(pid).parents())
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True, kw_only=True)
class Fates:
    """What became, in the surviving lineage, of every rollout that was ever reserved."""

    trained: Counter[tuple[int, int]]
    """(group, member) -> how often."""
    versions: list[int]
    """Of the surviving updates."""
    unknown: list[tuple[int, int]]
    """Neither trained nor retired nor in the pool."""


def fates(story: Story) -> Fates:
    """From every record that any life appended. What lies between a checkpoint and the return to it is undone; failures and what a return
    voided stand."""
    chain: list[dict[str, Any]] = []
    for line in map(json.loads, (story.notes / RECORDS).read_text().splitlines()):
        if line["kind"] == "Restored":
            base = max((at for at, one in enumerate(chain) if one["kind"] == "StateTaken" and one["version"] == line["version"]), default=-1)
            chain = [*chain[: base + 1], *(one for one in chain[base + 1 :] if one["kind"] == "Reserved" or one.get("reason") in ("failed", "void"))]
        chain.append(line)
    consumed = [one for one in chain if one["kind"] == "Consumed" and one["version"] is not None]
    trained = Counter((key[0], key[1]) for one in consumed for key in one["keys"])
    retired = {(key[0], key[1]) for one in chain if one["kind"] == "Retired" and one["reason"] != "trained" for key in one["keys"]}
    last = max(story.directory.glob("checkpoints/update_*"))
    state = json.loads((last / "run_state.json").read_text())["pool"]
    there = {
        (group["group_id"], member)
        for group in state["groups"]
        for member in [*(one[0] for one in group["in_flight"]), *(json.loads(text)["key"][1] for kind in ("finished", "verifying") for text in group[kind])]
    }
    sizes = {one["group"]: one["size"] for one in chain if one["kind"] == "Reserved"}
    members = [(group, member) for group in range(state["next_group"]) for member in range(sizes[group])]
    return Fates(
        trained=trained,
        versions=[one["version"][1] for one in consumed],
        unknown=[one for one in members if one not in trained and one not in retired and one not in there],
    )


def check(story: Story) -> dict[str, Any]:
    """Raises AssertionError where something was lost or trained twice. The last ledger."""
    events, found = story.events(), fates(story)
    ledgers = [line["ledger"] for line in events if line["event"] == "ledger"]
    assert ledgers and all(ledger["closes"] for ledger in ledgers), "I7"
    assert not [key for key, count in found.trained.items() if count > 1], "I12: trained twice in the surviving lineage"
    assert not found.unknown, f"I12: {len(found.unknown)} rollouts are nowhere: {found.unknown[:5]}"
    assert found.versions == list(range(1, len(found.versions) + 1)), "the surviving updates are those of an undisturbed run"
    assert ledgers[-1]["trajectories"]["trained"] == len(found.trained), "the ledger knows what was trained"
    assert events[-1]["event"] == "run_finished" and events[-1]["status"] == "done"
    last: dict[str, Any] = ledgers[-1]
    return last
