"""Weights & Biases; its own environment variables (WANDB_PROJECT, WANDB_MODE=offline, ...) win where they are set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

_EXIT_CODES = {"done": 0, "failed": 1, "interrupted": 130}


class WandbLog:
    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        project = os.environ.get("WANDB_PROJECT", "headrace")
        self._run: Any = wandb.init(project=project, name=directory.name, dir=str(directory), config=dict(settings))
        # wandb's own step must rise, but an evaluation of version 10 may come after the numbers of version 12
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def write(self, numbers: Mapping[str, float], version: int) -> None:
        self._run.log({"version": version, **numbers})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES[status])


def open_log(directory: Path, settings: Mapping[str, Any]) -> WandbLog:
    return WandbLog(directory, settings)
