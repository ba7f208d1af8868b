"""What the forkserver loads once, so that every role process starts with torch and transformers in place.

Imported by the forkserver only: single-threaded, nothing computed.
"""

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.learner import core, warm_start
from headrace.rollout import evaluation, worker
from headrace.sampler import transformers_sampler
from headrace.weights import shared_memory

transformers.utils.logging.disable_progress_bar()  # its bars would draw over ours, and take locks that outlive a killed process

__all__ = [
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "core",
    "evaluation",
    "shared_memory",
    "torch",
    "transformers",
    "transformers_sampler",
    "warm_start",
    "worker",
]
