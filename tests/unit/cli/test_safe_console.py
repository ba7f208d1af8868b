"""What a model, a task file or an error brought along cannot steer the terminal."""

from __future__ import annotations

import ast
import io
import sys
import unicodedata
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from headrace.cli.output import Output
from headrace.cli.safe_console import SafeConsole
from headrace.report.markup import printable

HOSTILE = "\x1b]0;owned\x07 \x1b[2J \x9b31m a\rb \x7f"


def controls(text: str) -> list[str]:
    return [character for character in text if character != "\n" and (ord(character) < 32 or 127 <= ord(character) < 160)]


def test_no_control_character_of_a_text_reaches_the_terminal() -> None:
    file = io.StringIO()
    SafeConsole(file=file, width=80, force_terminal=False).print(Text(HOSTILE), HOSTILE, markup=False)
    assert controls(file.getvalue()) == []
    assert "owned" in file.getvalue()


def test_colours_are_kept() -> None:
    file = io.StringIO()
    SafeConsole(file=file, width=80, force_terminal=True, color_system="standard").print(Text(HOSTILE, style="red"))
    assert "\x1b[31m" in file.getvalue()
    assert "\x1b]0" not in file.getvalue() and "\x1b[2J" not in file.getvalue()


def test_errors_and_lines_on_stderr_are_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(command=None, json=False) as output:
        output.say(HOSTILE)
    assert controls(capsys.readouterr().err) == []


def test_every_invisible_character_becomes_a_visible_one_of_the_same_length() -> None:
    signs = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13460)}
    """Of the category Cf, but seen: number signs of Arabic, Syriac, Kaithi, and how hieroglyphs stand to each other."""
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and code not in signs and character not in "\n\t":
            shown = printable(f"a{character}b")
            assert len(shown) == 3 and character not in shown, hex(code)
            assert unicodedata.category(shown[1]) == "So", hex(code)


@pytest.mark.parametrize("control", [*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\u2028\u2029\u200b\u2060\ufeff"])
def test_what_reorders_or_hides_is_shown_as_a_stand_in_everywhere(control: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Output(command=None, json=False) as output:
        output.say(f"user{control}txt.exe")
        output.show(f"user{control}txt.exe")
        table = Table("name")
        table.add_row(f"user{control}txt.exe")
        SafeConsole(file=output.people, width=80).print(table)
    shown = "".join(capsys.readouterr())
    assert control not in shown
    assert len(shown.splitlines()) == 2 + 5  # rich's table has five
    assert shown.count(printable(f"user{control}txt.exe")) == 3


@pytest.mark.parametrize(
    "text",
    [
        "می\u200cخواهم", "क्\u200dष", "ක්\u200dෂ", "שלום", "مرحبا \u0661\u0662", "ไทย", "한국어", "e\u0301 n\u0303", "тест\u0301", "汉字",
        "👩\u200d💻", "👨\u200d👩\u200d👧", "👩🏽\u200d🚀", "❤\ufe0f\u200d🔥", "🏳\ufe0f\u200d🌈", "🇯🇵", "1\ufe0f\u20e3",
        "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
        "a\tb\nc",
    ],
)  # fmt: skip
def test_ordinary_text_of_every_script_and_emoji_stay(text: str) -> None:
    assert printable(text) == text


def test_a_joiner_that_joins_nothing_is_seen() -> None:
    assert printable("ad\u200dmin \u200d 👩\u200d\u200d💻") == "ad\u2426min \u2426 👩\u200d\u2426💻"


def test_stand_ins_have_room_in_a_table() -> None:
    table = Table()
    table.add_column("a", overflow="fold")
    table.add_column("b", overflow="fold")
    table.add_row("\x1b" * 200 + "\u202e" * 200, Text("\u200b" * 300))
    file = io.StringIO()
    SafeConsole(file=file, width=60).print(table)
    lines = file.getvalue().splitlines()
    assert {len(line) for line in lines} == {len(lines[0])} and len(lines[0]) <= 60
    assert file.getvalue().count("\u2426") == 500


def test_no_command_prints_for_people_past_output() -> None:
    package = Path(__file__).parents[3] / "src/headrace/cli"
    found = []
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                found.append(path.name)
    assert sorted(found) == ["config.py", "output.py", "output.py"]  # config.py: what a SafeConsole has made
