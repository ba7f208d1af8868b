"""How a run goes, while it goes: one line that is rewritten in a terminal, a plain line now and then elsewhere.

Fed with event lines (EventLog.subscribe); it holds nothing that the events do not say.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Any

from headrace.report.finish import FinishMeter
from headrace.report.governor import said
from headrace.report.markup import printable

Line = Mapping[str, Any]

_REDRAW_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
_RECENT_SECONDS = 15.0


class ProgressView:
    """`on_startup` before the first event, `on_event` for each event, `close` at the end (leaves the last line standing)."""

    def __init__(self, stream: IO[str], *, width: Callable[[], int] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._width = width or (lambda: _columns(stream))
        self._clock = clock
        self._drawn_at = float("-inf")
        self._on_line = False
        self._shown = ""
        self._last_startup: str | None = None
        self._num_updates = 0
        self._version = 0
        self._reward: float | None = None
        self._evaluation: float | None = None
        self._failures: set[tuple[str, str]] = set()
        self._staleness: float | None = None
        self._finish = FinishMeter()
        self._tokens: deque[tuple[float, int]] = deque()
        self._waiting: str | None = None

    def on_startup(self, what: str, fraction: float) -> None:
        """A step of the start, 0 to 1 done."""
        if self._terminal:
            self._draw(f"starting: {what}" + (f" {fraction:.0%}" if fraction else ""), force=False)
        elif what != self._last_startup:
            self._print(f"starting: {what}")
        self._last_startup = what

    def on_event(self, line: Line) -> None:
        force = True
        self._finish.add(line)
        match line["event"]:
            case "run_started":
                self._num_updates = line["num_updates"]
                self._print(f"{line['mode']}, {line['placement']}, {len(line['devices'])} devices, up after {line['startup_seconds']:.1f} s")
            case "run_resumed":
                self._take_resumption(line)
            case "updated":
                self._take_update(line)
            case "worker_active":
                self._tokens.append((line["time"], line["activity"]["sampled_tokens"]))
                while self._tokens[0][0] < line["time"] - _RECENT_SECONDS:
                    self._tokens.popleft()
                force = False
            case "evaluated":
                self._evaluation = line["mean"]
                low, high = line["interval95"]
                interval = f" (95 % interval {low:.3f} to {high:.3f})" if high > low else ""
                self._print(f"evaluation of version {line['version']}: {line['mean']:.3f}{interval}, {line['seconds']:.1f} s")
                if line.get("num_failed"):
                    self._print(f"{line['num_failed']} of its rollouts failed, which leaves them out of the mean: {line['failure']}"[:500])
            case "rollout_failed" if not line["retried"] and (line["task_id"], line["reason"]) not in self._failures:
                self._failures.add((line["task_id"], line["reason"]))  # once a task: the end shows how often
                self._print(f"task {line['task_id']} failed: {line['reason']}: {line['error']}"[:500])
            case "governed" if (text := said(line)) is not None:
                self._print(text)
            case "role_lost":
                self._print(f"{line['role']} was lost: {line['error']}"[:500] + f" {_after_loss(line)}")
            case "role_restarted":
                self._print(f"{line['role']} is back after {line['seconds']:.1f} s")
            case "checkpoint_saved":
                self._print(f"checkpoint {line['path']}")
            case "interrupted" if line["failure"] is None:
                self._print(f"interrupted: saving what was learned, for at most {line['limit_seconds']:g} s; Ctrl-C again ends at once")
            case "interrupted":
                self._print(f"a last checkpoint could not be saved: {line['failure']}"[:500])
            case "waiting":
                self._waiting = "; ".join(f"{name} ({seconds:.0f} s)" for name, seconds in line["waits"])
                if not self._terminal:
                    self._print(self._waiting)
            case _:
                force = False
        if self._num_updates:
            self._draw(self.text(), force=force and self._terminal)

    def text(self) -> str:
        """The line, whole."""
        parts = [f"update {self._version}/{self._num_updates}"]
        if self._reward is not None:
            parts.append(f"reward {self._reward:.3f}")
        if self._evaluation is not None:
            parts.append(f"evaluation {self._evaluation:.3f}")
        if self._staleness is not None:
            parts.append(f"staleness {self._staleness:.1f}")
        rate = self._tokens_per_second()
        if rate is not None:
            parts.append(f"{rate:,.0f} tokens/s")
        left = self.seconds_to_finish()
        if left:
            parts.append(f"{duration(left)} to go")
        if self._waiting:
            parts.append(self._waiting)
        return "  ".join(parts)

    def seconds_to_finish(self) -> float | None:
        """By what was made so far; None before the first update and after the last one."""
        left = self._finish.forecast()
        return None if left is None else left.seconds

    def close(self) -> None:
        if self._num_updates:
            self._draw(self.text(), force=True)
        if self._on_line:
            self._write("\n")
            self._on_line = False

    def _take_resumption(self, line: Line) -> None:
        self._num_updates, self._version = line["num_updates"], line["resumed_from_update"]
        for text in line["passed_over"]:
            self._print(f"not whole, passed over: checkpoint {text}")
        undone = f"{line['pooled']} trajectories are in the pool again, {line['void']} are void, {line['lost']} rollouts were in flight"
        self._print(
            f"{went_back_text(line)}goes on from update {self._version} as lineage {line['lineage']}, up after {line['startup_seconds']:.1f} s; {undone}"
        )

    def _take_update(self, line: Line) -> None:
        self._version = line["version"]
        self._reward = line["reward_mean"]
        self._waiting = None
        if line["statistics"] is not None:
            self._staleness = line["statistics"]["staleness_mean"]
        if line["refused"]:
            self._print(f"an update after version {line['version']} was refused: {line['refused']}")

    def _tokens_per_second(self) -> float | None:
        """Of all workers; each report's tokens fall into the interval that it closes, so the first report's are left out."""
        if len(self._tokens) < 2 or self._tokens[-1][0] <= self._tokens[0][0]:
            return None
        return sum(count for _, count in list(self._tokens)[1:]) / (self._tokens[-1][0] - self._tokens[0][0])

    def _draw(self, text: str, *, force: bool) -> None:
        now = self._clock()
        if not force and now - self._drawn_at < (_REDRAW_SECONDS if self._terminal else _PLAIN_SECONDS):
            return
        self._drawn_at = now
        if self._terminal:
            self._write("\r\x1b[2K" + printable(text)[: max(20, self._width() - 1)])
            self._on_line = True
        elif text != self._shown:
            self._write(printable(text) + "\n")
        self._shown = text

    def _print(self, text: str) -> None:
        """A line that stays, above the live one."""
        self._write(("\r\x1b[2K" if self._on_line else "") + printable(text) + "\n")
        self._on_line = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def went_back_text(line: Line) -> str:
    """Why a run that is resumed went back by itself, and what that undid; empty for the command."""
    undone = f"{line['undone_updates']} update{'s' * (line['undone_updates'] != 1)} undone" if line.get("undone_updates") else "no update undone"
    match line.get("cause", "command"):
        case "learner_lost":
            return f"the learner was restarted, {undone}; "
        case "roll_back":
            return f"rolled back, {undone}, learning rate x {line['learning_rate_factor']:.3g} from now on, because {line['reason'].rstrip('.')}; "
        case _:
            return ""


def _after_loss(line: Line) -> str:
    if line["role"] == "learner":
        return "The run goes back to its newest checkpoint." if line["restarted"] else "The run ends."
    return f"{line['rollouts']} rollouts begin anew; " + ("it is started again" if line["restarted"] else "the run ends")


def duration(seconds: float) -> str:
    """For people: 45 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _columns(stream: IO[str]) -> int:
    import shutil

    return shutil.get_terminal_size((100, 24)).columns
