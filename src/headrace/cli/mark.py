"""`headrace mark`: what rules, a marking function or a bound on the advantage would mark, on the recorded trajectories of a run.

Nothing is run and nothing is written. Texts are those of the record, decoded: for a chat an observation is the rendered text, with
the template's own words around the messages, where a run's rules see the messages' contents.
"""

from __future__ import annotations

import argparse
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from headrace.cli.mark_tally import Report, Tally
from headrace.cli.output import Output
from headrace.cli.recorded import RecordedFiles
from headrace.cli.runs import find_run, run_settings
from headrace.cli.safe_console import SafeConsole
from headrace.cli.trajectories import Row, decoder
from headrace.errors import ConfigError, Problem, RecipeError
from headrace.marks import Rule, RuleError, RuleKind, StepView, TrajectoryView, parse_rule, stands_out
from headrace.types import FAILURES, EndReason, RolloutKey, Task

DEFAULT_EXAMPLES = 3
_MAX_CHARACTERS = 2000
_ENTROPY_NOTE = (
    "marks.entropy_fraction cannot be tried here: entropies are not recorded, and the log-probability of the token that was drawn is not the entropy. "
    "A short run with it records what it marks."
)
_COLUMNS = (
    "group", "member", "attempt", "task_id", "kind", "end", "reward", "tokens", "action_starts", "action_ends", "logprobs", "key_steps", "key_weights",
    "step_rewards",
)  # fmt: skip


def execute(arguments: argparse.Namespace, output: Output) -> int:
    directory = find_run(arguments.run)
    rules = _parsed(arguments.rule or [])
    if not rules and arguments.function is None and arguments.min_advantage is None:
        remedy = "Give --rule KIND:ARGUMENT (several times if need be), --function task:NAME or --min-advantage N."
        raise ConfigError([Problem(key="--rule", message="Nothing says what to mark.", remedy=remedy)])
    record = Record(directory)
    markers = _markers(rules, arguments, record)
    report = Report(names=[name for name, _ in markers])
    examples: deque[tuple[Row, list[StepView], set[int]]] = deque(maxlen=arguments.limit or DEFAULT_EXAMPLES)
    for row in record.rows():
        if row["end"] in FAILURES:
            report.num_failed += 1
            continue
        steps = record.steps(row)
        by_marker = [marker(row, steps) for _, marker in markers]
        marked = report.add(row, by_marker)
        if marked and (not examples or examples[-1][0]["group"] != row["group"]):
            examples.append((row, steps, marked))
    notes = [*record.notes(rules, arguments.function is not None), _ENTROPY_NOTE]
    _print(report, list(examples), notes, directory, output)
    record.files.say_damaged(output)
    shown = [_example_object(row, marked, record) for row, _, marked in examples]
    output.result({"run_dir": str(directory), **report.as_object(), "not_shown": notes, "unreadable_files": record.files.damaged(), "examples": shown})
    return 0


Marks = Callable[[Row, list[StepView]], list[bool]]
"""[steps] of a recorded trajectory: which are marked."""


