"""rich's console for texts that a model, a task file or an error brought along: no escape sequence of theirs reaches the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from headrace.report.markup import printable


class SafeConsole(Console):
    """What a terminal would obey or not show becomes a visible stand-in; the escape sequences of rich itself stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text):  # before lines are broken: a stand-in is a column wide, what it stands for is none
            renderable = _printable_text(renderable)
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def _printable_text(text: Text) -> Text:
    plain = printable(text.plain)  # of the same length, so that styles stay where they are
    if plain == text.plain:
        return text
    shown = text.copy()
    shown.plain = plain
    return shown
