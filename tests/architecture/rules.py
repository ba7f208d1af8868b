"""The rules of the architecture as a function from a source tree to what breaks them (ARCHITECTURE.md).

Reads syntax trees only, so that it can be pointed at a copy with a planted violation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

LAYERS = {
    **dict.fromkeys(("__init__", "types", "updates", "errors"), 0),
    **dict.fromkeys(
        (
            "config",
            "config_loading",
            "roles",
            "events",
            "event_log",
            "clock",
            "recipe",
            "statistics",
            "marks",
            "manifest",
            "orphans",
            "sandbox",
            "sandbox_launcher",
        ),
        1,
    ),
    **dict.fromkeys(("tasks", "rollout", "sampler", "pool", "learner", "weights"), 2),
    **dict.fromkeys(
        ("conductor", "checkpointing", "retention", "evaluation", "governor", "interruption", "restoration", "setbacks", "supervision", "workers"), 3
    ),
    "runtime": 4,
    **dict.fromkeys(("planner", "report", "compare"), 5),
    "cli": 6,
}
ROLE_PACKAGES = frozenset({"tasks", "rollout", "sampler", "pool", "learner", "weights"})
RUNTIMES = ("local", "ray_runtime", "simulated")

# where a heavy package may be imported: path prefixes below src/headrace
HEAVY = {
    "torch": ("sampler/", "learner/", "weights/"),
    "transformers": ("sampler/", "learner/", "weights/", "rollout/", "runtime/hosts.py", "cli/"),
    "ray": ("runtime/ray_runtime.py",),
    "vllm": ("sampler/vllm_sampler.py",),
}
# transformers' tokenizers may be loaded where text becomes tokens, but only inside a function
LAZY_ONLY = {"transformers": ("rollout/", "runtime/hosts.py", "cli/")}

REPORT_READS = frozenset({"events", "event_log", "types", "updates", "errors", "config"})

MAX_MODULE_LINES = 600
MAX_CONDUCTOR_LINES = 350
MAX_FUNCTION_LINES = 50
LONG_FUNCTIONS = {
    "config.py:Settings.check_rules",  # a flat list of independent rules: cutting it would only spread it
}


def violations(package: Path) -> list[str]:
    """`path:line: what` for each broken rule in the package directory (src/headrace)."""
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
        for line, what in (
            *_imports(relative, tree),
            *_sizes(relative, text, tree),
            *_calls(tree),
        ):
            found.append(f"{relative.as_posix()}:{line}: {what}")
    return found


def _imports(relative: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    unit = relative.parts[0].removesuffix(".py")
    if unit not in LAYERS:
        yield 1, f"'{unit}' belongs to no layer: add it to LAYERS and to ARCHITECTURE.md"
        return
    top_level = {id(statement) for statement in tree.body}
    for node, name in _imported(relative, tree):
        root = name.partition(".")[0]
        if root == "headrace":
            yield from ((node.lineno, what) for what in _internal(relative, unit, name))
        elif root in HEAVY and not _is_below(relative, HEAVY[root]):
            yield node.lineno, f"imports {root}, which is only for {', '.join(HEAVY[root])}"
        elif root in LAZY_ONLY and _is_below(relative, LAZY_ONLY[root]) and id(node) in top_level:
            yield node.lineno, f"imports {root} when it is imported itself: do it inside the function that needs it"


def _internal(relative: Path, unit: str, name: str) -> Iterator[str]:
    parts = name.split(".")
    target = parts[1] if len(parts) > 1 else "__init__"
    if target not in LAYERS:
        target = "__init__"  # `from headrace import __version__`
    if LAYERS[target] > LAYERS[unit]:
        yield f"layer {LAYERS[unit]} ({unit}) imports layer {LAYERS[target]} ({name})"
    if target != unit and {target, unit} <= ROLE_PACKAGES:
        yield f"sibling roles import each other: {unit} imports {name}"
    if unit == target == "runtime":
        here, there = _runtime(relative.stem), _runtime(parts[2]) if len(parts) > 2 else None
        if here and there and here != there:
            yield f"sibling runtimes import each other: {relative.stem} imports {name}"
    if unit == "report" and target not in REPORT_READS | {"report", "__init__"}:
        yield f"report reads events only, but imports {name}"


def _imported(relative: Path, tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, dotted module) of every import anywhere in the module; `from headrace import x` names headrace.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ("headrace", *relative.parts[: len(relative.parts) - node.level])
                base = ".".join((*parents, base)).rstrip(".")
            package_only = base.count(".") <= 1 and base.startswith("headrace")
            yield from ((node, f"{base}.{alias.name}" if package_only else base) for alias in node.names)


def _sizes(relative: Path, text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    num_lines = text.count("\n")
    limit = MAX_CONDUCTOR_LINES if relative.as_posix() == "conductor.py" else MAX_MODULE_LINES
    if num_lines > limit:
        yield 1, f"{num_lines} lines, the limit is {limit}"
    for qualified, node in _functions(tree, ""):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES and f"{relative.as_posix()}:{qualified}" not in LONG_FUNCTIONS:
            yield node.lineno, f"{qualified} has {length} lines, the limit is {MAX_FUNCTION_LINES}"


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)


def _calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    time_names = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names if alias.name == "time"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time" and any(alias.name == "sleep" for alias in node.names):
            yield node.lineno, "imports time.sleep: wait for what wakes you instead"
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(attr="sleep", value=ast.Name(id=name)) if name in time_names:
                yield node.lineno, "calls time.sleep: wait for what wakes you instead"
            case ast.Attribute(attr="create_task", value=owner) if "group" not in _last_name(owner):
                yield node.lineno, "starts a task outside a TaskGroup"
            case ast.Attribute(attr="ensure_future") | ast.Name(id="ensure_future" | "create_task"):
                yield node.lineno, "starts a task outside a TaskGroup"


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lower()
    return ""


def _runtime(stem: str) -> str | None:
    return next((each for each in RUNTIMES if stem == each or stem.startswith(each + "_")), None)


def _is_below(relative: Path, prefixes: tuple[str, ...]) -> bool:
    return any(relative.as_posix().startswith(prefix) for prefix in prefixes)
