"""Roles that are lost while they start, under the virtual clock: started again, or the end of the run with the cause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.runs import run_settings
from headrace import clock
from headrace import events as ev
from headrace.clock import run_virtual
from headrace.config import Settings
from headrace.errors import ModelError, WaitTimeoutError, WorkerLostError
from headrace.runtime import local_roles
from headrace.runtime.local_roles import LocalRole, Starting

KILLED = "was ended by signal SIGKILL"


class Process:
    """Stands for processes.RoleProcess: needs a second to start, and may not get there."""

    def __init__(self, name: str, ending: Exception | str | None) -> None:
        """`ending`: KILLED, an error that it says itself, or None."""
        self.name, self._ending = name, ending
        self.fell_silent = self.stopped = False

    async def hello(self) -> dict[str, Any]:
        await asyncio.sleep(1.0)
        if isinstance(self._ending, Exception):
            raise self._ending
        if self._ending is not None:
            self.fell_silent = True
            raise WorkerLostError(f"Process {self.name} {self._ending} in the middle of the run.")
        return {"name": self.name}

    async def stop(self, limit_seconds: float) -> None:
        self.stopped = True


class Starts:
    """Makes one process after another, each with the next of these endings."""

    def __init__(self, *endings: Exception | str | None) -> None:
        self._endings = list(endings)
        self.made: list[Process] = []
        self.again: list[bool] = []

    def make(self, again: bool, name: str = "sampler-0") -> Any:
        self.again.append(again)
        self.made.append(Process(name, self._endings.pop(0)))
        return self.made[-1]


def settings(**limits: Any) -> Settings:
    return run_settings(num_updates=1, limits={"max_restarts": 3, **limits})


def test_a_role_that_is_killed_while_it_starts_is_started_again_after_a_pause() -> None:
    async def start() -> tuple[Starts, Starting, dict[str, Any], float]:
        starts, starting = Starts(KILLED, KILLED, None), Starting(settings())
        role = LocalRole(starts.make, settings())
        return starts, starting, await starting.role(role), clock.now()

    starts, starting, facts, seconds = run_virtual(start())
    assert facts == {"name": "sampler-0"} and [process.stopped for process in starts.made] == [True, True, False]
    assert seconds == pytest.approx(3 * 1.0 + 0.5 + 1.0), "three starts, and pauses that double"
    assert starts.again == [False] * 3, "it is a first start: a sampler measures its capacity"
    lost, lost_again, restarted = starting.events
    assert isinstance(lost, ev.RoleLost) and KILLED in lost.error and lost.restarted
    assert isinstance(lost_again, ev.RoleLost) and lost_again.losses == 2
    assert isinstance(restarted, ev.RoleRestarted) and restarted.seconds == pytest.approx(3.5)


def test_a_role_whose_start_fails_again_and_again_ends_the_run_with_its_cause() -> None:
    starts = Starts(*[KILLED] * 4)
    rules = settings()
    with pytest.raises(WorkerLostError, match=rf"sampler-0 was lost 4 times .*limits.max_restarts = 3.*{KILLED}"):
        run_virtual(Starting(rules).role(LocalRole(starts.make, rules)))
    assert len(starts.made) == 4


def test_without_restarts_the_first_loss_ends_the_start() -> None:
    rules = settings(max_restarts=0)
    with pytest.raises(WorkerLostError, match=rf"^Process sampler-0 {KILLED}"):
        run_virtual(Starting(rules).role(LocalRole(Starts(KILLED).make, rules)))


@pytest.mark.parametrize("error", [ModelError("no tokenizer"), WorkerLostError("sampler-0: ValueError: a bug"), WaitTimeoutError("too slow")])
def test_a_role_that_says_what_is_wrong_is_not_started_again(error: Exception) -> None:
    starts, rules = Starts(error), settings()
    with pytest.raises(type(error), match=str(error)):
        run_virtual(Starting(rules).role(LocalRole(starts.make, rules)))
    assert len(starts.made) == 1


def test_all_ranks_are_made_anew_when_one_is_lost_while_they_meet() -> None:
    starts, rules = Starts(None, KILLED, None, None), settings()

    def make() -> list[Any]:
        return [starts.make(False, f"learner-{rank}") for rank in range(2)]

    async def start() -> tuple[list[Any], dict[str, Any], Starting]:
        ranks, starting = make(), Starting(rules)
        return ranks, await starting.ranks(ranks, make), starting

    ranks, facts, starting = run_virtual(start())
    assert facts == {"name": "learner-0"} and ranks == starts.made[2:] and all(process.stopped for process in starts.made[:2])
    assert [event.role for event in starting.events if isinstance(event, ev.RoleLost | ev.RoleRestarted)] == ["learner", "learner"]


class Preparations(Starts):
    """Stands for the class RoleProcess: each preparation says how far it is before it ends or says what it made."""

    def __call__(self, name: str, *rest: Any, **options: Any) -> Any:
        process = self.make(False, name)
        messages: list[Any] = [("warm start", 0.5), {"directory": Path("model"), "parameter_bytes": 8, "adapters": None}]

        async def receive() -> Any:
            return messages.pop(0)

        process.receive = receive
        return process


def test_a_preparation_that_is_killed_is_begun_again_up_to_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    said: list[str] = []

    def prepare(*endings: Exception | str | None, **limits: Any) -> tuple[Preparations, Callable[[], local_roles.Prepared]]:
        starts = Preparations(*endings)
        monkeypatch.setattr(local_roles, "RoleProcess", starts)
        return starts, lambda: run_virtual(local_roles.prepare(settings(**limits), object(), lambda what, fraction: said.append(what)))  # type: ignore[arg-type]

    starts, go = prepare(KILLED, KILLED, None)
    assert go().parameter_bytes == 8 and len(starts.made) == 3 and all(process.stopped for process in starts.made)
    assert sum(KILLED in text for text in said) == 2 and "warm start" in said
    starts, go = prepare(KILLED, KILLED, max_restarts=1)
    with pytest.raises(WorkerLostError, match=KILLED):
        go()
    starts, go = prepare(ModelError("no tokenizer"))
    with pytest.raises(ModelError):
        go()
    assert len(starts.made) == 1


@pytest.mark.parametrize("placement", ["split", "colocated"])
def test_a_recording_failure_that_a_sampler_tells_is_with_its_device_in_the_log(placement: str) -> None:
    settings = run_settings(num_samplers=2, run={"placement": placement, "num_learner_ranks": 2 if placement == "colocated" else 1})
    told = {"capacity": 8, "saturated_tokens_per_second": 100.0, "end_tokens": (0,)}
    facts = {"sampler-0": {**told, "recording_failure": None}, "sampler-1": {**told, "recording_failure": "its forward depends on a tensor's value"}}
    devices = local_roles._devices(settings, facts)
    assert ["recording_failure" in device for device in devices] == [False, True, False][: len(devices)]
    assert devices[1]["recording_failure"] == "its forward depends on a tensor's value"
