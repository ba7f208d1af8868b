"""What a run does now, as one frame of text for a terminal of any width from 80 columns.

`WatchState` is fed with event lines and forgets what no frame needs, so that a long run costs no more to watch than a short one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.report.advice import advice
from headrace.report.finish import Finish, FinishMeter
from headrace.report.governor import GovernorState
from headrace.report.progress import duration
from headrace.report.promise import promise_advice, promise_text
from headrace.report.summary import RunSummary, over_bound_fraction
from headrace.report.utilization import Windows, utilization, went_back

Line = Mapping[str, Any]

RECENT_SECONDS = 60.0
"""Devices are judged by this last stretch of a run."""
SILENT_SECONDS = 30.0
"""Without an event for so long, a run that has not ended is called silent: workers report each second."""
_CURVE_POINTS = 512
_LABEL_COLUMNS = 12
_SHOWN_DELAY_SECONDS = 0.05
_SPARKS = "▁▂▃▄▅▆▇█"
_BLOCKED = " held the event loop for "
"""What a worker says of a call that blocked it (rollout/user_call.py)."""
_WORK = frozenset(
    {"worker_active", "updated", "selection_taken", "weights_published", "weights_acknowledged", "checkpoint_saved", "state_copied", "run_resumed"}
)
_STYLES = {"done": "green", "running": "cyan", "starting": "cyan", "failed": "red", "killed": "red", "interrupted": "yellow", "silent": "yellow"}


class Curve:
    """Values over updates in bounded memory: when full, neighbours are averaged."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._versions: list[int] = []
        """Newest of each value."""
        self._each = 1
        self._waiting: list[float] = []

    def add(self, value: float, version: int) -> None:
        self._waiting.append(value)
        if len(self._waiting) < self._each:
            return
        self.values.append(sum(self._waiting) / len(self._waiting))
        self._versions.append(version)
        self._waiting.clear()
        if len(self.values) >= _CURVE_POINTS:
            if len(self.values) % 2:  # after a cut
                del self.values[0], self._versions[0]
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._versions = self._versions[1::2]
            self._each *= 2

    def cut(self, version: int) -> None:
        """Everything above is undone."""
        self._waiting.clear()
        while self._versions and self._versions[-1] > version:
            self._versions.pop()
            self.values.pop()


