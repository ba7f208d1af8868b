"""What `headrace doctor` tries in a role process: the devices torch sees, a matrix product, one update of a tiny model."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import torch


def probe(connection: Connection) -> None:
    """Main of the process: sends (check, facts or an error text) for each of devices, matmul and model."""
    for name, check in (("devices", _devices), ("matmul", _matmul), ("model", _model_update)):
        try:
            connection.send((name, check()))
        except Exception as error:
            connection.send((name, f"{type(error).__name__}: {error}"))
    connection.close()


def _devices() -> dict[str, Any]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {"accelerators": names, "mps": torch.backends.mps.is_available(), "threads": torch.get_num_threads()}


def _matmul() -> dict[str, float]:
    """GFLOP/s of a float32 512 x 512 product on one thread; the best of a few, since a first one warms up."""
    size, seconds = 512, []
    left, right = torch.randn(size, size), torch.randn(size, size)
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - start)
    return {"gigaflops_per_second": 2 * size**3 / min(seconds) / 1e9}


def _model_update() -> dict[str, float]:
    """One optimizer step of a tiny causal language model; raises when the loss or a weight is not finite afterwards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=32,
    )
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens_BT = torch.randint(0, 32, (4, 16))
    start = time.perf_counter()
    loss = model(input_ids=tokens_BT, labels=tokens_BT).loss
    loss.backward()
    optimizer.step()
    if not all(bool(torch.isfinite(each).all()) for each in (loss.detach(), *model.parameters())):
        raise ArithmeticError("the loss or a weight is not finite after one update")
    return {"seconds": time.perf_counter() - start, "loss": float(loss.detach())}
