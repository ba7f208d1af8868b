"""rich's console for texts that a model, a task file or an error brought along: no escape sequence of theirs reaches the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from headrace.report.markup import printable


class SafeConsole(Console):
    """Control characters in a text become visible stand-ins; those of rich itself stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
