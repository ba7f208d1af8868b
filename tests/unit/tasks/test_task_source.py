"""Task sources: order, resuming, and every mistake of a data set named with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.config import Settings
from headrace.errors import ConfigError, HeadraceError, RecipeError
from headrace.recipe import RecipeCode
from headrace.tasks import source as task_source
from headrace.tasks.source import ListTaskSource, evaluation_tasks, load_tasks, make_task_source, split_tasks
from headrace.types import Task


def make_code(directory: Path, text: str = "", **options: object) -> RecipeCode:
    path = directory / "task.py"
    path.write_text("from headrace.types import Task\n" + text, encoding="utf-8")
    return RecipeCode(path, options)


def make_settings(source: str, num_evaluation_tasks: int = 1, **task: object) -> Settings:
    return Settings.model_validate({"task": {"source": source, **task}, "evaluation": {"num_tasks": num_evaluation_tasks}, "run": {"seed": 3}})


def some_tasks(count: int) -> list[Task]:
    return [Task(id=str(index), data={}) for index in range(count)]


def take(source: ListTaskSource, count: int) -> list[str]:
    return [source.next().id for _ in range(count)]


def test_each_epoch_holds_each_task_once_in_an_order_of_its_own() -> None:
    source = ListTaskSource(some_tasks(20), seed=1)
    first, second = take(source, 20), take(source, 20)
    assert sorted(first) == sorted(second) == sorted(str(index) for index in range(20))
    assert first != second


def test_the_order_depends_on_the_seed_only() -> None:
    assert take(ListTaskSource(some_tasks(20), seed=1), 50) == take(ListTaskSource(some_tasks(20), seed=1), 50)
    assert take(ListTaskSource(some_tasks(20), seed=1), 20) != take(ListTaskSource(some_tasks(20), seed=2), 20)


@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 20, 21])
def test_a_source_set_to_a_position_goes_on_as_if_it_had_never_stopped(position: int) -> None:
    whole = take(ListTaskSource(some_tasks(7), seed=5), 40)
    resumed = ListTaskSource(some_tasks(7), seed=5)
    resumed.position = position
    assert take(resumed, 40 - position) == whole[position:]
    assert resumed.position == 40


def test_a_source_without_shuffle_keeps_the_order() -> None:
    assert take(ListTaskSource(some_tasks(3), seed=1, shuffle=False), 5) == ["0", "1", "2", "0", "1"]


def test_a_limited_source_ends_after_its_epochs() -> None:
    source = ListTaskSource(some_tasks(2), seed=0, num_epochs=2)
    take(source, 4)
    with pytest.raises(StopIteration):
        source.next()
    assert source.position == 4


def test_tasks_are_read_from_lines_with_or_without_a_data_object(tmp_path: Path) -> None:
    lines = [{"id": "a", "prompt": "p", "answer": 3}, {"id": 7, "kind": "long", "data": {"prompt": "q"}}]
    (tmp_path / "tasks.jsonl").write_text("\ufeff" + "\n\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    assert load_tasks("tasks.jsonl", make_code(tmp_path)) == [
        Task(id="a", data={"prompt": "p", "answer": 3}),
        Task(id="7", kind="long", data={"prompt": "q"}),
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: a list where a task belongs"),
        ('{"prompt": "p"}', "line 2: key 'id' is missing"),
        ('{"id": null}', "line 2: key 'id' is None"),
        ('{"id": true}', "line 2: key 'id' is True"),
        ('{"id": ""}', "line 2: key 'id' is ''"),
        ('{"id": "a"}', "line 2: id 'a' was already used (line 1)"),
        ('{"id": "b", "kind": 3}', "line 2: key 'kind' is 3"),
        ('{"id": "\\ud800"}', "line 2: key 'id' is '\\ud800', which is half a character"),
        ('{"id": "b", "kind": "\\udc00"}', "line 2: key 'kind' is '\\udc00', which is half a character"),
        ('{"id": "b", "data": "text"}', "line 2: key 'data' is a str"),
        ('{"id": "b", "data": {}, "prompt": "p"}', "line 2: key 'prompt' stands beside 'data'"),
        ('{"id": "b", "x": NaN}', "line 2: not JSON (NaN is not JSON)"),
    ],
)
def test_a_wrong_line_is_named_with_file_line_and_key(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_tasks("tasks.jsonl", make_code(tmp_path))
    assert f"{tmp_path}/tasks.jsonl, {told}" in str(caught.value)
    assert caught.value.remedy or "already used" in told


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(b'{"id": "a"}\n{"id": "\xff"}\n')
    with pytest.raises(RecipeError, match="line 2: not UTF-8"):
        load_tasks("tasks.jsonl", make_code(tmp_path))


def test_a_missing_file_is_a_wrong_setting_named_with_its_key_and_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tasks("no.jsonl", make_code(tmp_path))
    problem = caught.value.problems[0]
    assert (problem.key, problem.value) == ("task.source", "no.jsonl")
    assert str(tmp_path / "no.jsonl") in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(text)
    with pytest.raises(RecipeError, match="holds no tasks"):
        load_tasks("tasks.jsonl", make_code(tmp_path))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise ValueError('no data')", "raised ValueError: no data"),
        ("return None", "returned a NoneType"),
        ("return 'abc'", "returned a str"),
        ("return []", "holds no tasks"),
        ("return [3]", "task number 1: a int where a task belongs"),
        ("return [{'id': 'a'}, {'id': 'a'}]", "task number 2: id 'a' was already used (task number 1)"),
        ("return [{'id': 'a', 'x': {1, 2}}]", "task number 1: the value of 'x' is not JSON"),
        ("return [{'id': 'a', 'x': float('nan')}]", "task number 1: the value of 'x' is not JSON"),
        ("deep = []\n    for _ in range(100_000):\n        deep = [deep]\n    return [{'id': 'a', 'x': deep}]", "task number 1: the value of 'x' is not JSON"),
        ("return [Task(id='a', data={3: 4})]", "task number 1: the data's key 3 is a int"),
        ("yield {'id': 'a'}\n    raise KeyError('gone')", "task number 2: it raised KeyError"),
    ],
)
def test_a_wrong_function_is_named_with_file_and_task(tmp_path: Path, body: str, told: str) -> None:
    code = make_code(tmp_path, f"def tasks():\n    {body}\n")
    with pytest.raises(RecipeError) as caught:
        load_tasks("task:tasks", code)
    assert str(code.path) in str(caught.value)
    assert told in str(caught.value)


def test_an_async_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is async"):
        load_tasks("task:tasks", make_code(tmp_path, "async def tasks():\n    return []\n"))


def test_an_endless_generator_gives_a_limited_number_of_tasks_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(task_source, "MAX_GENERATED_TASKS", 50)
    code = make_code(tmp_path, "import itertools\ndef tasks(start=0):\n    return ({'id': i} for i in itertools.count(start))\n", start=5)
    assert [task.id for task in load_tasks("task:tasks", code)] == [str(index) for index in range(5, 55)]
    assert "the first 50 are used" in caplog.text


def test_a_list_of_a_function_is_taken_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_source, "MAX_GENERATED_TASKS", 5)
    assert len(load_tasks("task:tasks", make_code(tmp_path, "def tasks():\n    return [{'id': i} for i in range(9)]\n"))) == 9


def test_evaluation_tasks_are_set_apart_from_training_tasks(tmp_path: Path) -> None:
    code = make_code(tmp_path, "def tasks():\n    return [{'id': i} for i in range(9)]\n")
    settings = make_settings("task:tasks", 3)
    evaluation = [task.id for task in evaluation_tasks(settings, code)]
    training = take(make_task_source(settings, code), 6)
    assert evaluation == ["0", "1", "2"]
    assert sorted(training) == ["3", "4", "5", "6", "7", "8"]


def test_an_evaluation_source_leaves_all_tasks_to_training(tmp_path: Path) -> None:
    code = make_code(tmp_path, "def tasks():\n    return [{'id': i} for i in range(4)]\ndef held():\n    return [{'id': f'h{i}'} for i in range(9)]\n")
    training, evaluation = split_tasks(make_settings("task:tasks", 5, evaluation_source="task:held"), code)
    assert len(training) == 4
    assert [task.id for task in evaluation] == ["h0", "h1", "h2", "h3", "h4"]


def test_a_source_too_small_to_set_tasks_apart_is_refused_with_the_setting_to_change(tmp_path: Path) -> None:
    code = make_code(tmp_path, "def tasks():\n    return [{'id': i} for i in range(3)]\n")
    with pytest.raises(ConfigError) as caught:
        make_task_source(make_settings("task:tasks", 3), code)
    assert caught.value.problems[0].key == "evaluation.num_tasks"
    assert caught.value.exit_code == 2


def test_a_function_of_another_module_name_is_refused_with_the_right_form(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="task:tasks"):
        load_tasks("tsak:tasks", make_code(tmp_path, "def tasks():\n    return []\n"))
