"""Tasks from tables: Parquet files and Hugging Face datasets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from headrace.errors import ConfigError, RecipeError
from headrace.recipe import RecipeCode
from headrace.tasks.source import ListTaskSource, load_tasks
from headrace.types import Task

ROWS: list[dict[str, Any]] = [
    {"id": "a", "kind": None, "prompt": "p", "choices": ["x", "y"], "answer": 3},
    {"id": "b", "kind": "long", "prompt": "q", "choices": None, "answer": 4},
    {"id": "c", "kind": None, "prompt": "r", "choices": [], "answer": None},
]


def make_code(directory: Path) -> RecipeCode:
    (directory / "task.py").touch()
    return RecipeCode(directory / "task.py", {})


def write(path: Path, rows: list[dict[str, Any]], *, rows_a_group: int = 2) -> None:
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=rows_a_group)


def test_rows_of_several_row_groups_are_tasks_and_a_null_is_no_key(tmp_path: Path) -> None:
    write(tmp_path / "tasks.parquet", ROWS)
    assert parquet.ParquetFile(tmp_path / "tasks.parquet").num_row_groups == 2
    assert load_tasks("tasks.parquet", make_code(tmp_path)) == [
        Task(id="a", data={"prompt": "p", "choices": ["x", "y"], "answer": 3}),
        Task(id="b", kind="long", data={"prompt": "q", "answer": 4}),
        Task(id="c", data={"prompt": "r", "choices": []}),
    ]


def test_a_table_gives_the_tasks_that_the_same_lines_give_and_goes_on_at_any_position(tmp_path: Path) -> None:
    rows = [{"id": index, "data": {"prompt": f"p{index}", "answer": index}} for index in range(3000)]
    write(tmp_path / "tasks.parquet", rows, rows_a_group=700)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = load_tasks("tasks.parquet", make_code(tmp_path))
    assert tasks == load_tasks("tasks.jsonl", make_code(tmp_path))
    whole, resumed = ListTaskSource(tasks, seed=1), ListTaskSource(load_tasks("tasks.parquet", make_code(tmp_path)), seed=1)
    resumed.position = 2500
    assert [resumed.next().id for _ in range(1000)] == [whole.next().id for _ in range(3500)][2500:]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"id": "a"}, {"id": "a"}], "row 2: id 'a' was already used (row 1)"),
        ([{"id": "a", "x": 1}, {"id": None, "x": 1}], "row 2: key 'id' is missing"),
        ([{"id": "a", "x": b"bytes"}], "row 1: the value of 'x' is not JSON"),
        ([{"id": "a", "x": float("nan")}], "row 1: the value of 'x' is not JSON"),
        ([{"id": "a", "data": {"x": 1}, "y": 2}], "row 1: key 'y' stands beside 'data'"),
    ],
)
def test_a_wrong_row_is_named_with_file_row_and_key(tmp_path: Path, rows: list[dict[str, Any]], told: str) -> None:
    write(tmp_path / "tasks.parquet", rows)
    with pytest.raises(RecipeError) as caught:
        load_tasks("tasks.parquet", make_code(tmp_path))
    assert f"{tmp_path}/tasks.parquet, {told}" in str(caught.value)


@pytest.mark.parametrize(
    "spoil", [lambda whole: b"", lambda whole: b'{"id": "a"}', lambda whole: whole[:-20], lambda whole: b"PAR1" + bytes(300) + whole[304:]]
)
def test_a_damaged_file_is_named(tmp_path: Path, spoil: Any) -> None:
    path = tmp_path / "tasks.parquet"
    write(path, [{"id": str(index), "prompt": f"text {index}" * 9} for index in range(400)])
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(RecipeError, match=r"tasks\.parquet.*not a whole Parquet file") as caught:
        load_tasks("tasks.parquet", make_code(tmp_path))
    assert caught.value.remedy


def test_a_missing_table_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.parquet cannot be read \(No such file") as caught:
        load_tasks("no.parquet", make_code(tmp_path), setting="task.evaluation_source")
    assert (caught.value.problems[0].key, caught.value.problems[0].value) == ("task.evaluation_source", "no.parquet")


@pytest.mark.parametrize(
    ("reference", "asked"),
    [("hf:owner/set", ("owner/set", None, "train")), ("hf:set:test", ("set", None, "test")), ("hf:owner/set:main:test[:10]", None)],
)
def test_a_dataset_is_asked_for_by_name_configuration_and_split(
    reference: str, asked: tuple[str, str | None, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, configuration: str | None, *, split: str) -> list[dict[str, Any]]:
        calls.append((name, configuration, split))
        return [{"prompt": "p", "kind": None}, {"prompt": "q", "kind": "long"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    tasks = load_tasks(reference, make_code(tmp_path))
    assert tasks == [Task(id="1", data={"prompt": "p"}), Task(id="2", kind="long", data={"prompt": "q"})], "the row's number is the id where it has none"
    assert calls == [asked or ("owner/set", "main", "test[:10]")]


@pytest.mark.parametrize("reference", ["hf:", "hf::test", "hf:set:", "hf:a:b:c:d"])
def test_a_name_of_no_dataset_says_how_to_write_one(reference: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf:NAME:CONFIGURATION:SPLIT") as caught:
        load_tasks(reference, make_code(tmp_path))
    assert (caught.value.problems[0].key, caught.value.problems[0].value) == ("task.source", reference)


def test_without_the_package_it_is_said_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"task\.source names.*'hf:set'.*pip install 'headrace\[hf\]'"):
        load_tasks("hf:set", make_code(tmp_path))


def test_what_the_library_says_of_a_dataset_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise FileNotFoundError("Dataset 'owner/no' doesn't exist\non the Hub.")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ConfigError, match=r"split 'train' of 'owner/no' cannot be read: Dataset 'owner/no' doesn't exist on the Hub\. "):
        load_tasks("hf:owner/no", make_code(tmp_path))


def test_the_library_itself_reads_a_dataset(tmp_path: Path) -> None:
    """From a folder, as it would from the hub."""
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.parquet", ROWS)
    assert load_tasks(f"hf:{tmp_path}/set:train[:2]", make_code(tmp_path))[1] == Task(id="b", kind="long", data={"prompt": "q", "answer": 4})
