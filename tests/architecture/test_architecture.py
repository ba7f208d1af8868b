"""The layers hold, modules stay small, heavy packages stay out of `import headrace`; and a planted violation is seen."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from rules import violations

PACKAGE = Path(__file__).parents[2] / "src" / "headrace"
HEAVY_MODULES = ("torch", "transformers", "ray", "vllm", "pydantic", "rich", "numpy", "safetensors", "tokenizers")


def test_source_follows_the_architecture() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "planted", "what"),
    [
        ("pool/planted.py", "import torch\n", "imports torch"),
        ("cli/planted.py", "def f():\n    import torch\n", "imports torch"),
        ("runtime/local_planted.py", "from torch import nn\n", "imports torch"),
        ("rollout/planted.py", "from transformers import AutoTokenizer\n", "inside the function"),
        ("pool/planted.py", "def f():\n    from transformers import AutoTokenizer\n", "imports transformers"),
        ("runtime/local_planted.py", "import ray\n", "imports ray"),
        ("sampler/planted.py", "from vllm.engine import x\n", "imports vllm"),
        ("types.py", "import headrace.events\n", "layer 0 (types) imports layer 1"),
        ("roles.py", "from headrace.pool.planted import x\n", "layer 1 (roles) imports layer 2"),
        ("roles.py", "from headrace import pool\n", "layer 1 (roles) imports layer 2"),
        ("learner/planted.py", "from headrace.conductor import Conductor\n", "layer 2 (learner) imports layer 3"),
        ("conductor.py", "from headrace.runtime import local\n", "layer 3 (conductor) imports layer 4"),
        ("runtime/planted.py", "from headrace.report.summary import summarize\n", "layer 4 (runtime) imports layer 5"),
        ("report/planted.py", "from headrace.cli import main\n", "layer 5 (report) imports layer 6"),
        ("sampler/planted.py", "from headrace.learner import losses\n", "sibling roles"),
        ("sampler/planted.py", "from ..learner import losses\n", "sibling roles"),
        ("weights/planted.py", "def f():\n    import headrace.sampler.engine\n", "sibling roles"),
        ("runtime/simulated.py", "from headrace.runtime.local import run_local\n", "sibling runtimes"),
        ("runtime/ray_runtime.py", "from headrace.runtime import local\n", "sibling runtimes"),
        ("report/planted.py", "from headrace.pool import ledger\n", "report reads events only"),
        ("report/planted.py", "from headrace.conductor import Conductor\n", "report reads events only"),
        ("somewhere.py", "x = 1\n", "belongs to no layer"),
        ("pool/planted.py", "x = 1\n" * 601, "601 lines"),
        ("conductor.py", "x = 1\n" * 351, "351 lines"),
        ("pool/planted.py", "class A:\n    def f(self):\n" + "        x = 1\n" * 50, "A.f has 51 lines"),
        ("pool/planted.py", "import asyncio\nasync def f():\n    asyncio.create_task(f())\n", "outside a TaskGroup"),
        ("pool/planted.py", "async def f(loop):\n    loop.create_task(f(loop))\n", "outside a TaskGroup"),
        ("pool/planted.py", "import asyncio\nasync def f():\n    asyncio.ensure_future(f())\n", "outside a TaskGroup"),
        ("pool/planted.py", "import time\ndef f():\n    time.sleep(1)\n", "time.sleep"),
        ("pool/planted.py", "import time as t\ndef f():\n    t.sleep(1)\n", "time.sleep"),
        ("pool/planted.py", "from time import sleep\n", "time.sleep"),
    ],
)
def test_planted_violation_is_seen(tmp_path: Path, file: str, planted: str, what: str) -> None:
    path = tmp_path / "headrace" / file
    path.parent.mkdir(parents=True)
    path.write_text(planted)
    found = violations(tmp_path / "headrace")
    assert found and all(each.startswith(f"{file}:") for each in found)
    assert any(what in each for each in found)


def test_violation_planted_in_a_copy_of_the_source_is_seen(tmp_path: Path) -> None:
    copy = tmp_path / "headrace"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    module = copy / "pool" / "pool.py"
    module.write_text(module.read_text() + "\n\ndef planted() -> None:\n    from headrace.learner import losses\n")
    assert [found for found in violations(copy) if found not in violations(PACKAGE)] == [
        f"pool/pool.py:{module.read_text().count(chr(10))}: sibling roles import each other: pool imports headrace.learner.losses"
    ]


@pytest.mark.parametrize(
    "planted",
    [
        "async def f(group):\n    group.create_task(f(group))\n",
        "class A:\n    async def f(self):\n        self._task_group.create_task(self.f())\n",
        "from headrace.types import Task\nfrom headrace.roles import Sampler\nfrom headrace.pool import ledger\nfrom headrace import __version__\n",
        "import asyncio\nasync def f():\n    await asyncio.sleep(1)\n",
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path: Path, planted: str) -> None:
    copy = tmp_path / "headrace"
    (copy / "pool").mkdir(parents=True)
    (copy / "pool" / "planted.py").write_text(planted)
    assert violations(copy) == []


@pytest.mark.parametrize(
    "code",
    [
        "import headrace",
        "import headrace, headrace.types, headrace.errors, headrace.roles, headrace.events, headrace.clock, headrace.recipe",
        "from headrace.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass",
        "from headrace.cli.main import main\nmain(['version'])",
        "from headrace.cli.main import main\nmain(['no-such-command'])",
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str) -> None:
    check = f"{code}\nimport sys\nprint('LOADED', [name for name in {HEAVY_MODULES!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert "LOADED []" in result.stdout


def test_printing_settings_loads_no_model_library() -> None:
    heavy = ("torch", "transformers", "ray", "vllm", "numpy")
    code = f"from headrace.cli.main import main\nmain(['config', 'door'])\nimport sys\nprint('LOADED', [name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "LOADED []" in result.stdout
