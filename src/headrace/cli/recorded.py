"""The files of recorded trajectories of a run, for the commands that read them: one in memory at a time, damaged ones left out and counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.cli.output import Output
from headrace.cli.runs import is_simulated
from headrace.errors import ConfigError, Problem, RunDirectoryError

REQUIRED = (
    "group", "member", "attempt", "task_id", "kind", "end", "reward", "tokens", "action_starts", "action_ends", "logprobs", "versions", "key_steps",
    "step_rewards", "steps", "update", "retired", "staleness_mean", "staleness_max", "error",
)  # fmt: skip
"""Columns that every version of the recording has."""
_MAX_NAMED = 3


class RecordedFiles:
    """trajectories/*.parquet of a run. Raises ConfigError where it holds none."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = sorted((directory / "trajectories").glob("*.parquet"))
        self._damaged: dict[Path, str] = {}
        if not self._files:
            raise _no_records(directory)

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """pyarrow tables with these columns, as far as a file has them (None: all). Raises RunDirectoryError where not one can be read."""
        for path in self._files:
            try:
                table = _read(path, columns)
            except (OSError, ValueError, LookupError, TypeError, NotImplementedError) as error:  # pyarrow's errors are among these
                self._damaged[path] = str(error).strip().partition("\n")[0].rstrip(".")
                if len(self._damaged) == len(self._files):
                    raise self._all_damaged() from error
                continue
            yield table

    def damaged(self) -> list[str]:
        """Names of files that could not be read, after `tables` has run out."""
        return [path.name for path in self._damaged]

    def say_damaged(self, output: Output) -> None:
        if not self._damaged:
            return
        told = [f"{path.name} ({why})" for path, why in list(self._damaged.items())[:_MAX_NAMED]]
        more = [f"{len(self._damaged) - _MAX_NAMED} more"] if len(self._damaged) > _MAX_NAMED else []
        where = self._directory / "trajectories"
        output.say(f"{len(self._damaged)} of {len(self._files)} files in {where} cannot be read and are left out: {', '.join(told + more)}.")

    def _all_damaged(self) -> RunDirectoryError:
        path, why = next(iter(self._damaged.items()))
        others = f"; the other {len(self._files) - 1} cannot be read either" if len(self._files) > 1 else ""
        message = f"{path}: not a whole file of trajectories: {why}{others}."
        return RunDirectoryError(message, remedy="Restore it from a copy, or give another run.", file=str(path))


def _read(path: Path, columns: Sequence[str] | None) -> Any:
    import pyarrow.parquet as parquet

    from headrace.runtime.trajectory_store import empty_table

    file = parquet.ParquetFile(path)
    present, known = file.schema_arrow.names, empty_table().schema
    missing = [name for name in REQUIRED if name not in present]
    if missing:
        raise ValueError(f"it is no recording of trajectories, column '{missing[0]}' is missing")
    table = file.read(columns=None if columns is None else [name for name in columns if name in present])
    for index, name in enumerate(table.column_names):
        if name in known.names and table.schema.field(name).type != (kind := known.field(name).type):
            table = table.set_column(index, name, table[name].cast(kind))
    return table


def _no_records(directory: Path) -> ConfigError:
    if is_simulated(directory):
        remedy = "It was simulated: nothing was sampled. Give a run of 'headrace run'."
    else:
        remedy = "The first file comes after a minute or at the end of a run; run.record_trajectories = none records nothing."
    message = f"'{directory}' holds no recorded trajectories."
    return ConfigError([Problem(key="RUN", value=str(directory), message=message, remedy=remedy)])