class WatchState:
    """What a frame shows. `add` each event in order; `add` changes nothing but this object (I14)."""

    def __init__(self, settings: Mapping[str, Any] | None = None, directory: Path | None = None) -> None:
        """`settings` as in config.toml: advice names their values; `directory` of the run."""
        self.settings = settings or {}
        self._directory = directory
        self.summary = RunSummary(directory)
        self.time = 0.0
        self.num_events = 0
        self.unreadable = 0
        """Lines of the event log that are left out because they are damaged."""
        self.is_alone = False
        """No process holds the run directory: what has not finished by now never will."""
        self.log_is_missing = False
        """The run has begun, but its event log is not there."""
        self.finished: Line | None = None
        self.rewards, self.evaluations = Curve(), Curve()
        self.reward: float | None = None
        self.statistics: Mapping[str, Any] | None = None
        self.refused: str | None = None
        self.pool: Line | None = None
        self.recording: Line | None = None
        self.longest_waits: dict[str, str | None] = {}
        self.governor = GovernorState()
        self._blocked: dict[str, str] = {}
        """By worker, the longest time for which the recipe's Python stopped it."""
        self._down: dict[str, Line] = {}
        self._went_back: Line | None = None
        """The last time that the run went back to a checkpoint by itself."""
        self._losses: Counter[str] = Counter()
        self._version = 0
        self._waiting: Line | None = None
        self._recent: deque[Line] = deque()
        self._finish = FinishMeter()

    def add(self, line: Line) -> None:
        self.summary.add(line)
        self._finish.add(line)
        self.time, self.num_events = line["time"], self.num_events + 1
        if line["event"] in _WORK:
            self._recent.append(line)
            while self._recent[0]["time"] < self.time - RECENT_SECONDS:
                self._recent.popleft()
        match line["event"]:
            case "updated":
                self._add_update(line)
            case "evaluated" if line["mean"] is not None:
                self.evaluations.add(line["mean"], line["version"])
            case "worker_active":
                self._add_longest_wait(line["role"], line.get("longest_wait"))
            case "pool":
                self.pool = line
            case "waiting":
                self._waiting = line
            case "role_lost":
                self._down[line["role"]] = line
                self._losses[line["role"]] += 1
                self.longest_waits.pop(line["role"], None)
            case "role_restarted":
                self._down.pop(line["role"], None)
            case "governed":
                self.governor.add(line)
            case "trajectories_recorded":
                self.recording = line
            case "run_started":
                self.finished = None
            case "run_resumed":
                self._go_back(line)
            case "run_finished":
                self.finished = line

    @property
    def status(self) -> str:
        """starting | running | done | failed | interrupted | killed"""
        if self.finished is not None:
            return str(self.finished["status"])
        if self.is_alone:
            return "killed"
        return "running" if self.num_events or self.log_is_missing else "starting"

    @property
    def has_ended(self) -> bool:
        return self.finished is not None or self.is_alone

    @property
    def restarts_learner(self) -> bool:
        """Between the loss and the return to a checkpoint nothing happens."""
        return "learner" in self._down

    def waits(self) -> list[tuple[str, float]]:
        """(who waits for whom, seconds) by the newest word on it; none of a run that has ended."""
        newest = max((line for line in (self.pool, self._waiting) if line is not None), key=lambda line: line["time"], default=None)
        if newest is None or self.has_ended:
            return []
        return [(name, seconds) for name, seconds in newest["waits"]]

    def finish(self) -> Finish | None:
        """How long the rest takes, by what was made so far; None before the first update and after the end."""
        return None if self.has_ended else self._finish.forecast()

    @property
    def promised(self) -> Mapping[str, Any] | None:
        """What a plan or a profile said of this run."""
        return self.summary.started.get("promised")

    def recent_utilization(self) -> dict[str, Any]:
        """Of the last RECENT_SECONDS of the timed window; of the whole of a run that has ended, or is younger."""
        windows = self.summary.windows.windows
        if not windows.spans or self.has_ended or windows.spans[-1][1] - windows.spans[-1][0] <= RECENT_SECONDS:
            whole: dict[str, Any] = self.summary.result()["utilization"]
            return whole
        start, end = windows.spans[-1]
        stretch = Windows(((max(start, end - RECENT_SECONDS), end),), cut_out=True)
        return utilization([self.summary.started, *self._recent], stretch)

    def warnings(self) -> list[str]:
        summary = self.summary.result()
        found = advice(summary, self.recent_utilization(), settings=self.settings, newest=self.statistics, pool=self.pool)
        late = promise_advice(self.promised, summary, self.finish())
        if late is not None:
            found.insert(0, late)
        found += _recording_failures(self.summary.started)
        if self._went_back is not None:
            found.append(_return_text(self._went_back))
        for role, count in self._losses.items():
            if role == "learner" and role not in self._down:
                continue  # said above
            if role in self._down and not self.has_ended:
                found.insert(0, f"{role} was lost and is started again: {self._down[role]['error']}")
            else:
                found.append(f"{role} was lost {count} time{'s' * (count > 1)}" + ("" if role in self._down else " and came back"))
        if self.refused:
            found.insert(0, f"the last update was refused: {self.refused}")
        found += [f"{role}: {text}" for role, text in sorted(self._blocked.items())]
        if self.log_is_missing:
            found.insert(0, "events.jsonl is not in the run directory: what the run does or did is not seen, and it cannot be resumed without it")
        if self.status == "killed":
            found.insert(0, self._killed_text())
        if self.unreadable:
            found.append(f"{self.unreadable:,} lines of events.jsonl cannot be read and are left out")
        if self.recording is not None and self.recording["lost"]:
            found.append(f"{self.recording['lost']} trajectories were not recorded: {self.recording['failure'] or 'the disk was slower than the run'}")
        return found

    def _killed_text(self) -> str:
        if not self.num_events:
            how = f"start it anew: headrace run {self._directory}/config.toml"
        elif self.summary.started.get("runtime") == "simulated":
            how = "simulate it again"
        else:
            how = f"go on with it: headrace resume {self._directory}"
        return f"no process works on this run any more, and it did not say why (SIGKILL, memory used up, machine restarted); {how}"

    def _go_back(self, line: Line) -> None:
        """To a checkpoint: what is above it is undone."""
        self.finished, self._version = None, line["resumed_from_update"]
        for curve in (self.rewards, self.evaluations):
            curve.cut(self._version)
        self._down.clear()
        self.longest_waits.clear()
        if went_back(line):
            self._went_back = line

    def _add_longest_wait(self, role: str, text: str | None) -> None:
        """What a worker waits for now; a call that blocked its loop is over, and stands with the warnings."""
        parts = (text or "").split("; ")
        self.longest_waits[role] = "; ".join(part for part in parts if _BLOCKED not in part) or None
        if blocked := [part for part in parts if _BLOCKED in part]:
            self._blocked[role] = blocked[0]

    def _add_update(self, line: Line) -> None:
        self._version = line["version"]
        self.refused = line["refused"]
        if line["reward_mean"] is not None:
            self.reward = line["reward_mean"]
            self.rewards.add(line["reward_mean"], line["version"])
        if line["statistics"] is not None:
            self.statistics = line["statistics"]


