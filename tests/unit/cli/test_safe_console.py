"""What a model, a task file or an error brought along cannot steer the terminal."""

from __future__ import annotations

import io

import pytest
from rich.text import Text

from headrace.cli.output import Output
from headrace.cli.safe_console import SafeConsole

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
