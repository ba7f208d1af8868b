"""A model directory is data: no Python in it runs, nothing of it is unpickled, and nobody is asked whether it may."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fakes.tiny_models import tiny_model
from headrace.cli.trajectories import decoder
from headrace.config import Settings
from headrace.errors import ModelError
from headrace.learner.core import load_model
from headrace.learner.lora import adapter_layout

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nPath({ran!r}).touch()\nclass Strange: pass\n"


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with code of its own for everything; whoever is asked says yes."""
    directory = tmp_path / "strange"
    directory.mkdir()
    (directory / "strange.py").write_text(CODE.format(ran=str(tmp_path / "ran")), encoding="utf-8")
    names = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "strange.Strange")
    (directory / "config.json").write_text(json.dumps({"model_type": "strange", "auto_map": names}), encoding="utf-8")
    tokenizer = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["strange.Strange", "strange.Strange"]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return directory


def read_model(directory: Path) -> None:
    load_model(str(directory), torch.float32, torch.device("cpu"))


def read_layout(directory: Path) -> None:
    adapter_layout(str(directory), Settings.model_validate({"model": {"path": str(directory), "lora_rank": 2}}))


@pytest.mark.parametrize("read", [read_model, read_layout])
def test_no_python_of_a_model_runs_and_nobody_is_asked(strange: Path, read: Callable[[Path], None]) -> None:
    with pytest.raises((ModelError, ValueError), match="custom code"):
        read(strange)
    assert not (strange.parent / "ran").exists()


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json"])
def test_a_tokenizer_that_wants_code_to_run_or_is_damaged_is_none(strange: Path, file: str) -> None:
    run = strange.parent / "run"
    run.mkdir()
    (run / "config.toml").write_text(f'[model]\npath = "{strange}"\n', encoding="utf-8")
    (strange / file).touch()
    assert decoder(run) is None
    assert not (strange.parent / "ran").exists()


def test_weights_that_are_a_pickle_are_not_read(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        read_model(model)
