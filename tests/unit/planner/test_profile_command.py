"""headrace profile: its object, its file, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes import profiled_run
from fakes.model_configs import QWEN_7B
from headrace.cli import profile as command
from headrace.cli.main import main
from headrace.config_loading import ResolvedSettings
from headrace.planner.profile import load_profile


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["profile", *arguments, "--json"])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, printed


def test_a_runs_profile_is_written_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiled_run.write_run(tmp_path / "run", num_updates=12)
    code, printed = told(capsys, str(tmp_path / "run"), "--out", str(tmp_path / "p.json"))
    assert code == 0 and printed["status"] == "done"
    assert printed["profile"] == json.loads((tmp_path / "p.json").read_text())
    assert printed["profile"]["source"] == {"kind": "run", "from": str(tmp_path / "run")}
    assert load_profile(tmp_path / "p.json").source.kind == "run"


def test_a_models_config_and_a_device_make_an_estimated_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    given = ("--device", "h100", "--answer-tokens", "2000", "--max-answer-tokens", "8192", "--group-size", "16", "--out", str(tmp_path / "p.json"))
    code, printed = told(capsys, str(tmp_path), *given)
    assert code == 0 and printed["profile"]["source"]["kind"] == "estimated"
    profile = load_profile(tmp_path / "p.json")
    assert profile.group.size == 16 and profile.distributions.answer_tokens.most <= 8192
    main(["profile", str(tmp_path / "config.json"), *given])
    assert "ESTIMATED for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["door", "--dtype", "fp8"], "--dtype"),
        (["RUN", "pool.max_staleness=2"], "pool.max_staleness=2"),
        (["MODEL", "--device", "H100", "a.b=1"], "a.b=1"),
        (["MODEL", "--device", "Z80"], "--device"),
        (["MODEL", "--device", "L40S", "--dtype", "float32", "--answer-tokens", "900000"], "--tensor-parallel"),
        (["nothing"], "recipe"),
        (["RUN", "--out", "."], "--out"),
    ],
)
def test_what_makes_no_sense_is_refused_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], key: str) -> None:
    profiled_run.write_run(tmp_path / "run", num_updates=3)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    names = {"RUN": str(tmp_path / "run"), "MODEL": str(tmp_path / "config.json")}
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "p.json")]
    code, printed = told(capsys, *(names.get(each, each) for each in arguments), *out)
    assert code == 2 and printed["status"] == "failed"
    assert printed["error"]["key"] == key and printed["error"]["remedy"]
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize("keep", [False, True])
def test_a_recipe_is_run_shortly_and_its_run_kept_only_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    runs: list[tuple[Path, int, int]] = []

    def short_run(resolved: ResolvedSettings, directory: Path, output: object) -> None:
        profiled_run.write_run(directory, num_updates=6)
        runs.append((directory, resolved.settings.run.num_updates, resolved.settings.evaluation.num_tasks))

    monkeypatch.setattr(command, "_run", short_run)
    asked = ("--run-dir", str(tmp_path / "kept")) if keep else ()
    code, printed = told(capsys, "door", "run.num_updates=500", "--updates", "6", "--out", str(tmp_path / "p.json"), *asked)
    ((directory, num_updates, num_tasks),) = runs
    assert code == 0 and printed["profile"]["source"] == {"kind": "measured", "from": "door"}
    assert num_updates == 6 and num_tasks <= 8
    assert directory.exists() == keep
