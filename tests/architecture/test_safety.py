"""What must not be in headrace's code: reading data as code (issue of data that strangers could write), shells, sockets to the world."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "headrace"

# path below src/headrace -> what it may do all the same, and why
ALLOWED = {
    ("runtime/wire.py", "pickle.loads"): "a private socket pair with our own children",
    ("rollout/user_process.py", "pickle.loads"): "pipes with our own children, which run the recipe's code",
    ("cli/interrupts.py", "exec"): "of an empty text",
    ("sandbox_launcher.py", "os.execv"): "the sandboxed program itself",
}
FORBIDDEN = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open", "dill.loads", "cloudpickle.loads", "joblib.load"),
    *("torch.load", "yaml.load", "eval", "exec", "os.system", "os.popen", "os.execv"),
    *("socket.create_server", "asyncio.start_server", "http.server.HTTPServer"),
}


def findings(package: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name in FORBIDDEN:
                yield relative, name
            if any(word.arg == "shell" and not (isinstance(word.value, ast.Constant) and word.value.value is False) for word in node.keywords):
                yield relative, "shell="
            if name.endswith((".bind", ".listen")) and not name.startswith("inspect."):
                yield relative, name


def test_nothing_reads_data_as_code_or_opens_a_port_but_where_a_reason_is_given() -> None:
    assert set(findings(PACKAGE)) == set(ALLOWED)


@pytest.mark.parametrize("line", ["pickle.loads(b'')", "torch.load('a')", "subprocess.run('ls', shell=True)", "eval('1')", "server.bind(('', 80))"])
def test_a_planted_violation_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "planted.py").write_text(line, encoding="utf-8")
    assert len(list(findings(tmp_path))) == 1
