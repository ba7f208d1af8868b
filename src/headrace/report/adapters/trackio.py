"""Trackio; TRACKIO_PROJECT names the project (default: headrace), TRACKIO_SPACE_ID a Space to log to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio


class TrackioLog:
    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        trackio.init(project=os.environ.get("TRACKIO_PROJECT", "headrace"), name=directory.name, config=dict(settings))

    def write(self, numbers: Mapping[str, float], version: int) -> None:
        trackio.log(dict(numbers), step=version)

    def close(self, status: str) -> None:
        trackio.finish()


def open_log(directory: Path, settings: Mapping[str, Any]) -> TrackioLog:
    return TrackioLog(directory, settings)
