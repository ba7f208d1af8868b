"""Example trajectories from trajectories/*.parquet: text coloured by the policy version that drew it, key steps marked.

Without the directory, without pyarrow, or with files that cannot be read, a report simply has no examples. The text comes from the
tokenizer of the run's newest checkpoint; where that cannot be loaded, token ids are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.report.markup import Markup, join, number_text, tag

_MAX_TOKENS = 1200
_NUM_COLORS = 6
_OVERVIEW = ("retired", "reward", "action_tokens", "seconds", "staleness_max", "update")
_ROW = (
    "group",
    "member",
    "task_id",
    "kind",
    "update",
    "reward",
    "end",
    "error",
    "tokens",
    "action_starts",
    "action_ends",
    "versions",
    "key_steps",
    "staleness_mean",
)

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the report takes from the recorded trajectories."""

    num_rows: int
    trained: Sequence[tuple[float, float]]
    """(action tokens, seconds) of each trained one."""
    examples: Sequence[tuple[str, Row]]
    """(why it is shown, row)"""
    decode: Callable[[Sequence[int]], str] | None
    """None: no tokenizer could be loaded."""


def load_recorded(directory: Path) -> Recorded | None:
    """Of a run directory; None when there is nothing to read."""
    files = sorted((directory / "trajectories").glob("*.parquet"))
    if not files:
        return None
    try:
        import pyarrow.parquet as parquet

        overview = [row for path in files for row in _overview(parquet, path)]
        examples = [(why, _row(parquet, path, index)) for why, path, index in _chosen(overview)]
    except (ImportError, OSError, ValueError, LookupError):  # pyarrow's errors are ValueErrors and OSErrors
        return None
    trained = [(float(row["action_tokens"]), float(row["seconds"])) for _, _, row in overview if row["retired"] == "trained"]
    return Recorded(num_rows=len(overview), trained=trained, examples=examples, decode=_decoder(directory))


def example_section(recorded: Recorded | None) -> Markup | None:
    if recorded is None or not recorded.examples:
        return None
    lead = (
        f"From {recorded.num_rows:,} recorded trajectories. Plain text was shown to the model; what it wrote is coloured by the policy version that drew it, "
        "and the actions of key steps are bold and underlined."
    )
    if recorded.decode is None:
        lead += " No tokenizer could be loaded from the run's checkpoints, so token ids are shown."
    shown = [_example(why, row, recorded.decode) for why, row in recorded.examples]
    return tag("section", tag("h2", "Example trajectories"), tag("p", lead), *shown)


def _overview(parquet: Any, path: Path) -> list[tuple[Path, int, Row]]:
    return [(path, index, row) for index, row in enumerate(parquet.read_table(path, columns=list(_OVERVIEW)).to_pylist())]


def _row(parquet: Any, path: Path, index: int) -> Row:
    table = parquet.read_table(path)
    row: Row = table.select([name for name in _ROW if name in table.column_names]).slice(index, 1).to_pylist()[0]
    return row


def _chosen(overview: Sequence[tuple[Path, int, Row]]) -> list[tuple[str, Path, int]]:
    """A few that tell something, none twice."""
    drawn = [each for each in overview if each[2]["action_tokens"]]
    if not drawn:
        return []
    late = drawn[-max(1, len(drawn) // 10) :]
    best, worst = max(each[2]["reward"] for each in late), min(each[2]["reward"] for each in late)
    wanted = [
        ("early in the run", drawn[0]),
        ("late, highest reward", next(each for each in reversed(late) if each[2]["reward"] == best)),
        ("late, lowest reward", next(each for each in reversed(late) if each[2]["reward"] == worst)),
        ("the longest", max(drawn, key=lambda each: each[2]["action_tokens"])),
        ("the stalest when trained", max(drawn, key=lambda each: each[2]["staleness_max"] or 0)),
    ]
    chosen: dict[tuple[Path, int], str] = {}
    for why, (path, index, _) in wanted:
        chosen.setdefault((path, index), why)
    return [(why, path, index) for (path, index), why in chosen.items()]


def _example(why: str, row: Row, decode: Callable[[Sequence[int]], str] | None) -> Markup:
    facts = [f"task {row['task_id']}", f"reward {number_text(row['reward'])}", f"ended: {str(row['end']).replace('_', ' ')}"]
    if row.get("update") is not None:
        facts.append(f"trained in update {row['update']:,}")
    if row.get("staleness_mean") is not None:
        facts.append(f"{row['staleness_mean']:.1f} updates old on average")
    versions = sorted(set(row["versions"]))
    legend = [tag("span", f"version {version}", class_=_color(version, versions)) for version in versions[:12]]
    more = f"and {len(versions) - 12} more" if len(versions) > 12 else None
    head = tag("p", tag("strong", why), ": ", ", ".join(facts), ". ", *join_all(legend), more)
    return tag("article", head, tag("pre", *_pieces(row, versions, decode or _ids)), class_="example")


def join_all(parts: Sequence[Markup]) -> list[object]:
    """With a space after each, so that they may break."""
    return [piece for part in parts for piece in (part, " ")]


def _pieces(row: Row, versions: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[Markup]:
    tokens, drawn = row["tokens"], row["versions"]
    keys = set(row["key_steps"])
    pieces: list[Markup] = []
    position, offset = 0, 0
    for step, (start, end) in enumerate(zip(row["action_starts"], row["action_ends"], strict=True)):
        if start >= _MAX_TOKENS:
            break
        pieces.append(tag("span", decode(tokens[position:start]), class_="shown"))
        runs = _runs(drawn[offset : offset + end - start])
        action = []
        for version, low, high in runs:
            title = f"version {version}, step {step}{', key step' if step in keys else ''}"
            action.append(tag("span", decode(tokens[start + low : start + high]), class_=_color(version, versions), title=title))
        pieces.append(tag("b", *action, class_="key") if step in keys else join(action))
        position, offset = end, offset + end - start
    if position < len(tokens):
        rest = tokens[position:]
        pieces.append(tag("span", decode(rest) if len(rest) <= _MAX_TOKENS else f" … {len(rest):,} more tokens", class_="shown"))
    return pieces


def _runs(versions: Sequence[int]) -> list[tuple[int, int, int]]:
    """(version, start, end) of equal neighbours."""
    found: list[tuple[int, int, int]] = []
    for index, version in enumerate(versions):
        if found and found[-1][0] == version:
            found[-1] = (version, found[-1][1], index + 1)
        else:
            found.append((version, index, index + 1))
    return found


def _color(version: int, versions: Sequence[int]) -> str:
    return f"v{versions.index(version) % _NUM_COLORS}"


def _ids(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def _decoder(directory: Path) -> Callable[[Sequence[int]], str] | None:
    checkpoints = sorted((directory / "checkpoints").glob("update_*"), reverse=True)
    found = next((path for each in checkpoints for path in (each / "tokenizer.json", each / "model" / "tokenizer.json") if path.is_file()), None)
    if found is None:
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(found))
    except Exception:  # tokenizers raises bare Exceptions for files it cannot read
        return None
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
