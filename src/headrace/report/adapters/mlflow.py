"""MLflow; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where to (default: MLflow's own)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow

_STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_MAX_PARAMETER_CHARACTERS = 500
"""MLflow refuses longer ones in older versions."""


class MlflowLog:
    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        mlflow.start_run(run_name=directory.name)
        mlflow.log_params({key: str(value)[:_MAX_PARAMETER_CHARACTERS] for key, value in settings.items()})

    def write(self, numbers: Mapping[str, float], version: int) -> None:
        mlflow.log_metrics(dict(numbers), step=version)

    def close(self, status: str) -> None:
        mlflow.end_run(status=_STATUS[status])


def open_log(directory: Path, settings: Mapping[str, Any]) -> MlflowLog:
    return MlflowLog(directory, settings)