class Record:
    """The recorded trajectories of a run, read as steps."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = RecordedFiles(directory)
        settings = run_settings(directory / "config.toml")
        self._stop_strings = [str(stop) for stop in settings.get("rollout", {}).get("stop_strings", [])]
        self._is_all = settings.get("run", {}).get("record_trajectories") == "all"
        self._group_size = settings.get("rollout", {}).get("group_size")
        self._decode = decoder(directory, special_tokens=False)
        self.decode = lru_cache(65_536)(self._decoded)
        self.num_cut_groups = 0
        """Groups of which not every member is recorded."""

    @property
    def has_text(self) -> bool:
        return self._decode is not None

    def rows(self, columns: Sequence[str] = _COLUMNS) -> Iterator[Row]:
        """One file is in memory at a time."""
        for table in self.files.tables(columns):
            yield from table.to_pylist()

    def steps(self, row: Row) -> list[StepView]:
        tokens, logprobs, rewards = row["tokens"], row["logprobs"], list(row["step_rewards"])
        if rewards:
            rewards[-1] += row["reward"] - sum(rewards)  # what the recipe's reward function gave
        weights = row.get("key_weights") or [float(index in row["key_steps"]) for index in range(len(rewards))]
        steps, position, drawn = [], 0, 0
        for start, end, reward, weight in zip(row["action_starts"], row["action_ends"], rewards, weights, strict=True):
            steps.append(
                StepView(
                    observation=self.decode(tuple(tokens[position:start])),
                    action=self._cut(self.decode(tuple(tokens[start:end]))),
                    reward=reward,
                    tokens=tuple(tokens[start:end]),
                    logprobs=tuple(logprobs[drawn : drawn + end - start]),
                    key=weight,
                )
            )
            position, drawn = end, drawn + end - start
        return steps

    def outstanding(self, min_advantage: float) -> set[RolloutKey]:
        """Recorded members whose reward lies that far from the mean of what is recorded of their group."""
        groups: dict[int, dict[RolloutKey, float]] = {}
        for row in self.rows(("group", "member", "attempt", "reward", "end")):
            if row["end"] not in FAILURES:
                groups.setdefault(row["group"], {})[_key(row)] = row["reward"]
        self.num_cut_groups = sum(len(group) != self._group_size for group in groups.values()) if self._group_size else 0
        found: set[RolloutKey] = set()
        for group in groups.values():
            far = stands_out(list(group.values()), min_advantage)
            found.update(key for key, is_far in zip(group, far, strict=True) if is_far)
        return found

    def notes(self, rules: Sequence[Rule], has_function: bool) -> list[str]:
        """What is shown otherwise than a run would do it."""
        notes = []
        if not self._is_all:
            notes.append("The record holds what the learner got: groups without signal are missing (run.record_trajectories = all keeps them).")
        if self.num_cut_groups:
            notes.append(f"{self.num_cut_groups} groups are not recorded whole: their advantages are against the recorded members.")
        if has_function:
            notes.append("The function saw no entropies, and as `key` of a step its recorded mark, whatever made it.")
        return notes

    def _decoded(self, tokens: tuple[int, ...]) -> str:
        return "" if self._decode is None else self._decode(list(tokens))

    def _cut(self, action: str) -> str:
        """Before the first stop string, as the environment got it."""
        cuts = [action.find(stop) for stop in self._stop_strings if stop in action]
        return action[: min(cuts)] if cuts else action


def _parsed(texts: Sequence[str]) -> list[Rule]:
    rules, problems = [], []
    for text in texts:
        try:
            rules.append(parse_rule(text))
        except RuleError as error:
            problems.append(Problem(key="--rule", value=text, limit="KIND:ARGUMENT", message=f"{error.what[0].upper()}{error.what[1:]}.", remedy=error.remedy))
    if problems:
        raise ConfigError(problems)
    return rules


def _markers(rules: Sequence[Rule], arguments: argparse.Namespace, record: Record) -> list[tuple[str, Marks]]:
    """(name, what it marks) of everything that was asked for."""
    if not record.has_text and (arguments.function is not None or any(rule.kind is not RuleKind.REWARD for rule in rules)):
        remedy = "Try one that has a checkpoint, or rules on rewards."
        message = f"'{record.directory}' has no tokenizer: its trajectories cannot be read as text."
        raise ConfigError([Problem(key="RUN", value=str(record.directory), message=message, remedy=remedy)])
    markers: list[tuple[str, Marks]] = [(str(rule), _by_rule(rule)) for rule in rules]
    if arguments.function is not None:
        markers.append((arguments.function, RecipeFunction(arguments.function, record.directory)))
    if arguments.min_advantage is not None:
        if not arguments.min_advantage > 0:
            problem = Problem(key="--min-advantage", value=arguments.min_advantage, limit="above 0", message="'--min-advantage' must be above 0.")
            raise ConfigError([problem])
        outstanding = record.outstanding(arguments.min_advantage)
        markers.append((f"advantage >= {arguments.min_advantage:g}", lambda row, steps: [_key(row) in outstanding] * len(steps)))
    return markers


def _by_rule(rule: Rule) -> Marks:
    return lambda row, steps: [rule.marks(step) for step in steps]


class RecipeFunction:
    """The recipe's marking function on recorded rollouts. Tasks come from the recipe's source: the record holds only their names."""

    def __init__(self, reference: str, directory: Path) -> None:
        from headrace.config_loading import load_settings
        from headrace.recipe import RecipeCode
        from headrace.tasks.source import load_tasks

        if not (directory / "config.toml").is_file():
            problem = Problem(key="--function", value=reference, message=f"'{directory}' holds no config.toml that names its recipe.", remedy="Use --rule.")
            raise ConfigError([problem])
        resolved = load_settings(directory / "config.toml")
        self._code = RecipeCode(resolved.task_module, resolved.settings.task.options)
        self._function = self._code.resolve(reference)
        self._name = reference
        self._tasks = {task.id: task for task in load_tasks(str(resolved.settings.task.source), self._code)}

    def __call__(self, row: Row, steps: list[StepView]) -> list[bool]:
        from headrace.rollout.marking import WrongWeightsError, checked_weights

        task = self._tasks.get(row["task_id"]) or Task(id=row["task_id"], data={}, kind=row["kind"])
        view = TrajectoryView(task=task, steps=tuple(steps), reward=row["reward"], end_reason=EndReason(row["end"]))
        where = f"group {row['group']}.{row['member']}, task '{row['task_id']}'"
        try:
            return [weight > 0 for weight in checked_weights(_finished(self._function(view)), len(steps))]
        except WrongWeightsError as error:
            raise RecipeError(f"{self._code.path}: '{self._name}' returned {error} ({where}).", remedy="Return one weight a step.") from error
        except Exception as error:
            known = "" if row["task_id"] in self._tasks else "; the recipe's source has no such task now, so its data is empty"
            raise RecipeError(f"{self._code.path}: '{self._name}' raised {self._code.described(error)} ({where}{known}).") from error


def _finished(value: Any) -> Any:
    """A marking function may be async."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited())


