"""Functions of a recipe by their name."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import RecipeError
from headrace.recipe import RecipeCode


def test_a_function_written_in_c_that_does_not_say_what_it_takes_is_handed_out_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("reward = max\n", encoding="utf-8")
    assert RecipeCode(tmp_path / "task.py", {"key": 3}).resolve("task:reward") is max


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        ("class Panic(BaseException):\n    pass\n\nraise Panic('index out of bounds')\n", "importing it raised Panic: index out of bounds (line 4 of task.py)"),
        ("class Odd(Exception):\n    def __str__(self):\n        return 1 / 0\n\nraise Odd\n", "raised Odd: (its message cannot be shown) (line 5 of task.py)"),
    ],
    ids=["a panic of a library written in Rust", "an error whose message cannot be shown"],
)
def test_whatever_an_import_raises_is_named_with_its_line(tmp_path: Path, raised: str, says: str) -> None:
    (tmp_path / "task.py").write_text(raised, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        RecipeCode(tmp_path / "task.py", {}).resolve("task:reward")
    assert says in caught.value.message
