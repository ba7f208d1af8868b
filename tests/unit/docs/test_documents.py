"""What the documents name exists, and what exists is named."""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from pathlib import Path

import pytest

from headrace import errors, events
from headrace.cli.main import build_parser
from headrace.config_loading import fields
from headrace.types import FAILURES, EndReason, RetireReason, WorkerActivity
from headrace.updates import UpdateStatistics

ROOT = Path(__file__).parents[3]
DOCS = sorted((ROOT / "docs").glob("*.md"))
EVENTS = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
CONCEPTS = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = """
is not of the form|was already used|is not JSON|importing it raised|is not an async function
cannot be served by the transformers sampler|sampler.kv_memory_bytes is|is neither a directory nor a model that could be downloaded
The weight channel needs|is not empty|is in use|did not start|said nothing|has not ended|A role process imports this script again
groups ready|but older ones are still out|groups would expire if it did not wait for them|no rollout is out
waits for a sign of life from|to take up version|waits for the learner to learn a batch|evaluation of version
batches in a row held no group with different rewards|the gradient is not finite|but the evaluation returned|held the event loop for
its process was killed|was ended by signal|ended with exit code|the event log cannot be written|unknown key
loading torch and transformers|building the model|starting samplers and learner
"""
"""Pieces of messages by which people find their symptom."""
EVENT_CLASSES = [value for value in vars(events).values() if isinstance(value, type) and issubclass(value, events.Event) and value is not events.Event]
ERROR_CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.HeadraceError)]


def documented_fields(section: str) -> list[str]:
    """Names in the first column of a section's tables."""
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row.split("|")[1])]


def event_section(name: str) -> str:
    return EVENTS.split(f"\n## {name}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("event", EVENT_CLASSES, ids=lambda event: event.name)
def test_every_field_of_every_event_is_documented_and_no_other(event: type[events.Event]) -> None:
    expected = [field.name for field in dataclasses.fields(event) if field.name != "role"]
    nested = {"updated": UpdateStatistics, "worker_active": WorkerActivity}.get(event.name)
    if nested is not None:
        expected += [field.name for field in dataclasses.fields(nested)]
    base = event.__bases__[0]
    if base is not events.Event:  # "The fields of `base`, and"
        assert f"`{base.name}`, and" in event_section(event.name)
        expected = [name for name in expected if name not in {field.name for field in dataclasses.fields(base)}]
    assert sorted(documented_fields(event_section(event.name))) == sorted(expected)


def test_no_event_is_documented_that_does_not_exist() -> None:
    sections = {line.removeprefix("## ") for line in EVENTS.splitlines() if line.startswith("## ")}
    assert sections - {"A first look", "How large it gets"} == {event.name for event in EVENT_CLASSES}


def test_every_error_is_listed_with_its_exit_code() -> None:
    for error in ERROR_CLASSES:
        assert f"| `{error.__name__}` | {error.exit_code} |" in TROUBLESHOOTING


def test_every_failure_of_a_rollout_has_advice() -> None:
    advice = set(re.findall(r"^\| `([a-z_]+)` \|", TROUBLESHOOTING, flags=re.MULTILINE))
    assert {str(reason) for reason in FAILURES} <= advice
    for reason in set(EndReason) - FAILURES:
        assert f"`{reason}`" in EVENTS


def test_symptoms_are_quoted_in_the_words_of_the_program() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for piece in QUOTED.strip().replace("\n", "|").split("|"):
        assert piece in TROUBLESHOOTING.replace("\n", " "), f"not in the document: {piece}"
        assert piece in source, f"the program says it otherwise now: {piece}"


def test_every_class_of_the_ledger_is_explained() -> None:
    ledger = CONCEPTS.split("\n## The ledger\n")[1].split("\n## ")[0]
    for reason in RetireReason:
        assert f"─ {reason} " in ledger
    for failure in FAILURES:
        assert str(failure) in ledger


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_setting_a_document_names_exists(path: Path) -> None:
    keys = {key for key, _, _ in fields()}
    sections = {key.partition(".")[0] for key in keys}
    text = path.read_text(encoding="utf-8")
    named = set(
        re.findall(r"\b([a-z_]+\.[a-z_]+)(?=[`= ]|$)", "\n".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"^headrace .*", text, flags=re.MULTILINE)))
    )
    unknown = {name for name in named if name.partition(".")[0] in sections and name not in keys}
    assert {name for name in unknown if not name.endswith((".py", ".toml", ".md"))} == set()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_documents_show_only_commands_and_links_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    commands = set(build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr, arg-type]
    assert set(re.findall(r"(?:^|`|\$ )headrace ([a-z]+)\b(?! (?:starts|stands|holds))", text, flags=re.MULTILINE)) <= commands
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        if target.startswith("http"):
            continue
        assert (path.parent / file).exists(), target
        if anchor:
            assert anchor in anchors((path.parent / file) if file else path), target


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_python_in_documents_is_python(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)\n *```", path.read_text(encoding="utf-8"), flags=re.DOTALL):
        tree = ast.parse(textwrap.dedent(block))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace"):
                module = __import__(node.module or "", fromlist=["x"])
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


def test_every_document_is_reached_from_the_quick_start_or_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "docs" / "quick_start.md").read_text(encoding="utf-8")
    for path in DOCS:
        assert path.name in text, path.name


def anchors(path: Path) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
