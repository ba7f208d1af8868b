"""How long `headrace plan` takes: 64 devices and 1,024, with and without the simulations that check its best plans.

    python benchmarks/planner_speed.py [--devices 64 1024] [--json]

Goals on 2 cores: 64 devices under 10 s, 1,024 under 60 s. The profile is an estimate (a 7B model on H100, long answers with tools waiting
1 s in each of 5 steps, the dearer case of the closed forms); each case is a process of its own, start of Python included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from headrace.planner.distributions import Distribution
from headrace.planner.hardware import DEVICES
from headrace.planner.profile import Profile, save_profile
from headrace.planner.roofline import Engine, estimate_profile
from headrace.planner.shapes import ModelShape

CONFIG = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


def profiles() -> dict[str, Profile]:
    answers = Distribution.lognormal(2000, 1500).capped(8192)
    engine = Engine(shape=ModelShape.from_config(CONFIG), device=DEVICES["H100"])
    plain = estimate_profile(engine, name="7b", prompt_tokens=Distribution.constant(300), answer_tokens=answers, group_size=8)
    waiting = replace(plain.distributions, steps=Distribution.constant(5.0), tool_wait_seconds=Distribution.lognormal(1.0, 1.0))
    return {"answers": plain, "tools": plain.with_distributions(waiting)}


def measure(profile: Path, devices: int, rollouts: int | None) -> dict[str, float]:
    command = [sys.executable, "-m", "headrace.cli", "plan", str(profile), "--gpus", str(devices), "--batch", str(64 * devices), "--json"]
    command += ["--out", str(profile.with_name("plan.json"))] + ([] if rollouts is None else ["--rollouts", str(rollouts)])
    started = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    plans = json.loads(done.stdout)["plans"]
    simulated = sum(plan["verification"]["num_rollouts"] for plan in plans if plan["verification"])
    errors = [
        plan["verification"]["step_seconds"] / plan["verification"]["closed_form_step_seconds"] - 1.0 for plan in plans if plan["verification"]
    ]  # fmt: skip
    return {"seconds": seconds, "simulated_rollouts": simulated, "largest_closed_form_error": max(map(abs, errors), default=0.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, profile in profiles().items():
            path = Path(folder) / name / "profile.json"
            save_profile(profile, path)
            for devices in arguments.devices:
                for rollouts in (0, None):
                    results.append({"profile": name, "devices": devices, "checked": rollouts is None, **measure(path, devices, rollouts)})
                    if not arguments.json:
                        last = results[-1]
                        how = f"{last['simulated_rollouts']:,} rollouts simulated, closed form within {last['largest_closed_form_error']:.1%}"
                        print(f"{name:8} {devices:5} devices  {last['seconds']:6.1f} s  {how if last['checked'] else 'closed forms only'}", flush=True)
    if arguments.json:
        print(json.dumps({"cases": results}))


if __name__ == "__main__":
    main()
