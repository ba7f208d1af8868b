"""`headrace trajectories`: browse and export what a run sampled (trajectories/*.parquet, written as the run goes)."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

from headrace.cli.evaluate import find_checkpoint
from headrace.cli.output import Output
from headrace.cli.recorded import RecordedFiles
from headrace.cli.runs import find_run
from headrace.cli.safe_console import SafeConsole
from headrace.errors import ConfigError, Problem

Row = dict[str, Any]
Decode = Callable[[list[int]], str]

DEFAULT_LIMIT = 10
# oldest version first: from cold to warm, and apart in light and dark terminals
_VERSION_STYLES = ("blue", "cyan", "green", "yellow", "magenta", "red")
_MAX_CHARACTERS = 4000
_MAX_ID_CHARACTERS = 200
_HOW_TO_MARK = (
    "An environment marks one with Observation(text, key=True), a recipe with marks.rules; "
    "headrace mark {run} --rule 'observation:TEXT' shows what a rule would have marked."
)


def execute(arguments: argparse.Namespace, output: Output) -> int:
    directory = find_run(arguments.run)
    export = None if arguments.export is None else _checked_export(Path(arguments.export))
    limit = arguments.limit if arguments.limit is not None or export is not None else DEFAULT_LIMIT
    files = RecordedFiles(directory)
    decode = decoder(directory)
    found = Found(files, arguments)
    shown: list[Row] = []
    if export is not None:
        count = _export(found, export, decode, limit)
        output.say(f"{count} trajectories -> {export}")
    else:
        console = SafeConsole(file=output.people, width=shutil.get_terminal_size((100, 24)).columns, highlight=False)
        for row in found.rows(limit):
            shown.append(with_text(row, decode))
            console.print(picture(row, decode, marks=console.color_system is None), soft_wrap=False)
        output.say(f"{len(shown)} of {found.num_matched} matching trajectories shown, {found.num_recorded} recorded.")
    files.say_damaged(output)
    if (near := found.near_tasks()) is not None:
        output.say(f"No trajectory of task '{arguments.task}' is recorded." + (f" Did you mean {' or '.join(map(repr, near))}?" if near else ""))
    if arguments.key and found.num_recorded and not found.has_key_steps:
        output.say(f"No recorded step is marked as a key step. {_HOW_TO_MARK.format(run=arguments.run)}")
    counts = {"recorded": found.num_recorded, "matched": found.num_matched, "unreadable_files": files.damaged()}
    output.result({"run_dir": str(directory), **counts, "export": None if export is None else str(export), "trajectories": shown})
    return 0


class Found:
    """Rows of these files that the filters let through, in the order in which they were written; one file is in memory at a time."""

    def __init__(self, files: RecordedFiles, filters: argparse.Namespace) -> None:
        self._files, self._filters = files, filters
        self.num_recorded = self.num_matched = 0
        """After `tables` has run out."""
        self.has_key_steps = False
        """Whether any recorded step is marked, also one that the filters leave out; known then."""
        self._tasks: set[str] = set()

    def near_tasks(self) -> list[str] | None:
        """Names of recorded tasks like the one asked for, when that one is not among them; None when it is, or none was asked for."""
        asked = self._filters.task
        if asked is None or asked in self._tasks:
            return None
        return difflib.get_close_matches(asked, sorted(self._tasks), n=3)

    def tables(self) -> Iterator[Any]:
        """pyarrow tables."""
        for table in self._files.tables():
            if self._filters.task is not None:
                self._tasks.update(table["task_id"].unique().to_pylist())
            self.has_key_steps = self.has_key_steps or any(table["key_steps"].to_pylist())
            matching = table.filter(self._matching(table))
            self.num_recorded += table.num_rows
            self.num_matched += matching.num_rows
            yield matching

    def rows(self, limit: int | None) -> Iterator[Row]:
        """The first `limit`; the files are read to their end to count."""
        given = 0
        for table in self.tables():
            wanted = table.num_rows if limit is None else max(0, min(table.num_rows, limit - given))
            given += wanted
            yield from table.slice(0, wanted).to_pylist()

    def _matching(self, table: Any) -> Any:
        """[rows] which to keep; a null (no staleness: never trained) matches no bound."""
        import pyarrow as pa
        import pyarrow.compute as compute

        wanted = self._filters
        keep = pa.array([True] * table.num_rows, type=pa.bool_())
        conditions: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            (wanted.task, lambda value: compute.equal(table["task_id"], value)),
            (wanted.min_reward, lambda value: compute.greater_equal(table["reward"], value)),
            (wanted.max_reward, lambda value: compute.less_equal(table["reward"], value)),
            (wanted.min_staleness, lambda value: compute.greater_equal(table["staleness_max"], value)),
            (wanted.key or None, lambda value: compute.greater(compute.list_value_length(table["key_steps"]), 0)),
        )
        for given, make in conditions:
            if given is not None:
                keep = compute.and_(keep, compute.fill_null(make(given), False))
        return keep


def picture(row: Row, decode: Decode | None, *, marks: bool = False) -> Text:
    """One trajectory: what is known of it, then its text with actions coloured by policy version and key steps underlined.

    `marks`: where colours do not show, actions stand in «», those of key steps in «★ ».
    """
    update = f"update {row['update']}" if row["update"] is not None else row["retired"]
    age = f"  staleness {row['staleness_mean']:.1f}, max {row['staleness_max']}" if row["staleness_max"] is not None else ""
    text = Text()
    text.append(f"group {row['group']}.{row['member']}", style="bold")
    text.append(
        f"  task {_one_line(row['task_id'])}  reward {row['reward']:g}  {row['end']}  {update}{age}  {row['steps']} steps, {len(row['key_steps'])} key\n"
    )
    versions = sorted(set(row["versions"]))
    for version in versions:
        text.append(f" version {version} ", style=_version_style(version, versions))
    text.append(" actions in «», key ones in «★ »\n" if marks else "\n")
    if row["error"]:
        text.append(f"{row['error']}\n", style="red")
    body = _body(row, versions, decode, marks)
    if len(body) > _MAX_CHARACTERS:
        body = body[:_MAX_CHARACTERS] + Text(f" ... {len(body) - _MAX_CHARACTERS} more characters: --export", style="dim")
    return text + body + Text("\n")


def _one_line(text: str) -> str:
    short = text if len(text) <= _MAX_ID_CHARACTERS else f"{text[:_MAX_ID_CHARACTERS]}..."
    return short.replace("\n", "\u2424")


def _body(row: Row, versions: list[int], decode: Decode | None, marks: bool) -> Text:
    body, position, taken = Text(), 0, 0
    key_steps = set(row["key_steps"])
    for index, (start, end) in enumerate(zip(row["action_starts"], row["action_ends"], strict=True)):
        body.append(_shown(row["tokens"][position:start], decode), style="dim")
        underline = " underline" if index in key_steps else ""
        if marks:
            body.append("«★ " if underline else "«")
        for first, last, version in _runs(row["versions"][taken : taken + end - start]):
            body.append(_shown(row["tokens"][start + first : start + last], decode), style=f"bold {_version_style(version, versions)}{underline}")
        if marks:
            body.append("»")
        taken += end - start
        position = end
    return body + Text(_shown(row["tokens"][position:], decode), style="dim")


def with_text(row: Row, decode: Decode | None) -> Row:
    """The row with its text; null where no tokenizer was found."""
    return {**row, "text": None if decode is None else decode(row["tokens"])}


def _runs(versions: list[int]) -> Iterator[tuple[int, int, int]]:
    """(start, end, version) of each stretch of one version."""
    start = 0
    for index in range(1, len(versions) + 1):
        if index == len(versions) or versions[index] != versions[start]:
            yield start, index, versions[start]
            start = index


def _version_style(version: int, versions: list[int]) -> str:
    index = versions.index(version)
    spread = len(versions) - 1
    return _VERSION_STYLES[round(index / spread * (len(_VERSION_STYLES) - 1)) if spread else 2]


def _shown(tokens: list[int], decode: Decode | None) -> str:
    if decode is None:
        return "".join(f"{token} " for token in tokens)
    return decode(tokens)


def decoder(directory: Path, *, special_tokens: bool = True) -> Decode | None:
    """Of the run's newest checkpoint, else of the model it started from; None where neither is there (yet) or can be read."""
    for model in _model_directories(directory):
        try:
            if (decode := _decode_of(model, special_tokens)) is not None:
                return decode
        except Exception:  # whatever the libraries make of files that are damaged, or that want Python of the model to run
            continue
    return None


