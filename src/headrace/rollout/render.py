"""The only place where text becomes tokens during a rollout, and tokens become the text an environment sees.

I4: a prompt grows only at its end. What was sampled stays as it was sampled: decoding and encoding it again could give other
tokens, and the learner would then train on something that the sampler never saw.
"""

from __future__ import annotations

from headrace.roles import Tokenizer
from headrace.types import Action, Completion, Observation, SamplingParameters


def render_observation(tokenizer: Tokenizer, observation: Observation, *, first: bool) -> list[int]:
    """[observation] tokens of what the environment shows. Only the first prompt gets the tokenizer's own special tokens (BOS)."""
    return list(tokenizer.encode(observation.text, add_special_tokens=first))


def read_action(tokenizer: Tokenizer, completion: Completion, sampling: SamplingParameters) -> Action:
    """The action as the environment sees it: the text ends before the stop token or the first stop string."""
    tokens = completion.tokens
    spoken = tokens[:-1] if tokens and tokens[-1] in sampling.stop_tokens else tokens
    text = tokenizer.decode(list(spoken), skip_special_tokens=True)
    cuts = [text.find(stop) for stop in sampling.stop_strings if stop in text]
    return Action(text=text[: min(cuts)] if cuts else text, tokens=tokens, stop_reason=completion.stop_reason)
