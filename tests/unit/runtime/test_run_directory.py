"""Who holds a run directory."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from fakes.runs import run_settings
from headrace.errors import ConfigError
from headrace.runtime.run_directory import EVENTS, RunDirectory, is_held


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    directory = RunDirectory(tmp_path / "run", run_settings())
    (directory.path / EVENTS).write_text("")
    directory.close()
    return directory.path


def test_a_run_that_goes_on_holds_its_directory_and_one_that_ended_does_not(ended: Path) -> None:
    assert is_held(ended) is False
    held = RunDirectory(ended, run_settings(), used=True)
    assert is_held(ended) is True
    with pytest.raises(ConfigError, match="is going on: another process"):
        RunDirectory(ended, run_settings(), used=True)
    held.close()
    assert is_held(ended) is False


def test_somebody_who_only_looks_keeps_no_run_from_its_directory(ended: Path) -> None:
    descriptor = os.open(ended, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    def look() -> None:
        time.sleep(0.05)
        os.close(descriptor)

    looking = threading.Thread(target=look)
    looking.start()
    RunDirectory(ended, run_settings(), used=True).close()
    looking.join()