def _decode_of(model: Path, special_tokens: bool) -> Decode | None:
    if (model / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(model / "tokenizer.json"))
        return lambda tokens: str(fast.decode(tokens, skip_special_tokens=not special_tokens))
    if (model / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
        return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=not special_tokens))
    return None


def _model_directories(directory: Path) -> Iterator[Path]:
    try:
        yield find_checkpoint(directory)[0]
    except ConfigError:
        pass
    import tomllib

    try:
        path = tomllib.loads((directory / "config.toml").read_text(encoding="utf-8")).get("model", {}).get("path")
    except (OSError, ValueError):
        return
    if path is not None:
        yield Path(path)


def _checked_export(path: Path) -> Path:
    if path.suffix not in (".parquet", ".jsonl"):
        message = f"--export '{path}' ends in neither .parquet nor .jsonl."
        raise ConfigError([Problem(key="--export", value=str(path), limit=".parquet or .jsonl", message=message, remedy="The ending says what to write.")])
    if path.is_dir():
        raise ConfigError([Problem(key="--export", value=str(path), message=f"'{path}' is a directory.", remedy="Give a file to --export.")])
    return path


def _export(found: Found, path: Path, decode: Decode | None, limit: int | None) -> int:
    """Writes aside and renames, so that a cut export leaves nothing that looks whole."""
    aside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        count = _write_parquet(found, aside, decode, limit) if path.suffix == ".parquet" else _write_jsonl(found, aside, decode, limit)
        aside.replace(path)
    except OSError as error:
        raise ConfigError([Problem(key="--export", value=str(path), message=f"'{path}' cannot be written: {error.strerror}.")]) from error
    finally:
        with contextlib.suppress(OSError):  # its directory could not be made
            aside.unlink(missing_ok=True)
    return count


def _write_jsonl(found: Found, path: Path, decode: Decode | None, limit: int | None) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in found.rows(limit):
            file.write(json.dumps(with_text(row, decode)) + "\n")
            count += 1
    return count


def _write_parquet(found: Found, path: Path, decode: Decode | None, limit: int | None) -> int:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from headrace.runtime.trajectory_store import empty_table

    schema = empty_table().schema.append(pa.field("text", pa.string()))
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in found.tables():
            wanted = table.slice(0, table.num_rows if limit is None else max(0, limit - count))
            texts = [None if decode is None else decode(tokens) for tokens in wanted["tokens"].to_pylist()]
            for column in schema.names[:-1]:
                if column not in wanted.column_names:  # recorded by an older version
                    wanted = wanted.append_column(column, pa.nulls(wanted.num_rows, schema.field(column).type))
            writer.write_table(wanted.append_column("text", pa.array(texts, type=pa.string())).select(schema.names).cast(schema))
            count += wanted.num_rows
    return count