def _key(row: Row) -> RolloutKey:
    return RolloutKey(row["group"], row["member"], row["attempt"])


def _example_object(row: Row, marked: set[int], record: Record) -> dict[str, Any]:
    text = record.decode(tuple(row["tokens"])) if record.has_text else None
    kept = {name: row[name] for name in ("group", "member", "task_id", "kind", "reward")}
    return {**kept, "steps": len(row["action_starts"]), "marked_steps": sorted(marked), "recorded_key_steps": list(row["key_steps"]), "text": text}


def _print(report: Report, examples: Sequence[tuple[Row, list[StepView], set[int]]], notes: Sequence[str], directory: Path, output: Output) -> None:
    console = SafeConsole(file=output.people, width=output.width, highlight=False)
    left_out = f", {report.num_failed:,} failed ones left out" if report.num_failed else ""
    whole = report.whole
    console.print(f"{directory}: {report.num_trajectories:,} trajectories, {whole.steps:,} steps, {whole.tokens:,} action tokens{left_out}", soft_wrap=True)
    console.print(_table("", [("marked", _of(whole, "marked")), ("recorded as key", _of(whole, "recorded"))], _SHARES))
    console.print(_agreement(report), soft_wrap=True)
    if len(report.by_marker) > 1:
        console.print(_table("", [(name, (f"{count:,}", _percent(count / max(1, whole.steps)))) for name, count in report.by_marker.items()], _SHARES[:2]))
    console.print(_table("step", [(name, _compared(tally)) for name, tally in report.positions()], _COMPARED))
    if len(report.by_kind) > 1:
        console.print(_table("kind", [(name, _compared(tally)) for name, tally in sorted(report.by_kind.items())], _COMPARED))
    if examples:
        console.print(_LEGEND)
    for row, steps, marked in examples:
        console.print(picture(row, steps, marked), soft_wrap=True)
    for note in notes:
        console.print(f"Note: {note}", style="dim", soft_wrap=True, markup=False)


def _agreement(report: Report) -> str:
    whole = report.whole
    text = f"{report.num_marked_trajectories:,} trajectories have a marked step. "
    if not whole.recorded_steps:
        return f"{text}The run recorded no key steps to compare with.\n"
    text += f"Of the recorded key steps {_percent(whole.found_share)} are marked"
    return f"{text}; of the marked steps {_percent(whole.agreed_share)} are recorded as key.\n" if whole.marked_steps else f"{text}.\n"


_SHARES = ("steps", "of all steps", "of all tokens")
_COMPARED = ("steps", "marked", "recorded as key", "recorded ones found")


def _of(tally: Tally, what: str) -> tuple[str, str, str]:
    steps, tokens = getattr(tally, f"{what}_steps"), getattr(tally, f"{what}_tokens")
    return f"{steps:,}", _percent(steps / max(1, tally.steps)), _percent(tokens / max(1, tally.tokens))


def _compared(tally: Tally) -> tuple[str, ...]:
    count = max(1, tally.steps)
    return f"{tally.steps:,}", _percent(tally.marked_steps / count), _percent(tally.recorded_steps / count), _percent(tally.found_share)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _table(title: str, rows: Sequence[tuple[str, Sequence[str]]], columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title)
    for name in columns:
        table.add_column(name, justify="right")
    for name, cells in rows:
        table.add_row(Text(name), *cells)
    table.add_row()
    return table


_STYLES = {(True, True): "bold green", (True, False): "bold yellow", (False, True): "bold red", (False, False): ""}
"""(marked, recorded) -> how an action is shown."""
_LEGEND = Text.assemble(
    "Examples, the newest: ", ("«marked and recorded»", "bold green"), "  ", ("«marked only»", "bold yellow"), "  ", ("‹recorded only›", "bold red")
)


def picture(row: Row, steps: Sequence[StepView], marked: set[int]) -> Text:
    """One trajectory, its marked actions in « », those that only the record has as key in ‹ ›."""
    recorded = set(row["key_steps"])
    text = Text()
    text.append(f"group {row['group']}.{row['member']}", style="bold")
    text.append(f"  task {row['task_id']}  reward {row['reward']:g}  {len(steps)} steps, {len(marked)} marked, {len(recorded)} recorded as key\n")
    body = Text()
    for index, step in enumerate(steps):
        body.append(step.observation, style="dim")
        opening, closing = ("«", "»") if index in marked else ("‹", "›") if index in recorded else ("", "")
        body.append(f"{opening}{step.action}{closing}", style=_STYLES[index in marked, index in recorded])
    if len(body) > _MAX_CHARACTERS:
        body = body[:_MAX_CHARACTERS] + Text(f" ... {len(body) - _MAX_CHARACTERS} more characters", style="dim")
    return text + body + Text("\n")
