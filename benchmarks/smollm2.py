"""The greedy row of recipes/smollm2/README.md: held-out countries, answered by transformers' own `generate`, before and after a run.

    python benchmarks/smollm2.py RUN          # a finished run of `headrace run smollm2`

Neither the sampler nor peft takes part: the checkpoint is loaded as any tool would load it.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes" / "smollm2"))

from task import evaluation_tasks, reward

from headrace.config_loading import load_settings
from headrace.runtime.local_evaluation import start_model
from headrace.types import Task

NEW_TOKENS = 32


def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def mean_reward(directory: Path) -> float:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    rewards = []
    for fields in evaluation_tasks():
        task = Task(id=fields["id"], data=fields["data"])
        rewards.append(asyncio.run(reward(task, answer(model, tokenizer, task.data["messages"]))))
    return statistics.fmean(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    arguments = parser.parse_args()
    before = asyncio.run(start_model(load_settings("smollm2")))
    after = max((arguments.run / "checkpoints").glob("update_*"))
    print(f"{platform.machine()}, {datetime.now(UTC):%Y-%m-%d}: benchmarks/smollm2.py, {sum(1 for _ in evaluation_tasks())} held-out countries, greedy")
    print(f"before {mean_reward(before):.2f}, after ({after.name}) {mean_reward(after):.2f}")


if __name__ == "__main__":
    main()
