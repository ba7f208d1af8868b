"""Parsing of command lines so that whatever is wrong becomes a ConfigError: the option, its value, what it may be, the nearest right name."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from headrace.errors import ConfigError, Problem


class Number:
    """The `type` of an option: a number within limits."""

    def __init__(self, kind: Callable[[str], float], limit: str, allows: Callable[[float], bool]) -> None:
        self._kind, self.limit, self._allows = kind, limit, allows

    def __call__(self, given: str) -> Any:
        try:
            number = self._kind(given)
        except ValueError:
            raise argparse.ArgumentTypeError(self.limit) from None
        if not math.isfinite(number) or not self._allows(number):
            raise argparse.ArgumentTypeError(self.limit)
        return number


COUNT = Number(int, "a whole number, at least 1", lambda number: number >= 1)
COUNT_FROM_0 = Number(int, "a whole number, at least 0", lambda number: number >= 0)
COUNT_FROM_2 = Number(int, "a whole number, at least 2", lambda number: number >= 2)
SHARE = Number(float, "a number, at least 0 and below 1", lambda number: 0 <= number < 1)
AMOUNT = Number(float, "a number above 0", lambda number: number > 0)
FINITE = Number(float, "a finite number", lambda number: True)


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would write to stderr and exit, so that --json holds for wrong usage too. Takes no shortened options:
    what they mean would change with every new one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})
        self._given: list[str] = []

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        self._given = [] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = [word for word in self._given if word.startswith("--") and word != "--" and word.partition("=")[0] not in self._option_string_actions]
        if "required" in message and unknown and self._subparsers is None:  # what is missing may be what is misspelt
            raise ConfigError([self.unknown_argument(word) for word in unknown])
        about = re.match(r"argument ([^\s:]+): ", message) or re.search(r"required: ([^\s,]+)", message)
        key = None if about is None else about[1].split("/")[-1]
        raise ConfigError([Problem(key=key, message=f"{message[0].upper()}{message[1:]}.", remedy=self._help())])

    def unknown_argument(self, word: str) -> Problem:
        """With the option that it resembles."""
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1) if word.startswith("-") else []
        return Problem(key=name if word.startswith("-") else None, value=word, message=f"Unknown argument '{word}'.", remedy=_did_you_mean(near) + self._help())

    def subparser(self, name: str) -> Parser:
        """Of the command."""
        assert self._subparsers is not None
        (commands,) = self._subparsers._group_actions
        found: Parser = commands.choices[name]  # type: ignore[index]
        return found

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            limit = getattr(action.type, "limit", None)
            name = _name(action)
            message = f"{name} is '{arg_string}'" + (f", it must be {limit}." if limit else ".")
            raise ConfigError([Problem(key=name, value=arg_string, limit=limit, message=message, remedy=self._help())]) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = list(action.choices)
        remedy = _did_you_mean(difflib.get_close_matches(str(value), choices, n=1)) + self._help()
        limit = ", ".join(choices)
        message = (
            f"there is no command '{value}'." if isinstance(action, argparse._SubParsersAction) else f"{_name(action)} is '{value}', it must be one of {limit}."
        )
        raise ConfigError([Problem(key=_name(action), value=value, limit=limit, message=message, remedy=remedy)])

    def _help(self) -> str:
        return f"See '{self.prog} --help'."


def _name(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def _did_you_mean(near: Sequence[str]) -> str:
    return f"Did you mean '{near[0]}'? " if near else ""
