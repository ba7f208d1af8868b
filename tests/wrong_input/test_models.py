# ruff: noqa: E501  (one row of the table a line)
"""Wrong models, tokenizers and devices: found by the role processes as they start, told by the command: exit 2, nothing stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fakes.tiny_models import tiny_model, tiny_tokenizer
from headrace.runtime import processes
from wrong_input.rig import Wrong, assert_ended_as_said, ids, run_row

KIND = "ModelError"
FROM_PATH = ("model.path=model", "model.characters=none", "model.architecture=none")

ROWS = [
    Wrong(did="a model that does not exist", kind=KIND, overrides=("model.path=no_such_model",), says=("no_such_model", "neither a directory nor a model", "Hugging Face directory")),
    Wrong(did="an architecture that transformers does not know", kind=KIND, edits=(('"llama"', '"lama"'),), says=("model.architecture", "no model_type 'lama'")),
    Wrong(did="a misspelt key of the architecture", kind=KIND, edits=(("hidden_size", "hiden_size"),), says=("model.architecture", "'hiden_size'", "Did you mean 'hidden_size'?")),
    Wrong(did="an architecture that cannot be built", kind=KIND, edits=(("hidden_size = 16", "hidden_size = 17"),), says=("model.architecture", "17")),
    Wrong(did="a character twice in the alphabet", kind=KIND, edits=(('"abc?"', '"abca?"'),), says=("model.characters", "'a'", "more than once")),
    Wrong(did="a KV cache too small for one sequence", kind=KIND, edits=(("hidden_size = 16, ", "hidden_size = 512, "), ("max_tokens = 32", "max_tokens = 64")), overrides=("sampler.kv_memory_bytes=65536",), says=("sampler.kv_memory_bytes", "65536")),
    Wrong(did="demonstrations outside the alphabet", kind="RecipeError", overrides=("warm_start.demonstrations=task:demos", "warm_start.num_updates=2"), task="def demos():\n    yield 'ab?', 'xyz'\n", says=("'xyz'", "model.characters")),
    Wrong(did="demonstrations that raise", kind="RecipeError", overrides=("warm_start.demonstrations=task:demos", "warm_start.num_updates=2"), task="def demos():\n    raise OSError('no file')\n    yield\n", says=("task:demos", "OSError: no file", "line 8 of task.py")),
    Wrong(did="a device that is not there", kind=KIND, overrides=("model.device=cuda",), says=("model.device", "cuda", "headrace doctor")),
    Wrong(did="a device that torch does not know", kind=KIND, overrides=("model.device=gpu",), says=("model.device", "gpu", "headrace doctor")),
]  # fmt: skip

ROWS_OF_DIRECTORIES = [
    (Wrong(did="a directory without a model", kind=KIND, overrides=FROM_PATH, says=("model", "no *.safetensors file", "save_pretrained")), lambda model: [path.unlink() for path in model.iterdir()]),
    (Wrong(did="damaged weights", kind=KIND, overrides=FROM_PATH, says=("model.safetensors", "not a whole safetensors file")), lambda model: cut(model / "model.safetensors")),
    (Wrong(did="no weights", kind=KIND, overrides=FROM_PATH, says=("model", "safetensors")), lambda model: (model / "model.safetensors").unlink()),
    (Wrong(did="no tokenizer", kind=KIND, overrides=FROM_PATH, says=("model", "tokenizer cannot be loaded", "beside it")), lambda model: [path.unlink() for path in model.glob("token*")]),
    (Wrong(did="a tokenizer of another model", kind=KIND, overrides=FROM_PATH, says=("model", "the tokenizer knows", "tokens")), lambda model: shrink(model)),
    (Wrong(did="a tokenizer without an end token", kind=KIND, overrides=FROM_PATH, says=("model", "end token", "rollout.stop_at_end_token")), lambda model: without_end(model)),
]  # fmt: skip


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def shrink(model: Path) -> None:
    """The same architecture with fewer tokens than the tokenizer beside it has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    config.vocab_size = 10
    AutoModelForCausalLM.from_config(config).save_pretrained(model)


def without_end(model: Path) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "special_tokens_map.json").unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def one_forkserver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module_cache: Path) -> None:
    """Loading torch once is enough for all rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "end_forkserver", lambda: None)


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    end = processes.end_forkserver
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv("HEADRACE_CACHE", str(path))
        patch.setenv("HF_HUB_OFFLINE", "1")
        end()
        yield path
    end()


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_wrong_model_or_device(row: Wrong, capsys: pytest.CaptureFixture[str]) -> None:
    if "model.device=cuda" in row.overrides and torch.cuda.is_available():
        pytest.skip("there is one here")
    assert_ended_as_said(row, run_row(row, capsys))
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("row", "spoil"), ROWS_OF_DIRECTORIES, ids=ids([row for row, _ in ROWS_OF_DIRECTORIES]))
def test_wrong_model_directory(row: Wrong, spoil: Callable[[Path], object], capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tiny_model("llama"), "wrong/model")
    tiny_tokenizer().save_pretrained("wrong/model")
    spoil(Path("wrong/model"))
    assert_ended_as_said(row, run_row(row, capsys))


@pytest.mark.slow
def test_the_same_directory_unspoilt_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """And float16, which a CPU computes slowly, is served and trained like any other type."""
    shutil.copytree(tiny_model("llama"), "wrong/model")
    tiny_tokenizer().save_pretrained("wrong/model")
    row = Wrong(
        did="nothing wrong",
        exit=0,
        says=(),
        overrides=(*FROM_PATH, "model.dtype=float16", "pool.no_signal=train"),
        files={"tasks.jsonl": "".join(f'{{"id": "{i}", "prompt": "abc"}}\n' for i in range(9))},
    )
    ended = run_row(row, capsys)
    assert_ended_as_said(row, ended)
    assert ended.result["num_updates"] == 3
