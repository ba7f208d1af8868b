"""The file of events: the one writer, the readers (CONTRACTS, events.jsonl). Append-only, readable while written. Records: events.py."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from headrace.errors import ConfigError, Problem, RunDirectoryError
from headrace.events import SCHEMA, Event


class EventLog:
    """The one writer. `subscribe` lets a progress view see events as they pass; a subscriber that raises is dropped.

    Each line is written whole or not at all: where the disk is full, what was written of it is cut off again, `emit` raises
    RunDirectoryError once, and later events reach the subscribers only.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._file: IO[bytes] | None = None if path is None else path.open("ab", buffering=0)
        if path is not None and self._file is not None:
            _cut_torn_line(path, self._file)
        self._start: float | None = None
        self._subscribers: list[Callable[[dict[str, Any]], None]] = []

    @classmethod
    def reopened(cls, path: Path, clock: Callable[[], float]) -> EventLog:
        """Goes on with the log of a run that is over: time goes on from its last whole line, a torn one is cut off.

        Raises RunDirectoryError, having changed nothing, when that line cannot be read.
        """
        last, num_bytes = b"", 0
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    last, num_bytes = line, num_bytes + len(line)
        try:
            seconds = float(json.loads(last)["time"]) if last else None
        except (ValueError, LookupError, TypeError) as error:
            remedy = "Cut off what is no event at its end, or restore the file; checkpoints and journal are not touched."
            raise RunDirectoryError(f"{path}: the event log is damaged: its last line is no event ({error}).", remedy=remedy) from error
        os.truncate(path, num_bytes)
        log = cls(path, clock)
        if seconds is not None:
            log._start = clock() - seconds
        return log

    def subscribe(self, subscriber: Callable[[dict[str, Any]], None]) -> None:
        self._subscribers.append(subscriber)

    def emit(self, event: Event) -> None:
        if self._start is None:
            self._start = self._clock()
        line = {"event": event.name, "time": round(self._clock() - self._start, 4), **_plain(event)}
        if self._file is not None:
            self._write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        for subscriber in list(self._subscribers):
            try:
                subscriber(line)
            except Exception:  # a view must never break a run
                self._subscribers.remove(subscriber)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            with contextlib.suppress(OSError):  # a device that cannot be cut
                self._file.truncate(os.fstat(self._file.fileno()).st_size - written)
            self.close()
            remedy = "Free disk space, or choose another run directory; what was saved before is whole."
            raise RunDirectoryError(f"{self._path}: the event log cannot be written: {error.strerror}.", remedy=remedy) from error


class EventFollower:
    """Reads an events file as it grows, each call from where the last one ended. The file need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.unreadable = 0
        """Whole lines that are no events; they are left out."""

    def new_events(self) -> Iterator[dict[str, Any]]:
        """Whole lines written since the last call; a torn last line is left for the next one."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                event = event_of(line)
                if event is None:
                    self.unreadable += 1
                    continue
                yield event


def read_events(path: Path, *, without: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Lines of an events file, also of one still being written: a torn last line is left out, and so are damaged ones. Events named in
    `without` cost next to nothing."""
    skipped = tuple(f'{{"event":"{name}",' for name in without)
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            if not line.startswith(skipped) and (event := event_of(line)) is not None:
                yield event


def event_of(line: str | bytes) -> dict[str, Any] | None:
    """None for a line that is no event: every event has its name and its time."""
    try:
        event = json.loads(line)
        if isinstance(event["event"], str) and not isinstance(event["time"], bool) and math.isfinite(event["time"]):
            return dict(event)
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return None


def check_first_event(event: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError unless it begins a run whose log this version reads."""
    if event["event"] != "run_started":
        message = f"the event log does not begin with run_started, its first event is '{event['event']}'."
        raise _unusable(path, "event", event["event"], "run_started", message)
    schema = event.get("schema", SCHEMA)
    if isinstance(schema, bool) or schema != SCHEMA:
        message = f"the event log has schema {schema!r}, this version of headrace reads {SCHEMA}."
        remedy = f"Use the version of headrace that wrote it: {event.get('headrace', 'a newer one')}."
        raise ConfigError([Problem(file=str(path), key="schema", value=schema, limit=str(SCHEMA), message=message, remedy=remedy)])
    devices = event.get("devices")
    if not isinstance(devices, list) or not all(map(_is_device, devices)):
        message = "run_started does not say which devices the run has: 'devices' is missing or damaged."
        raise _unusable(path, "devices", devices, "a list of {name, role, capacity}", message)


def _is_device(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get("role"), str):
        return False
    numbers = (value.get("capacity"), value.get("saturated_tokens_per_second"))
    return all(number is None or isinstance(number, int | float) for number in numbers)


def _unusable(path: Path, key: str, value: object, limit: str, message: str) -> ConfigError:
    remedy = "Restore line 1 of the file from a copy: without it the numbers after it mean nothing."
    return ConfigError([Problem(file=str(path), key=key, value=value, limit=limit, message=message, remedy=remedy)])


def _cut_torn_line(path: Path, file: IO[bytes]) -> None:
    """A writer that was killed may have left half a line: what is appended must not continue it."""
    size = end = os.fstat(file.fileno()).st_size
    with path.open("rb") as reader:
        while end > 0:
            start = max(0, end - 4096)
            reader.seek(start)
            position = reader.read(end - start).rfind(b"\n")
            if position >= 0:
                end = start + position + 1
                break
            end = start
    if end < size:
        file.truncate(end)


@functools.cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    """dataclasses.fields() makes a tuple at every call; this is most of what an event costs."""
    return tuple(field.name for field in dataclasses.fields(kind))


def _plain(value: Any) -> Any:
    """Dataclasses and mappings to JSON values: floats to 6 significant digits, non-finite ones to null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        return {name: _plain(getattr(value, name)) for name in _field_names(kind)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"an event holds a {type(value).__name__}: {value!r}")