def _recording_failures(started: Line) -> list[str]:
    """Why samplers run decode steps in Python, once a reason."""
    reasons = dict.fromkeys(str(device["recording_failure"]) for device in started.get("devices", ()) if device.get("recording_failure"))
    return [f"decode steps could not be recorded and run in Python, slower but the same: {reason}" for reason in reasons]


def _return_text(line: Line) -> str:
    undone, where = line["undone_updates"], f"update {line['resumed_from_update']} (lineage {line['lineage']})"
    lost = f"; {undone} update{'s' * (undone != 1)} undone, {duration(line['seconds'])}" + (f": {line['reason']}" if line["reason"] else "")
    if line["cause"] == "roll_back":
        return f"rolled back to {where}, learning rate x {line['learning_rate_factor']:.3g}{lost}"
    return f"learner restarted from {where}{lost}"


def frame(state: WatchState, *, name: str, width: int, silent_seconds: float = 0.0) -> RenderableType:
    """One picture of the run. `silent_seconds`: since the file last grew."""
    summary = state.summary.result()
    rows = _Rows(width)
    parts: list[RenderableType] = [_title(state, summary, name, width, silent_seconds)]
    if state.num_events:
        _add_progress(rows, state, summary)
        _add_learning(rows, state, summary)
        parts.append(rows.table)
        devices = state.recent_utilization()
        if devices["devices"]:
            parts += ["", _devices(devices, width)]
        below = _Rows(width)
        _add_waits(below, state)
        _add_pool_and_ledger(below, state, summary)
        _add_key_steps(below, state, summary)
        parts += ["", below.table]
    parts += _notes(state, summary)
    return Group(*parts)


class _Rows:
    """Lines of a label and a text that is folded at the width."""

    def __init__(self, width: int) -> None:
        self.columns = width - _LABEL_COLUMNS
        self.table = Table.grid(padding=(0, 0))
        self.table.add_column(width=_LABEL_COLUMNS, no_wrap=True)
        self.table.add_column(width=self.columns, overflow="fold")

    def add(self, label: str, text: str | Text) -> None:
        self.table.add_row(Text(label, style="dim"), text if isinstance(text, Text) else Text(text))


