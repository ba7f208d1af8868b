"""A run started from a script of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from end_to_end.conftest import LETTERS

SCRIPT = """
import asyncio
from pathlib import Path
from headrace.config_loading import load_settings
from headrace.runtime.local import run_local

asyncio.run(run_local(load_settings({recipe!r}, ["run.num_updates=1"]), Path({directory!r})))
"""


def test_a_script_without_a_main_guard_is_told_to_have_one(model_cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(recipe=str(LETTERS), directory=str(tmp_path / "run")))
    environment = {**os.environ, "HEADRACE_CACHE": str(model_cache)}
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert result.returncode != 0
    assert "Put the call under `if __name__ == '__main__':`" in result.stderr
