"""What every logger shares: which numbers an event holds, how one is opened, and that none can break a run."""

from __future__ import annotations

import importlib
import importlib.util
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import ConfigError, Problem

Line = Mapping[str, Any]

CLOSE_SECONDS = 60.0
"""What a logger may take at the end of a run to deliver the rest."""
_STATISTICS = (
    "loss", "gradient_norm", "learning_rate", "entropy", "kl_sampler_learner", "reference_kl", "ratio_mean", "ratio_max", "effective_sample_size",
    "clipped_fraction", "masked_fraction", "staleness_mean", "staleness_max", "key_staleness_mean", "trained_tokens",
)  # fmt: skip


class Log(Protocol):
    """One small adapter."""

    def write(self, numbers: Mapping[str, float], version: int) -> None:
        """Numbers of one policy version. Versions of evaluations come late: they need not rise."""
        ...

    def close(self, status: str) -> None:
        """done | failed | interrupted"""
        ...


class SafeLog:
    """Feeds one adapter from a thread of its own: what it does over a network never holds the run up, and when it raises,
    that is said once and the run goes on without it.
    """

    def __init__(self, name: str, *, directory: Path, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """`directory` is the run's; `settings` are shown where the logger shows such."""
        self._name, self._directory, self._settings, self._say = name, directory, settings, say
        self._events: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"log-{name}", daemon=True)
        self._thread.start()

    def on_event(self, line: Line) -> None:
        """Returns at once."""
        self._events.put(line)

    def close(self, limit_seconds: float = CLOSE_SECONDS) -> None:
        """Waits until everything is delivered, but not for ever."""
        self._events.put(None)
        self._thread.join(limit_seconds)
        if self._thread.is_alive():
            self._say(f"--log {self._name} has not taken everything after {limit_seconds:g} s; what is left is dropped.")

    def _work(self) -> None:
        log, status = None, "interrupted"
        try:
            while (line := self._events.get()) is not None:
                if line["event"] == "run_finished":
                    status = line["status"]
                numbers = numbers_of(line)
                if log is None and line["event"] == "run_started":
                    log = open_log(self._name, self._directory, self._settings)
                elif log is not None and numbers is not None:
                    log.write(*numbers)
            if log is not None:
                log.close(status)
        except Exception as error:  # whatever another package does, the run goes on
            self._say(f"--log {self._name} failed and is off from here on: {type(error).__name__}: {error}")


def require(name: str) -> None:
    """Raises ConfigError, naming the command that installs it, when the package is missing."""
    if importlib.util.find_spec(name) is None:
        message = f"--log {name} needs the package '{name}', which is not installed."
        raise ConfigError([Problem(key="--log", value=name, message=message, remedy=f"pip install {name}")])


def open_log(name: str, directory: Path, settings: Mapping[str, Any]) -> Log:
    """The adapter of that name, open; `settings` are shown where the logger shows such."""
    module = importlib.import_module(f"headrace.report.adapters.{name}")
    log: Log = module.open_log(directory, settings)
    return log


def numbers_of(line: Line) -> tuple[dict[str, float], int] | None:
    """({name: number}, policy version) of the events that curves are made of; None for the others."""
    match line["event"]:
        case "updated":
            statistics = line["statistics"] or {}
            found = {"train/reward": line["reward_mean"], "train/seconds": line["seconds"], "train/busy_seconds": line["busy_seconds"]}
            found |= {f"train/{name}": statistics.get(name) for name in _STATISTICS}
        case "evaluated":
            found = {"evaluation/mean": line["mean"], **{f"evaluation/{name}": value for name, value in line["metrics"].items()}}
        case "ledger":
            ledger = line["ledger"]
            found = {f"tokens/{name}": ledger["tokens"][name] for name in ("generated", "trained", "filtered", "expired", "pooled", "in_flight")}
            return _known(found), ledger["at_update"]
        case _:
            return None
    return _known(found), line["version"]


def _known(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if value is not None}
