"""A recipe's Python: finding it, importing it, calling its functions. It is the user's own code and runs with the user's rights."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import RecipeError


class RecipeCode:
    """The module of a recipe (`task.module`) and the options its functions may take.

    Loads lazily and can be pickled to other processes, which import the file again.
    """

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path = path
        self.options = dict(options)
        self._module: ModuleType | None = None

    def __getstate__(self) -> tuple[Path, dict[str, Any]]:
        return self.path, self.options

    def __setstate__(self, state: tuple[Path, dict[str, Any]]) -> None:
        self.path, self.options = state
        self._module = None

    def resolve(self, reference: str) -> Callable[..., Any]:
        """The function or class that `MODULE:NAME` names, its options bound. Raises RecipeError naming file and name."""
        stem, _, name = reference.partition(":")
        if not name or stem != self.path.stem:
            meant = name or stem.removeprefix(f"{self.path.stem}.")  # task.reward
            raise RecipeError(f"{self.path}: '{reference}' is not of the form '{self.path.stem}:NAME'.", remedy=f"Write '{self.path.stem}:{meant}'.")
        found = getattr(self._load(), name, None)
        if found is None or not callable(found):
            names = [each for each, value in vars(self._load()).items() if callable(value) and not each.startswith("_")]
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
            remedy = f"Did you mean '{stem}:{near[0]}'?" if near else "Define it, or correct the setting that names it."
            raise RecipeError(f"{self.path}: there is no function or class '{name}'.", remedy=remedy)
        return self._with_options(found)

    def described(self, error: BaseException) -> str:
        """`ValueError: no such word (line 12 of task.py)`: type, message and the innermost place in the recipe's file."""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(self.path)]
        place = f" (line {lines[-1]} of {self.path.name})" if lines and not isinstance(error, SyntaxError) else ""
        try:
            message = str(error)
        except Exception:
            message = "(its message cannot be shown)"
        return f"{type(error).__name__}: {message}{place}" if message else f"{type(error).__name__}{place}"

    def digest(self) -> str:
        """Hash of the module's text and the options: caches key on it."""
        return hashlib.sha256(self.path.read_bytes() + repr(sorted(self.options.items())).encode()).hexdigest()

    def _with_options(self, function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:  # written in C: it does not say what it takes
            return function
        bound = {key: value for key, value in self.options.items() if key in parameters}
        return partial(function, **bound) if bound else function

    def _load(self) -> ModuleType:
        if self._module is None:
            if not self.path.is_file():
                raise RecipeError(f"{self.path}: the recipe's module does not exist.", remedy="Create it or correct task.module.")
            name = f"headrace_recipe_{self.path.stem}_{hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:8]}"
            spec = importlib.util.spec_from_file_location(name, self.path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException as error:  # a panic of a library written in Rust is no Exception
                del sys.modules[name]
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise RecipeError(f"{self.path}: importing it raised {self.described(error)}.", remedy=_import_remedy(error)) from error
            self._module = module
        return self._module


def _import_remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"Install what provides '{error.name}', or correct the import."
    return "Correct that line." if isinstance(error, SyntaxError) else "It must import without error: run `python` on it."
