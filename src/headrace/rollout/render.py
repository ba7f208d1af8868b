"""The only place where text becomes tokens during a rollout, and tokens become the text an environment sees.

I4: a prompt grows only at its end. What was sampled stays as it was sampled: decoding and encoding it again could give other
tokens, and the learner would then train on something that the sampler never saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from headrace.roles import Tokenizer
from headrace.types import Action, Completion, Observation, SamplingParameters

_SHORT = 64
_NUM_CACHED = 8192


class ShortTextCache:
    """A tokenizer that remembers short texts: environments say the same few things again and again, and a Hugging Face call takes
    about 50 us whatever its length."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id

        @lru_cache(_NUM_CACHED)
        def encode(text: str, add_special_tokens: bool) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))

        @lru_cache(_NUM_CACHED)
        def decode(token_ids: tuple[int, ...], skip_special_tokens: bool) -> str:
            return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

        self._encode, self._decode = encode, decode

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) > _SHORT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return list(self._encode(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if len(token_ids) > _SHORT:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._decode(tuple(token_ids), skip_special_tokens)


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
