"""Data-parallel ranks: joining and leaving them, and one flat gradient that is summed in a single collective."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


def init_ranks(rank: int, world_size: int, address: str, *, timeout_seconds: float = 1800.0) -> None:
    """Joins the learner's ranks: gloo for CPU tensors, nccl for CUDA ones. Returns when all are there; one rank alone needs no group.

    `address`: "tcp://127.0.0.1:PORT" or "file:///path/that/does/not/exist/yet".
    """
    if world_size == 1:
        return
    if any(name in address for name in ("127.0.0.1", "localhost", "file://")):
        # without this gloo resolves the host's name, which a laptop without a network cannot
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        init_method=address,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def shutdown_ranks() -> None:
    """Leaves the group, if there is one. Closes its sockets and threads."""
    if dist.is_initialized():
        dist.destroy_process_group()


def reduce_sum(tensor: Tensor, world_size: int) -> Tensor:
    """Sum over ranks, in place."""
    if world_size > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def reduce_max(tensor: Tensor, world_size: int) -> Tensor:
    """Maximum over ranks, in place."""
    if world_size > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


class FlatGradients:
    """All gradients as one tensor; every parameter's `.grad` is a view of it, so backward adds in place and nothing is copied."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        trained = list(parameters)
        self.flat = torch.zeros(sum(parameter.numel() for parameter in trained), dtype=trained[0].dtype, device=trained[0].device)
        position = 0
        for parameter in trained:
            parameter.grad = self.flat[position : position + parameter.numel()].view_as(parameter)
            position += parameter.numel()

    def clear(self) -> None:
        self.flat.zero_()

    def norm(self) -> float:
        return float(torch.linalg.vector_norm(self.flat))
