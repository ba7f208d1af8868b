"""A learner's state in memory that outlives its process: whole or absent, and exactly what a successor needs."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from headrace.errors import CheckpointError
from headrace.learner.state_memory import _HEADER, StateMemory
from headrace.types import PolicyVersion

FIRST, SECOND, THIRD = (PolicyVersion(0, number) for number in (1, 2, 3))


@pytest.fixture
def memory() -> StateMemory:
    return StateMemory()


def test_the_two_newest_states_are_there(memory: StateMemory) -> None:
    for version in (FIRST, SECOND, THIRD):
        memory.write(version, f"state {version.number}".encode() * 1000)
    assert memory.read(THIRD) == b"state 3" * 1000 and memory.read(SECOND) == b"state 2" * 1000
    with pytest.raises(CheckpointError, match="version 1 is not in memory"):
        memory.read(FIRST)


def test_a_state_that_was_gone_on_from_stays_until_the_next_is_whole(memory: StateMemory) -> None:
    memory.write(FIRST, b"first")
    memory.write(SECOND, b"second")
    assert memory.read(FIRST) == b"first"
    memory.write(PolicyVersion(1, 2), b"again")
    assert memory.read(FIRST) == b"first"


def _write_half(memory: StateMemory, ready: Connection) -> None:
    memory.read(FIRST)
    descriptor = memory._descriptors[1 - memory._kept]
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"half of it", _HEADER.size)
    ready.send(True)
    signal.pause()


def test_a_writer_that_is_killed_leaves_the_state_before(memory: StateMemory) -> None:
    memory.write(FIRST, b"first")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_write_half, args=(memory, theirs))
    process.start()
    assert ours.recv()
    process.kill()
    process.join()
    assert memory.read(FIRST) == b"first"
    with pytest.raises(CheckpointError):
        memory.read(SECOND)


def test_without_room_the_error_says_how_much_and_where(memory: StateMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.write(FIRST, b"first")

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"twice 2 MiB in .*No space left.*") as raised:
        memory.write(SECOND, b"x" * 2**21)
    assert "checkpoint.memory_copy = false" in str(raised.value.remedy)
    monkeypatch.undo()
    assert memory.read(FIRST) == b"first"
