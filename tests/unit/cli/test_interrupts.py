"""Ctrl-C pressed at the worst moments, in processes of their own: `press` is that key."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

BEGIN = """
import asyncio, atexit, os, signal, subprocess, sys
from headrace.cli import __main__ as process, interrupts, main as commands

def press():
    os.kill(os.getpid(), signal.SIGINT)

class AtLast:
    def __init__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        self.press = lambda: kill(pid, number)
    def __del__(self):
        self.press()

async def work():
    try:
        press()
        await asyncio.sleep(60)
    finally:
        press()
        press()
        try:
            await asyncio.sleep(60)
        finally:
            press()
            print("cleaned up", file=sys.stderr)

def execute(given, output):
    output.say("at work")
"""
END = """
commands._execute = execute
sys.exit(process.entry())
"""


def run(body: str, *, ignored: bool = False) -> subprocess.CompletedProcess[str]:
    begin = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if ignored else ""
    # -m as people have it: Python ends it by other paths than -c or a file
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "pressed.py").write_text(begin + BEGIN + body + END)
        return subprocess.run([sys.executable, "-m", "pressed", "run", "--json"], cwd=directory, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "body",
    [
        "    press()\n",
        "    exec('press()', globals())\n",
        "    interrupts.run(work())\n",
        "    try:\n        interrupts.run(work())\n    finally:\n        press()\n",
        "    try:\n        press()\n    finally:\n        interrupts.absorb()\n        press()\n",
        "    globals()['kept'] = AtLast()\n    atexit.register(press)\n    press()\n",
        "interrupts.install = lambda install=interrupts.install: (install(), press())\n",
    ],
    ids=["once", "in a text that is run", "while it cleans up", "while the next part ends", "while it tells", "while Python shuts down", "while Python starts"],
)
def test_ctrl_c_ends_with_130_and_its_object_however_often_it_is_pressed(body: str) -> None:
    done = run(body)
    assert done.returncode == 130, done.stderr
    assert json.loads(done.stdout)["status"] == "interrupted"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert ("interrupts.run" in body) == ("cleaned up" in done.stderr)


def test_a_command_that_is_done_stays_done_when_ctrl_c_comes_at_shutdown() -> None:
    done = run("    globals()['kept'] = AtLast()\n    atexit.register(press)\n    output.result({})\n    return 0\n")
    assert (done.returncode, json.loads(done.stdout)["status"]) == (0, "done")


def test_an_error_of_the_work_is_not_hidden_by_one_ctrl_c() -> None:
    done = run("    async def fail():\n        press()\n        raise ValueError('broken')\n    interrupts.run(fail())\n")
    assert (done.returncode, json.loads(done.stdout)["error"]["message"]) == (1, "broken")


def test_started_programs_can_be_interrupted() -> None:
    code = "import signal; signal.raise_signal(signal.SIGINT)"
    done = run(f"    child = subprocess.run([sys.executable, '-c', '{code}'], stderr=subprocess.DEVNULL)\n    return -child.returncode\n")
    assert done.returncode == 2


def test_ctrl_c_that_is_ignored_from_outside_stays_ignored() -> None:
    done = run("    press()\n    output.result({})\n    return 0\n", ignored=True)
    assert (done.returncode, json.loads(done.stdout)["status"]) == (0, "done")


def test_a_call_in_another_process_leaves_its_ctrl_c_alone() -> None:
    import signal

    from headrace.cli.main import main

    before = signal.getsignal(signal.SIGINT)
    assert main(["version"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
