"""A child that runs the user's code ends with its parent, however the connection ends."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import struct
from pathlib import Path

import pytest

from headrace.recipe import RecipeCode
from headrace.rollout.user_process import serve


@pytest.mark.parametrize(
    "last_words",
    [b"", struct.pack("<Q", 1000)[:3], struct.pack("<Q", 1000) + b"only the beginning", struct.pack("<Q", 4) + b"junk"],
    ids=["closed", "cut in the length", "cut in the message", "no message"],
)
def test_a_child_ends_when_its_parent_was_killed_in_the_middle_of_a_message(tmp_path: Path, last_words: bytes) -> None:
    (tmp_path / "task.py").write_text("")
    ours, theirs = socket.socketpair()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, RecipeCode(tmp_path / "task.py", {}), None, None))
    child.start()
    theirs.close()
    try:
        ours.sendall(last_words)
        ours.close()
        child.join(30)
        assert child.exitcode == -signal.SIGKILL
    finally:
        child.kill()
        child.join()
