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

HEADER = struct.Struct("<QQ")


@pytest.mark.parametrize(
    "last_words",
    [b"", HEADER.pack(1000, 1)[:3], HEADER.pack(1000, 1) + b"only the beginning", HEADER.pack(4, 1) + b"junk"],
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
