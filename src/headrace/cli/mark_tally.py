"""What `headrace mark` counts: steps and tokens that would be marked, those that the run recorded as key, and where both agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Tally:
    """Of some steps."""

    steps: int = 0
    tokens: int = 0
    marked_steps: int = 0
    marked_tokens: int = 0
    recorded_steps: int = 0
    recorded_tokens: int = 0
    agreed_steps: int = 0
    """Marked, and recorded as key."""

    def add(self, num_tokens: int, marked: bool, recorded: bool) -> None:
        self.steps += 1
        self.tokens += num_tokens
        self.marked_steps += marked
        self.marked_tokens += num_tokens * marked
        self.recorded_steps += recorded
        self.recorded_tokens += num_tokens * recorded
        self.agreed_steps += marked and recorded

    @property
    def found_share(self) -> float | None:
        """Of the recorded key steps, those that are marked; None without any."""
        return self.agreed_steps / self.recorded_steps if self.recorded_steps else None

    @property
    def agreed_share(self) -> float | None:
        """Of the marked steps, those recorded as key; None without any."""
        return self.agreed_steps / self.marked_steps if self.marked_steps else None

    def as_object(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in self.__slots__}
        shares = {
            "marked_share": self.marked_steps / max(1, self.steps),
            "marked_token_share": self.marked_tokens / max(1, self.tokens),
            "recorded_share": self.recorded_steps / max(1, self.steps),
            "recorded_token_share": self.recorded_tokens / max(1, self.tokens),
        }
        return {**counts, **shares, "found_share": self.found_share, "agreed_share": self.agreed_share}


@dataclass(slots=True)
class Report:
    """Of all recorded trajectories that did not fail."""

    names: Sequence[str]
    """Of the markers."""
    num_trajectories: int = 0
    num_marked_trajectories: int = 0
    num_failed: int = 0
    whole: Tally = field(default_factory=Tally)
    by_kind: dict[str, Tally] = field(default_factory=dict)
    by_marker: Counter[str] = field(default_factory=Counter)
    """Steps that each marker marks."""
    _by_position: dict[int, Tally] = field(default_factory=dict)
    """By the first step of a stretch that doubles: 0, 1, 2 to 3, 4 to 7, ..."""

    def __post_init__(self) -> None:
        self.by_marker.update(dict.fromkeys(self.names, 0))

    def add(self, row: Mapping[str, Any], by_marker: Sequence[Sequence[bool]]) -> set[int]:
        """Counts a trajectory; returns its marked steps. `by_marker`: [markers][steps]."""
        recorded = set(row["key_steps"])
        marked = {index for marks in by_marker for index, mark in enumerate(marks) if mark}
        for name, marks in zip(self.names, by_marker, strict=True):
            self.by_marker[name] += sum(marks)
        kind = self.by_kind.setdefault(row["kind"], Tally())
        for index, (start, end) in enumerate(zip(row["action_starts"], row["action_ends"], strict=True)):
            first = 1 << (index.bit_length() - 1) if index else 0
            for tally in (self.whole, kind, self._by_position.setdefault(first, Tally())):
                tally.add(end - start, index in marked, index in recorded)
        self.num_trajectories += 1
        self.num_marked_trajectories += bool(marked)
        return marked

    def positions(self) -> list[tuple[str, Tally]]:
        """(`4 to 7`, tally) in order."""
        return [(str(first) if first < 2 else f"{first} to {2 * first - 1}", self._by_position[first]) for first in sorted(self._by_position)]

    def as_object(self) -> dict[str, Any]:
        return {
            "trajectories": self.num_trajectories,
            "marked_trajectories": self.num_marked_trajectories,
            "failed_left_out": self.num_failed,
            "markers": [{"marker": name, "steps": count, "share": count / max(1, self.whole.steps)} for name, count in self.by_marker.items()],
            "all": self.whole.as_object(),
            "by_position": [{"position": name, **tally.as_object()} for name, tally in self.positions()],
            "by_kind": [{"kind": name, **tally.as_object()} for name, tally in sorted(self.by_kind.items())],
        }
