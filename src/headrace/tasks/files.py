"""What lies in a file of tasks or in a Hugging Face dataset: (place, object) after object, read piece by piece.

A line of a JSONL file and a row of a Parquet file or of a dataset are the same: `id`, optionally `kind`, and either `data` or the data's
keys beside them. In a table every row has every column, so a null is a key that is not there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from headrace.errors import ConfigError, Problem, RecipeError

HUB = "hf:"
"""Begins the name of a Hugging Face dataset: `hf:NAME`, `hf:NAME:SPLIT` or `hf:NAME:CONFIGURATION:SPLIT`."""
_SPLIT = "train"
_COLON = r":(?![^\[]*\])"
"""None of a slice: `train[:10]`."""
_ROWS_AT_ONCE = 1024

Numbered = Iterator[tuple[str, Any]]


def read_file(path: Path, reference: str, setting: str) -> Numbered:
    """Rows of a file that ends in .parquet, lines of any other. Raises ConfigError or RecipeError."""
    try:
        with path.open("rb") as file:
            yield from _parquet_rows(file, path) if path.suffix.lower() == ".parquet" else _json_lines(file, path)
    except OSError as error:
        message = f"{setting} names '{reference}', but {path} cannot be read ({error.strerror or error})."
        remedy = f"Paths are relative to the recipe; functions are written `task:function`, Hugging Face datasets `{HUB}NAME`."
        raise ConfigError([Problem(key=setting, value=reference, message=message, remedy=remedy)]) from error


def _json_lines(file: IO[bytes], path: Path) -> Numbered:
    for number, line in enumerate(file, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path}, line {number}: not UTF-8 text ({error.reason}).", remedy="Save the file as UTF-8.") from error
        if not text.strip():
            continue
        try:
            item = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:  # the latter: brackets in brackets without end
            raise RecipeError(f"{path}, line {number}: not JSON ({error}).", remedy="Write one JSON object a line.") from error
        yield f"line {number}", item


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parquet_rows(file: IO[bytes], path: Path) -> Numbered:
    import pyarrow.parquet as parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=_ROWS_AT_ONCE):  # of one row group after the other
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", _without_nulls(row)
    except (OSError, ValueError) as error:  # pyarrow's errors are among these
        where = f"{path}, after row {number}" if number else str(path)
        what = str(error).strip().partition("\n")[0].rstrip(".")
        raise RecipeError(f"{where}: not a whole Parquet file ({what}).", remedy="Write it again, or restore it from a copy.") from error


def read_dataset(reference: str, setting: str) -> Numbered:
    """Rows of the dataset that `hf:...` names. Without a column `id` the row's number is the id. Raises ConfigError."""
    name, configuration, split = _dataset_of(reference, setting)
    try:
        import datasets
    except ImportError as error:
        message = f"{setting} names the Hugging Face dataset '{reference}', but the package datasets cannot be imported ({error})."
        raise ConfigError([Problem(key=setting, value=reference, message=message, remedy="Install it: pip install 'headrace[hf]'.")]) from error
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(name, configuration, split=split)
        for number, row in enumerate(rows, start=1):
            yield f"row {number}", {"id": number, **_without_nulls(row)}
    except Exception as error:  # the library has dozens of kinds, its own, of the hub and of the network among them
        what = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        message = f"{setting} names the Hugging Face dataset '{reference}', but split '{split}' of '{name}' cannot be read: {what}."
        limit = f"{HUB}NAME, {HUB}NAME:SPLIT or {HUB}NAME:CONFIGURATION:SPLIT"
        remedy = "Correct the name, or see that the hub can be reached."
        raise ConfigError([Problem(key=setting, value=reference, limit=limit, message=message, remedy=remedy)]) from error


def _dataset_of(reference: str, setting: str) -> tuple[str, str | None, str]:
    """(name, configuration, split)"""
    match re.split(_COLON, reference.removeprefix(HUB)):
        case [name] if name:
            return name, None, _SPLIT
        case [name, split] if name and split:
            return name, None, split
        case [name, configuration, split] if name and configuration and split:
            return name, configuration, split
    limit = f"{HUB}NAME, {HUB}NAME:SPLIT or {HUB}NAME:CONFIGURATION:SPLIT"
    message = f"{setting} is '{reference}', which names no Hugging Face dataset."
    raise ConfigError([Problem(key=setting, value=reference, limit=limit, message=message, remedy=f"Write {limit}.")])


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}
