"""What a command prints: text for people, and with --json one object on stdout, whatever else writes there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from typing import IO, Any

from headrace.errors import HeadraceError
from headrace.report.markup import printable

SCHEMA = 1
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
INTERRUPTED_ERROR: dict[str, Any] = {"kind": "Interrupted", "message": "Ended by Ctrl-C."}
_ERROR_KEYS = ("kind", "message", "file", "key", "value", "limit", "remedy")


class Output:
    """Context of one command.

    With --json stdout is kept for the object: prints of the recipe's Python, of libraries and of child processes go to stderr.
    """

    def __init__(self, *, command: str | None, json: bool) -> None:
        self.command = command
        self.json = json
        self._exit = contextlib.ExitStack()
        self._stdout: IO[str] = sys.stdout

    def __enter__(self) -> Output:
        if self.json:
            self._stdout = self._exit.enter_context(_stdout_kept_apart())
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    @property
    def people(self) -> IO[str]:
        """Where text for people goes."""
        return sys.stderr if self.json else sys.stdout

    @property
    def width(self) -> int:
        """Columns of the terminal; 100 where there is none."""
        return shutil.get_terminal_size((100, 24)).columns if self.people.isatty() else 100

    def show(self, text: str) -> None:
        """Lines of the result for people."""
        print(printable(text), file=self.people)

    def say(self, text: str) -> None:
        """A line that is no result: always on stderr."""
        print(printable(text), file=sys.stderr)

    def say_error(self, error: HeadraceError) -> None:
        self.say(f"{error.kind}: {error}")

    def result(self, values: dict[str, Any], *, status: str = "done", error: dict[str, Any] | None = None) -> None:
        """The command's object; printed with --json only."""
        if not self.json:
            return
        full_error = None if error is None else {**dict.fromkeys(_ERROR_KEYS), **error}
        line = json.dumps({"schema": SCHEMA, "command": self.command, "status": status, "error": full_error, **values}, allow_nan=False)
        self._stdout.write(line + "\n")
        self._stdout.flush()

    def fail(self, status: str, error: dict[str, Any]) -> None:
        self.result({}, status=status, error=error)


@contextlib.contextmanager
def _stdout_kept_apart() -> Any:
    """Yields the real stdout; meanwhile file descriptor 1 and sys.stdout are stderr."""
    real = sys.stdout
    try:
        has_descriptors = real.fileno() == 1 and sys.stderr.fileno() == 2
    except (OSError, ValueError):  # replaced by an object, as in a test
        has_descriptors = False
    if not has_descriptors:
        with contextlib.redirect_stdout(sys.stderr):
            yield real
        return
    real.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr), os.fdopen(kept, "w", encoding="utf-8") as stream:
        try:
            yield stream
        finally:
            stream.flush()
            os.dup2(kept, 1)
