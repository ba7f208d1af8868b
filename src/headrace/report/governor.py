"""What the governor did, for watch, progress and the report. A healthy run has none of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.report.markup import Markup, join, number_text, table, tag

if TYPE_CHECKING:
    from headrace.report.record import RunRecord

Line = Mapping[str, Any]

_MAX_ROWS = 40
_WORDS = {
    "tightened": "staleness bound lowered",
    "loosened": "staleness bound raised",
    "refused": "update refused",
    "held_back": "no checkpoint made",
    "failed": "run judged failed",
}


class GovernorState:
    """What of it is worth a line while the run goes on."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._newest: Line | None = None

    def add(self, line: Line) -> None:
        self._counts[line["action"]] += 1
        self._newest = line

    def text(self) -> str | None:
        """None: it has done nothing."""
        if self._newest is None:
            return None
        counts = ", ".join(f"{_words(action)} {count}x" for action, count in self._counts.items())
        return f"{counts}; at most {self._newest['max_staleness']} updates old now; last, at version {self._newest['version']}: {self._newest['reason']}"


def said(line: Line) -> str | None:
    """A line of progress for one action; None where another event says it (a refused update does)."""
    if line["action"] == "refused":
        return None
    return f"governor at version {line['version']}: {_words(line['action'])}: {line['reason']}"


def governor_parts(run: RunRecord) -> list[Markup]:
    """A table of the newest actions."""
    lines = run.events("governed")
    if not lines:
        return []
    rows = [
        [
            f"{run.training_seconds(line['time']):.1f} s", f"{line['version']:,}", line["lineage"], _words(line["action"]), line["reason"],
            line["max_staleness"], number_text(line["effective_sample_size"]), number_text(line["kl_sampler_learner"]),
        ]
        for line in lines[-_MAX_ROWS:]
    ]  # fmt: skip
    header = ["time", "version", "lineage", "what", "why", "bound from then on", "sample size", "KL"]
    left_out = f"The newest {_MAX_ROWS} of {len(lines):,}. " if len(lines) > _MAX_ROWS else ""
    note = "Sample size and KL(sampler || learner) are those of the update that decided; docs/governor.md says what each action means."
    return [join([table(header, rows), tag("p", f"{left_out}{note}", class_="note")])]


def governor_lead(run: RunRecord) -> str | None:
    counts = Counter(line["action"] for line in run.events("governed"))
    return ", ".join(f"{_words(action)} {count}x" for action, count in counts.items()).capitalize() + "." if counts else None


def _words(action: str) -> str:
    return _WORDS.get(action, action)
