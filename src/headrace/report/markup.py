"""HTML pieces. What comes from a run, a task or a model becomes HTML here and nowhere else: escaped unless it is Markup."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_VOID = frozenset({"meta", "br", "col"})


class Markup(str):
    """A text that is HTML already."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure: plotly's data and layout as plain values. A colour is `$name`, a CSS variable `--name` of the page."""

    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 300
    """CSS pixels."""


def printable(value: object) -> str:
    """Control characters and lone surrogates, which no HTML file can hold, become visible stand-ins."""
    text = _CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])) if ord(match[0]) < 32 else "\u2421", str(value))
    return _SURROGATE.sub("\ufffd", text)


def escape(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(html.escape(printable(value), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """`class_` and `data_x` become `class` and `data-x`; an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(printable(value), quote=True)}"' for key, value in attributes.items() if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(parts: Iterable[object], separator: str = "") -> Markup:
    return Markup(separator.join(escape(part) for part in parts if part is not None))


def table(header: Sequence[object], rows: Iterable[Sequence[object]], *, class_: str | None = None) -> Markup:
    """Scrolls sideways in itself where it is too wide. Cells that are numbers, or texts that begin like one, stand right."""
    head = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in header)))
    body = tag("tbody", *(tag("tr", *(_cell(cell) for cell in row)) for row in rows))
    return tag("div", tag("table", head, body, class_=class_), class_="scroll", tabindex="0")


def _cell(cell: object) -> Markup:
    number = isinstance(cell, int | float) or (
        isinstance(cell, str) and not isinstance(cell, Markup) and re.fullmatch(r"[-+<]?[\d.,]+( ?(%|s|min|h|x).*)?|–", cell)
    )
    return tag("td", number_text(cell) if isinstance(cell, int | float) else cell, class_="number" if number else None)


def number_text(value: float | None, digits: int = 3) -> str:
    """For people: 12,345, 0.0123; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if isinstance(value, int) or abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def percent(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 1 %" if 0 < value < 0.01 else f"{value:.0%}".replace("%", " %")


def figure(chart: Chart | None) -> Markup | None:
    """Plotly's values lie beside the place where the page's script draws them."""
    if chart is None:
        return None
    place = tag("div", class_="plot", style=f"height:{chart.height}px", role="img", aria_label=f"{chart.title}. {chart.caption}")
    values = tag("script", data_json({"data": chart.data, "layout": chart.layout}), type="application/json")
    return tag("figure", tag("h3", chart.title), place, values, tag("figcaption", chart.caption))


def data_json(value: object) -> Markup:
    """JSON that no HTML parser can take for the end of its script element."""
    text = json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def plotly_text(value: object) -> str:
    """Plotly reads its texts as a small HTML: names from a run must not become tags."""
    return html.escape(printable(value), quote=False)


def _plain(value: object) -> Any:
    """Floats to 5 significant digits, non-finite ones to null."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
