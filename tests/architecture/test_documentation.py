"""The documents name what exists: modules, packages, commands, each other."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from headrace.cli.main import build_parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def tree_below_source(document: str) -> str:
    """Its lines below src/headrace."""
    block = next(block for block in document.split("```") if "src/headrace/\n" in block)
    return block.partition("src/headrace/\n")[2].partition("\ntests/")[0]


def tree_files() -> set[str]:
    """Paths below src/headrace that the architecture's tree names."""
    found: set[str] = set()
    folder = ""
    for line in tree_below_source(ARCHITECTURE).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.findall(r"[a-z_/]*[a-z_](?:\.py|/)(?=\s|$)", line)
        if depth == 1:
            folder = names[0] if names[0].endswith("/") else ""
        found.update(folder + name for name in names if name.endswith(".py"))
    return found


def test_the_architecture_names_every_module_and_no_other() -> None:
    package = ROOT / "src" / "headrace"
    modules = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if not path.name.startswith("__")}
    assert tree_files() == modules, "ARCHITECTURE.md has a tree with a line for each module"


def test_readme_names_every_package_and_no_other() -> None:
    packages = {path.name for path in (ROOT / "src" / "headrace").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert set(re.findall(r"^  ([a-z_]+)/", tree_below_source(README), flags=re.MULTILINE)) == packages


def test_documents_show_only_commands_that_exist() -> None:
    commands = set(build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr, arg-type]
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shown = set(re.findall(r"(?:^|`)headrace ([a-z]+)", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE))
        assert shown <= commands, name


def test_links_between_documents_lead_somewhere() -> None:
    for path in (*ROOT.glob("*.md"), *ROOT.glob("recipes/*/*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_name_of_headrace_that_a_document_shows_exists() -> None:
    for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for name in set(re.findall(r"\bheadrace(?:\.[A-Za-z_]\w*)+", path.read_text(encoding="utf-8"))):
            assert exists(name), f"{path.name}: {name}"


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        place = ROOT / "src" / Path(*parts[:length])
        if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file():
            found = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                found = getattr(found, part, None)  # type: ignore[assignment]
            return found is not None
    return False


def test_a_name_that_does_not_exist_is_seen() -> None:
    assert exists("headrace.event_log.read_events") and exists("headrace.errors") and exists("headrace.types.Task.id")
    assert not exists("headrace.events.read_events") and not exists("headrace.nothing")


def test_every_test_that_the_architecture_names_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    defined = {name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), flags=re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 40
    assert named <= defined, sorted(named - defined)


def test_every_case_and_invariant_of_the_architecture_names_a_test_or_a_benchmark() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (I?\d+) \|.*\| (.+) \|$", text, flags=re.MULTILINE)
    assert {"I1", "I7", "I15", "5", "17"} <= {number for number, _ in rows}
    for number, shown_by in rows:
        scripts = re.findall(r"`(benchmarks/\w+\.py)`", shown_by)
        assert "`test_" in shown_by or scripts, number
        assert all((ROOT / script).is_file() for script in scripts), number


def test_first_documents_say_that_a_recipe_is_the_users_code() -> None:
    for name in ("README.md", "docs/quick_start.md"):
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert "A recipe's Python is your code and runs as you" in text and "security.md)" in text, name