def _title(state: WatchState, summary: Mapping[str, Any], name: str, width: int, silent_seconds: float) -> Table:
    status = state.status
    word = status
    if status == "killed":
        word = "ended without a word: its process is gone"
    elif status == "running" and silent_seconds > SILENT_SECONDS:
        why = "its learner is being restarted, or it was killed" if state.restarts_learner else "killed, or its machine hangs"
        status, word = "silent", f"no event for {duration(silent_seconds)}: {why}"
    elif status == "starting":
        word = "starting: the roles are not up yet"
    elif state.log_is_missing:
        word = "running, unseen"
    elif summary["wall_seconds"]:
        word = f"{status} · {duration(summary['wall_seconds'])}"
    table = Table.grid(expand=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(justify="right", no_wrap=True)
    what = (
        [summary["recipe"], summary["mode"], summary["placement"], f"seed {summary['seed']}", "simulated" * (summary["runtime"] == "simulated")]
        if state.num_events
        else []
    )
    left = Text(name, style="bold")
    left.append("  " + " ".join(part for part in what if part), style="not bold")
    table.add_row(left, Text(word, style=_STYLES[status]))
    table.width = width
    return table


def _add_progress(rows: _Rows, state: WatchState, summary: Mapping[str, Any]) -> None:
    done, planned = summary["num_updates"], summary["planned_updates"] or 0
    left = state.finish()
    tail = f" {done}/{planned} updates" + (f", {duration(left.seconds)} to go ({duration(left.low)} to {duration(left.high)})" if left else "")
    columns = max(10, rows.columns - len(tail) - 1)
    rows.add("progress", _bar(done / planned if planned else 0.0, columns) + Text(tail))
    if (promised := promise_text(state.promised, summary, left)) is not None:
        rows.add("promised", promised)


def _add_learning(rows: _Rows, state: WatchState, summary: Mapping[str, Any]) -> None:
    simulated = summary["runtime"] == "simulated"
    if simulated:
        rows.add("simulated", "times, tokens and staleness come from a model of time; no weights, so rewards and the like mean nothing")
    if state.reward is not None and not simulated:
        rows.add("reward", _curve(f"{state.reward:7.3f}", state.rewards.values, rows.columns))
    newest = summary["evaluation"]["after"] or summary["evaluation"]["before"]
    if newest is not None and newest["mean"] is not None and not simulated:
        low, high = newest["interval95"]
        interval = f" ±{(high - low) / 2:.3f}" if high - low >= 5e-4 else ""
        rows.add("evaluation", _curve(f"{newest['mean']:7.3f}", state.evaluations.values, rows.columns, f"{interval} at version {newest['version']}"))
    staleness, statistics = summary["staleness"], state.statistics
    if staleness["mean"] is not None:
        key = f"; key steps {staleness['key_mean']:.2f}, max {staleness['key_max']}" if staleness["key_mean"] is not None else ""
        rows.add("staleness", f"mean {staleness['mean']:.2f}, max {staleness['max']} updates{key}")
    if statistics is not None and statistics["effective_sample_size"] is not None and not simulated:
        parts = [("ess", "effective_sample_size"), ("ratio max", "ratio_max"), ("clipped", "clipped_fraction"), ("entropy", "entropy")]
        rows.add("last update", ", ".join(f"{label} {statistics[key]:.3g}" for label, key in parts if statistics[key] is not None))
    if summary["tokens_per_second"]:
        rows.add("tokens/s", _speed(summary))


def _speed(summary: Mapping[str, Any]) -> str:
    text = f"{summary['tokens_per_second']:,.0f} sampled"
    if summary["useful_tokens_per_second"]:
        text += f", {summary['useful_tokens_per_second']:,.0f} trained"
    if summary["saturated_tokens_per_second"]:
        text += f"; full samplers make {summary['saturated_tokens_per_second']:,.0f}"
    return text


def _devices(utilization_now: Mapping[str, Any], width: int) -> Table:
    """Bars of occupancy; what is beside them is the same for every width."""
    bar_columns = max(8, min(30, width - 62))
    table = Table.grid(padding=(0, 1))
    for column in ({"width": 12}, {"width": bar_columns}, {"justify": "right", "width": 4}, {"justify": "right", "width": 5}):
        table.add_column(no_wrap=True, overflow="ellipsis", **column)
    table.add_column(width=width - 12 - bar_columns - 4 - 5 - 4, overflow="fold")
    seconds = utilization_now["devices"][0]["allocated_seconds"]
    table.add_row(*(Text(text, style="dim") for text in ("device", "occupancy", "", "busy", f"idle, of the last {duration(seconds)}")))
    for device in utilization_now["devices"]:
        total = device["allocated_seconds"]
        idle = sorted(((reason, lasted / total) for reason, lasted in device["idle_seconds"].items()), key=lambda item: -item[1])
        reasons = ", ".join(f"{reason} {share:.0%}" for reason, share in idle[:3] if share >= 0.005)
        table.add_row(device["name"], _bar(device["occupancy"], bar_columns), f"{device['occupancy']:.0%}", f"{device['busy_fraction']:.0%}", reasons)
    attainable = utilization_now["attainable_occupancy"]
    beside = f"attainable with this split {attainable:.0%}" if attainable is not None else ""
    occupancy, busy = utilization_now["occupancy"], utilization_now["busy_fraction"]
    table.add_row("run", _bar(occupancy, bar_columns), f"{occupancy:.0%}", f"{busy:.0%}", beside)
    return table


def _add_waits(rows: _Rows, state: WatchState) -> None:
    for index, (name, seconds) in enumerate(state.waits()):
        rows.add("" if index else "waits", f"{name} ({seconds:.0f} s)")
    if not state.has_ended:
        slow = [(role, text) for role, text in sorted(state.longest_waits.items()) if text]
        for index, (role, text) in enumerate(slow[:4]):
            rows.add("" if index else "slowest", f"{role}: {text}")


def _add_pool_and_ledger(rows: _Rows, state: WatchState, summary: Mapping[str, Any]) -> None:
    pool = state.pool
    if pool is not None and not state.has_ended:
        groups = f"{pool['outstanding_groups']} of {pool['max_groups']} groups out: {pool['waiting_groups']} waiting, {pool['ready_groups']} ready, "
        staleness = f"; staleness {pool['staleness_mean']:.1f}, max {pool['staleness_max']}" if pool["pooled_tokens"] else ""
        rows.add("pool", f"{groups}{pool['taken_groups']} with the learner; {pool['rollouts_in_flight']} rollouts in flight{staleness}")
    ledger = summary["ledger"]
    if ledger and "trajectories" in ledger:
        counts = {name: sum(value.values()) if isinstance(value, Mapping) else value for name, value in ledger["trajectories"].items()}
        shown = [f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items() if value and name != "generated"]
        rows.add("ledger", f"{counts.get('generated', 0):,} trajectories = " + " + ".join(shown))
    if summary["checkpoint"]:
        rows.add("checkpoint", str(summary["checkpoint"]))


def _add_key_steps(rows: _Rows, state: WatchState, summary: Mapping[str, Any]) -> None:
    """A line each for what there is: key steps, verification, pace, updates that waited, long rollouts that gave way."""
    steps = (summary["ledger"] or {}).get("key_steps") or {}
    if steps.get("offered"):
        over = over_bound_fraction(summary["ledger"])
        left = [f"{count:,} {reason.replace('_', ' ')}" for name in ("skipped", "failed") for reason, count in steps.get(name, {}).items() if count]
        text = f"{steps['trained']:,} of {steps['offered']:,} trained" + (f", {over:.0%} of them over the bound" if over is not None else "")
        rows.add("key steps", f"{text}; {', '.join(left)}" if left else text)
    verification = summary["verification"]
    if verification["asked"]:
        out = 0 if state.has_ended else verification["out"]
        cut = verification["cut"] / verification["rollouts"] if verification["rollouts"] else 0.0
        lost = f"{verification['refreshed_tokens']:,} tokens cut off"
        text = f"{verification['rollouts']:,} rollouts, {cut:.0%} of them cut; {lost}; {verification['seconds']:.1f} s of checks"
        if verification["tail_seconds"]:
            text += f"; back {verification['tail_seconds']['median']:.2g} s after a rejection (p95 {verification['tail_seconds']['p95']:.2g} s)"
        rows.add("verified", f"{text}; {out:,} out now" if out else text)
    pace = summary["pace"]
    if pace is not None:
        rows.add("pace", f"{pace['limit_groups']} of {pace['max_groups']} groups may be out; waited {pace['wait_seconds']:.0f} s for it")
    delay = summary["apply_delay_seconds"]
    if delay is not None and delay >= _SHOWN_DELAY_SECONDS:
        rows.add("weights", f"taken up {delay:.2f} s after they arrived, on average (sampler.apply)")
    governed = state.governor.text()
    if governed is not None:
        rows.add("governor", governed)
    if summary["parked"]:
        rows.add("parked", f"{summary['parked']:,} times a long rollout gave its slot to short work")


def _notes(state: WatchState, summary: Mapping[str, Any]) -> list[RenderableType]:
    notes: list[RenderableType] = []
    if state.finished is not None and state.finished["error"]:
        error = state.finished["error"]
        notes.append(Text(f"{error['kind']}: {error['message']} {error.get('remedy') or ''}".rstrip(), style="red"))
    return notes + [Text(f"! {text}", style="yellow") for text in state.warnings()]


def _bar(fraction: float, columns: int) -> Text:
    full = round(max(0.0, min(1.0, fraction)) * columns)
    return Text.assemble(("█" * full, "cyan"), ("░" * (columns - full), "dim"))


def _curve(value: str, values: Sequence[float], columns: int, after: str = "") -> Text:
    room = columns - len(value) - len(after) - 2
    return Text.assemble(f"{value}  ", (sparkline(values, room), "cyan"), after)


def sparkline(values: Sequence[float], columns: int) -> str:
    """One character a value, or the mean of those that share a column; lowest to highest value."""
    if not values or columns < 1:
        return ""
    if len(values) > columns:
        edges = [round(index * len(values) / columns) for index in range(columns + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    span = high - low
    return "".join(_SPARKS[round((value - low) / span * (len(_SPARKS) - 1)) if span > 0 else 3] for value in values)
