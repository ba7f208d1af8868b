"""TensorBoard event files in the run directory, by the `tensorboard` package's own writer (no torch, no TensorFlow).

See them with `tensorboard --logdir RUN/tensorboard`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

FOLDER = "tensorboard"


class TensorBoardLog:
    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self._writer = EventFileWriter(str(directory / FOLDER))
        rows = "\n".join(f"| {key} | {json.dumps(value)} |" for key, value in settings.items())
        tensor = TensorProto(dtype=DT_STRING, string_val=[f"| setting | value |\n|---|---|\n{rows}".encode()])
        text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add([Summary.Value(tag="settings", metadata=text, tensor=tensor)], 0)

    def write(self, numbers: Mapping[str, float], version: int) -> None:
        self._add([Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()], version)

    def close(self, status: str) -> None:
        self._writer.close()

    def _add(self, values: list[Any], version: int) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=version, summary=Summary(value=values)))


def open_log(directory: Path, settings: Mapping[str, Any]) -> TensorBoardLog:
    return TensorBoardLog(directory, settings)
