"""`headrace new`: a folder with a task that runs as it is, to be changed into one's own."""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from headrace.cli.output import Output
from headrace.config_loading import shipped_recipes
from headrace.errors import ConfigError, Problem

KINDS = ("one_step", "multi_step")
_SUFFIX = ".template"
_NAME = "{{name}}"


def execute(arguments: argparse.Namespace, output: Output) -> int:
    directory = Path(arguments.directory)
    check_directory(directory, arguments.directory)
    files = make_task(directory, arguments.kind)
    shown = str(directory)
    commands = [f"headrace run {shown}", f"pytest {shown}"]
    output.show(f"{shown}/ holds {', '.join(files)}.")
    output.show(f"  {commands[0]}    trains a tiny model on it, in about a minute")
    output.show(f"  {commands[1]}          tests it without a model")
    output.show(f"{shown}/README.md says how to make it yours.")
    output.result({"directory": str(directory.resolve()), "kind": arguments.kind, "files": files, "next": commands})
    return 0


def check_directory(directory: Path, given: str) -> None:
    """Raises ConfigError where no such task can or should be made."""
    name = directory.name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", name):
        raise _refused(given, f"'{name}' is not a name for a task.", "a letter, then letters, digits, _ or -; at most 64", f"Try '{_nearest_name(name)}'.")
    if name in shipped_recipes():
        raise _refused(given, f"'{name}' is the name of a shipped recipe.", "another name", f"Try 'my_{name}'.")
    if directory.exists() or directory.is_symlink():
        raise _refused(given, f"'{given}' exists already: nothing was changed.", "a new folder", "Choose another name, or remove it first.")
    if not directory.absolute().parent.is_dir():
        raise _refused(given, f"there is no directory '{directory.parent}' to make '{name}' in.", "in an existing directory", "Make it first.")


def make_task(directory: Path, kind: str) -> list[str]:
    """Writes the folder, whole or not at all, and returns the names of its files. Raises ConfigError where it cannot be written."""
    templates = resources.files("headrace").joinpath("templates", kind)
    texts = {path.name.removesuffix(_SUFFIX): path.read_text(encoding="utf-8") for path in templates.iterdir() if path.name.endswith(_SUFFIX)}
    partial: Path | None = None
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.absolute().parent))
        for name, text in texts.items():
            (partial / name).write_text(text.replace(_NAME, directory.name), encoding="utf-8")
        partial.chmod(0o755)
        partial.rename(directory)
    except OSError as error:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        raise _refused(str(directory), f"'{directory}' cannot be written: {error.strerror}.", "a place to write", "Choose another place.") from error
    return sorted(texts)


def _nearest_name(name: str) -> str:
    words = re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_-")
    return (words if re.match(r"[A-Za-z]", words) else f"task_{words}".rstrip("_"))[:64]


def _refused(given: str, what: str, limit: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key="DIRECTORY", value=given, limit=limit, message=what, remedy=remedy)])
