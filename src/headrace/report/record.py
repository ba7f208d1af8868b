"""What a run directory holds, read for a report: events, settings, trajectories. Works while the run goes on and after it was cut."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import ConfigError, Problem
from headrace.event_log import check_first_event, event_of
from headrace.report.comparison import with_capacity
from headrace.report.summary import RunSummary, summarize
from headrace.report.utilization import Windows, timed_windows

Line = Mapping[str, Any]

EVENTS_FILE = "events.jsonl"
_RESERVED = '{"event":"group_reserved"'


class Rollout(NamedTuple):
    """One line `rollout_finished`, as far as the report needs it; the newest `rollout_verified` about it in its place."""

    kind: str
    end: str
    reward: float | None
    tokens: int
    seconds: float
    wait_seconds: float
    num_versions: int
    """Newest minus oldest version that drew a token, in updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    directory: Path
    lines: list[Line]
    """In order, without `rollout_finished` (in `rollouts`) and `group_reserved`; `rollout_verified` as `_verified` makes it."""
    rollouts: list[Rollout]
    settings: Mapping[str, Any]
    """config.toml as nested tables; empty where it cannot be read."""
    unreadable: int
    """Lines that are no events, or lack what events of their name have; a torn last one left out."""
    summary: Mapping[str, Any]
    windows: Windows

    @property
    def started(self) -> Line:
        return self.lines[0]

    @property
    def finished(self) -> Line | None:
        """The line `run_finished`; None while the run goes on, and for one that was killed."""
        last = next((line for line in reversed(self.lines) if line["event"] in ("run_finished", "run_resumed")), None)
        return last if last is not None and last["event"] == "run_finished" else None

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    def with_capacity(self, capacity: int) -> RunRecord:
        """The same run, as if every sampling device had measured this capacity."""
        lines = with_capacity(self.lines, capacity)
        return replace(self, lines=lines, summary=summarize(lines, self.directory.resolve()))

    def events(self, name: str) -> list[Line]:
        return [line for line in self.lines if line["event"] == name]

    def surviving(self, name: str) -> list[Line]:
        """`updated` or `evaluated` lines by version, without those that a restore has undone."""
        kept: dict[int, Line] = {}
        for line in self.events(name):
            version, lineage = line["version"], line["lineage"]
            if any(other["lineage"] < lineage and number >= version for number, other in kept.items()):
                kept = {number: other for number, other in kept.items() if other["lineage"] == lineage or number < version}
            kept[version] = line
        return [kept[version] for version in sorted(kept)]

    def training_seconds(self, time: float) -> float:
        """Seconds of training up to `time`."""
        return self.windows.inside(time, time) if time > 0 else 0.0

    def seconds_of_versions(self) -> dict[int, float]:
        """When, in seconds of training, the learner had reached each version."""
        return {0: 0.0, **{line["version"]: self.training_seconds(line["time"]) for line in self.surviving("updated")}}


def load_run(directory: Path) -> RunRecord:
    """Raises ConfigError when it is no run directory, or the run has not begun."""
    path = directory / EVENTS_FILE
    if not path.is_file():
        what = "does not exist" if not directory.exists() else f"holds no {EVENTS_FILE}: it is no run directory"
        raise _wrong(directory, f"'{directory}' {what}.", "Give the directory of a run, for example runs/NAME-TIME.")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines, rollouts, unreadable = _read(file, path)
    except OSError as error:
        raise _wrong(directory, f"{path} cannot be read: {error.strerror}.", "Check its rights.") from error
    if not lines:
        none = f"holds no event that can be read ({unreadable:,} lines cannot)" if unreadable else "holds no event of a run yet"
        raise _wrong(directory, f"{path} {none}.", "Restore it from a copy." if unreadable else "Report again when the run has started up.")
    return RunRecord(
        directory=directory, lines=lines, rollouts=rollouts, settings=_settings(directory / "config.toml"), unreadable=unreadable,
        summary=summarize(lines, directory.resolve()), windows=timed_windows(lines),
    )  # fmt: skip


def _read(file: Iterable[str], path: Path) -> tuple[list[Line], list[Rollout], int]:
    """Raises ConfigError when the first event does not begin a run."""
    trial = RunSummary()
    lines: list[Line] = []
    rollouts: list[Rollout] = []
    places: dict[tuple[int, int], int] = {}
    unreadable = 0
    for text in file:
        if text.startswith(_RESERVED) or not text.endswith("\n"):  # the last line of a run that is writing, or was cut
            continue
        line = event_of(text)
        if line is None:
            unreadable += 1
            continue
        if not lines:
            check_first_event(line, path)
        try:
            trial.add(line)  # an event that the summary cannot count is no use to the page either
            match line["event"]:
                case "rollout_finished":
                    rollouts.append(_rollout(line))
                    places[line["group"], line["member"]] = len(rollouts) - 1
                case "rollout_verified":
                    place = places[line["group"], line["member"]]
                    before, rollouts[place] = rollouts[place], _rollout(line)
                    lines.append(_verified(line, before.tokens))
                case _:
                    lines.append(line)
        except (ValueError, LookupError, TypeError, AttributeError):
            unreadable += 1
    return lines, rollouts, unreadable


def _rollout(line: Line) -> Rollout:
    versions = line["versions"]
    return Rollout(
        kind=sys.intern(line["kind"]), end=sys.intern(line["end"]), reward=line["reward"], tokens=line["tokens"], seconds=line["seconds"] or 0.0,
        wait_seconds=line["wait_seconds"] or 0.0, num_versions=versions[-1] - versions[0] if versions else 0,
    )  # fmt: skip


def _verified(line: Line, tokens_before: int) -> Line:
    """What the report needs of it: there may be more of them than of anything else. `redrawn`: tokens drawn in place of those cut off."""
    kept = ("time", "tokens", "round", "refreshed", "refreshed_keys")
    redrawn = line["tokens"] - tokens_before + line["refreshed"]
    return {"event": "rollout_verified", "role": sys.intern(line["role"]), **{key: line[key] for key in kept}, "redrawn": redrawn}


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a report without settings is better than none
        return {}


def _wrong(directory: Path, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key="RUN", value=str(directory), message=message, remedy=remedy)])
