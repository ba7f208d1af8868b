"""The error tree. Standard library only.

HeadraceError                     kind, message and what to do; exit code 1
├── ConfigError                   wrong settings or recipe; exit code 2; holds every problem found, not only the first
├── RecipeError                   the recipe's Python or data is wrong; exit code 2
├── ModelError                    a model that cannot be loaded or served; names what is missing; exit code 2
├── WaitTimeoutError              a named wait passed its limit
├── WorkerLostError               a role's process ended or stopped answering
├── NoProgressError               the run cannot go on: every task fails, or no group carries signal
├── DivergedError                 updates were refused too often
│   └── RollBackError             the run should go back to a checkpoint; shown only where it cannot
├── CheckpointError               cannot be written or read
├── RunDirectoryError             the run's record cannot be written: disk full, rights taken away
└── InvariantError                a bug in headrace: report it with events.jsonl
    ├── StaleTokenError           an unmarked token beyond max_staleness would get weight (I6)
    └── LedgerError               the ledger does not close (I7)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a file or setting."""

    message: str
    file: str | None = None
    key: str | None = None
    value: object = None
    limit: str | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        text = f"{self.file}: {self.message}" if self.file else self.message
        if self.remedy:
            text += f" {self.remedy}"
        return text


class HeadraceError(Exception):
    """Base of all. `remedy` says what to do; `file` is the one that is wrong; `exit_code` is what the command line ends with."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str | None = None, file: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.file = file
        self.learner_lost = False
        """The learner ended, broke down or did not answer: going back to a checkpoint may cure it."""

    @property
    def kind(self) -> str:
        return type(self).__name__

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}" if self.remedy else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__.copy(), self.args))

    def as_json(self) -> dict[str, object]:
        """The `error` object of CONTRACTS."""
        return {"kind": self.kind, "message": self.message, "file": self.file, "key": None, "value": None, "limit": None, "remedy": self.remedy}


class ConfigError(HeadraceError):
    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems

    def as_json(self) -> dict[str, object]:
        first = self.problems[0]
        value = first.value if isinstance(first.value, str | int | float | bool | None) else repr(first.value)
        return {
            "kind": self.kind, "message": self.message, "file": first.file, "key": first.key, "value": value, "limit": first.limit,
            "remedy": first.remedy,
        }  # fmt: skip


class RecipeError(HeadraceError):
    exit_code = 2


class ModelError(HeadraceError):
    exit_code = 2


class WaitTimeoutError(HeadraceError):
    pass


class WorkerLostError(HeadraceError):
    pass


class NoProgressError(HeadraceError):
    pass


class DivergedError(HeadraceError):
    pass


class RollBackError(DivergedError):
    """Raised in a conductor's loop, it takes the run back to a checkpoint (restoration.py), inside the same run under a new lineage."""

    def __init__(self, reason: str, *, learning_rate_factor: float = 1.0, newest_update: int | None = None, limit: int = 3) -> None:
        """The learning rate is multiplied by the factor from then on, whatever else happens to the run. Without `newest_update` the newest
        whole checkpoint is gone back to; with it the newest of at most that update among the two that the journal serves (the older one
        where neither is). One rollback more than `limit` in a row, without an update that had not been reached before, ends the run."""
        super().__init__(reason)
        self.learning_rate_factor = learning_rate_factor
        self.newest_update = newest_update
        self.limit = limit


class CheckpointError(HeadraceError):
    pass


class RunDirectoryError(HeadraceError):
    pass


class InvariantError(HeadraceError):
    def __init__(self, message: str) -> None:
        super().__init__(message, remedy="This is a bug in headrace, please report it with events.jsonl.")


class StaleTokenError(InvariantError):
    pass


class LedgerError(InvariantError):
    pass


def first_error(error: BaseException) -> BaseException:
    """The one to show of an exception group, however nested: a HeadraceError before any other, else the first."""
    flat: list[BaseException] = []
    stack = [error]
    while stack:
        one = stack.pop(0)
        if isinstance(one, BaseExceptionGroup):
            stack.extend(one.exceptions)
        else:
            flat.append(one)
    return next((one for one in flat if isinstance(one, HeadraceError)), flat[0])


def _rebuild(kind: type[HeadraceError], state: dict[str, object], args: tuple[object, ...]) -> HeadraceError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
