"""The directory of one run: new or empty at first, held by its run while that lives, taken back when the run never starts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from pathlib import Path

from headrace.config import Settings
from headrace.config_loading import dump_toml
from headrace.errors import ConfigError, Problem, RunDirectoryError

EVENTS = "events.jsonl"
_OPTION = "--run-dir"
_LOOK_SECONDS = 0.2
"""A lock that is held for longer is held by a run."""


class RunDirectory:
    """Made and held until `close`. The lock goes with the process, however that ends, so a killed run leaves none behind."""

    def __init__(self, path: Path, settings: Settings, *, used: bool = False) -> None:
        """`used`: the directory is that of a run that is over, which goes on.

        Raises ConfigError, having changed nothing, when another run is writing there, when the directory is used (or is not) although it
        should not (should) be, or when it cannot be written.
        """
        self.path = path
        self._settings = settings
        self._descriptor: int | None = None
        self.events = path / EVENTS
        self.checkpoints = path / "checkpoints"
        self._made = [each for each in (path, *path.parents) if not each.exists()]
        if used:
            self._descriptor = self._hold_used()
            return
        refuse_used(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._take(settings)
        except OSError as error:
            self.discard()
            raise self._unwritable(error) from error
        except ConfigError:
            self.close()
            raise

    def update_settings(self) -> None:
        """config.toml is what holds from now on. Raises RunDirectoryError."""
        aside = self.path / ".config.toml.part"
        try:
            aside.write_text(dump_toml(self._settings), encoding="utf-8")
            aside.replace(self.path / "config.toml")
        except OSError as error:
            remedy = "Free disk space or mend the rights; what was saved before is whole."
            raise RunDirectoryError(f"{self.path / 'config.toml'} cannot be written: {error.strerror}.", remedy=remedy) from error

    def _hold_used(self) -> int:
        if not self.events.is_file():
            problem = Problem(key="RUN", value=str(self.path), limit="a run directory", message=f"'{self.path}' holds no run: there is no {EVENTS}.")
            raise ConfigError([problem])
        try:
            if not os.access(self.path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            message = f"run directory '{self.path}' cannot be written: {error.strerror}."
            raise ConfigError([Problem(key="RUN", value=str(self.path), limit="a directory that you may write to", message=message)]) from error
        try:
            _lock_for_long(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            message = f"run '{self.path}' is going on: another process is writing there."
            remedy = "Wait until it ends, or end it; 'headrace watch' shows what it does."
            raise ConfigError([Problem(key="RUN", value=str(self.path), limit="a run that is over", message=message, remedy=remedy)]) from None
        return descriptor

    def close(self) -> None:
        """Gives the lock back; the directory stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def discard(self) -> None:
        """The run never started: removes what was made, parent directories included, and gives the lock back."""
        for file in (self.events, self.path / "config.toml"):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        for directory in self._made:
            with contextlib.suppress(OSError):  # somebody else has put something there
                directory.rmdir()
        self.close()

    def _take(self, settings: Settings) -> None:
        assert self._descriptor is not None
        try:
            _lock_for_long(self._descriptor)
            self.checkpoints.mkdir()  # only one of two can make it, also where the file system knows no locks
        except (BlockingIOError, FileExistsError):
            raise _refused(self.path, "is in use: another run is writing there") from None
        (self.path / "config.toml").write_text(dump_toml(settings), encoding="utf-8")

    def _unwritable(self, error: OSError) -> ConfigError:
        return _refused(self.path, f"cannot be written: {error.strerror}", limit="a directory with room that you may write to")


def refuse_used(path: Path, shown: str | None = None) -> None:
    """Raises ConfigError for a file, or for a directory that is not empty, saying what lies there."""
    try:
        if not path.exists() and not path.is_symlink():
            above = next(parent for parent in path.parents if parent.exists())
            if not above.is_dir():
                raise _refused(path, f"cannot be made: '{above}' is not a directory", shown)
            return
        if not path.is_dir():
            raise _refused(path, "is not a directory", shown)
        if any(path.iterdir()):
            raise _refused(path, f"is not empty: {_what_lies_in(path)}", shown)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}", shown) from error


def _what_lies_in(path: Path) -> str:
    """For people."""
    if is_held(path):
        return "a run is writing there now"
    if not (path / EVENTS).is_file():
        return "it holds something that is no run"
    finished = [line for line in (path / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines() if '"event":"run_finished"' in line]
    if not finished:
        return "it holds a run that was killed, with the checkpoints it had saved"
    with contextlib.suppress(ValueError):
        return f"it holds a run that ended as {json.loads(finished[-1])['status']}"
    return "it holds a run"


def is_held(path: Path) -> bool | None:
    """Whether the process of a run lives that writes there; None where the file system knows no locks. Raises OSError for what is no directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return False if _lock(descriptor) else None
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Whether it is held from now on. Raises BlockingIOError when another process, or another run of this one, holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems know no locks on directories
        return False
    return True


def _lock_for_long(descriptor: int) -> None:
    """As `_lock`, but somebody who only looks (`is_held`) has it for a moment: it is no run that goes on."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            _lock(descriptor)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            os.sched_yield()
        else:
            return


def _refused(path: Path, what: str, shown: str | None = None, *, limit: str = "a new or empty directory") -> ConfigError:
    given = shown or str(path)
    message = f"run directory '{given}' {what}. A run directory holds one run."
    return ConfigError([Problem(key=_OPTION, value=given, limit=limit, message=message, remedy="Name another one with --run-dir.")])
