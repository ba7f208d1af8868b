"""HTML pieces. What comes from a run, a task or a model becomes HTML here and nowhere else: escaped unless it is Markup."""

from __future__ import annotations

import html
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_UNSEEN = re.compile(
    r"\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,6}\U000e007f"  # flags of England, Scotland, Wales: shown
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
    r"|[\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f\ud800-\udfff]"
)
_JOINERS = "\u200c\u200d"
_NUMBER = re.compile(r"(\d+ of \d+: )?[-+]?(<\s)?\d[\d.,e-]*(\s?(%|s|min|h))?( / [\d.,]+)?( \(.*\))?|–")
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
    """What a terminal would obey, what reorders or hides text, and what no file can hold becomes a visible stand-in, one for one.

    That is controls, lone surrogates, and Unicode's invisible characters of format (directions U+202A..2E and U+2066..69, marks of
    direction, line separators, no-width spaces, tags). Kept: the joiners U+200C and U+200D after a letter, mark or symbol beyond ASCII,
    where Persian, Indic scripts and emoji are written with them (they turn nothing round), and signs of a script that are seen.
    """
    return _UNSEEN.sub(_stand_in, str(value))


def _stand_in(match: re.Match[str]) -> str:
    character, code = match[0], ord(match[0][0])
    if len(character) > 1 or (character in _JOINERS and _joins(match.string[max(0, match.start() - 1) : match.start()])):
        return character
    if 0xD800 <= code <= 0xDFFF:
        return "\ufffd"
    if code < 32:
        return chr(0x2400 + code)
    if code < 0xA0:
        return "\u2421"
    return "\u2424" if character in "\u2028\u2029" else "\u2426"


def _joins(before: str) -> bool:
    return before > "\x7f" and unicodedata.category(before)[0] in "LMS"


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
    """Scrolls sideways in itself where it is too wide. Columns of numbers, or of texts that begin like one, stand right."""
    cells = [list(row) for row in rows]
    kinds = [_column_class([row[index] for row in cells]) for index in range(len(header))]
    head = tag("thead", tag("tr", *(tag("th", cell, scope="col", class_=kind) for cell, kind in zip(header, kinds, strict=True))))
    body = tag("tbody", *(tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in cells))
    return tag("div", tag("table", head, body, class_=class_), class_="scroll", tabindex="0")


def _column_class(cells: Sequence[object]) -> str | None:
    texts = [str(cell) for cell in cells if not isinstance(cell, Markup)]
    numbers = [_NUMBER.fullmatch(text) for text in texts]
    return "number" if texts and all(numbers) and any(text != "–" for text in texts) else None


def number_text(value: float | None, digits: int = 3) -> str:
    """For people: 12,345, 0.0123; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if isinstance(value, int) or abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """With a space that does not break."""
    if value is None:
        return "–"
    return "<\u00a01\u00a0%" if 0 < value < 0.01 else f"{value:.0%}".replace("%", "\u00a0%")


def figure(chart: Chart | None) -> Markup | None:
    """Plotly's values lie beside the place where the page's script draws them."""
    if chart is None:
        return None
    place = tag("div", class_="plot", style=f"height:{chart.height}px", role="img", aria_label=f"{chart.title}. {chart.caption}")
    values = tag("script", data_json({"data": chart.data, "layout": chart.layout | {"showlegend": False}}), type="application/json")
    return tag("figure", tag("h3", chart.title), _legend(chart), place, values, tag("figcaption", chart.caption))


def _legend(chart: Chart) -> Markup | None:
    """In HTML, where it wraps and takes no room from the figure: one entry a name."""
    if not chart.layout.get("showlegend", False):
        return None
    colors: dict[str, str] = {}
    for trace in chart.data:
        if trace.get("showlegend", True) and "name" in trace:
            colors.setdefault(trace["name"], trace.get("line", {}).get("color") or trace.get("marker", {}).get("color", "$muted"))
    entries = [tag("span", tag("i", style=f"background:var(--{color.lstrip('$')})"), Markup(name)) for name, color in colors.items()]
    return tag("p", *entries, class_="legend")


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
