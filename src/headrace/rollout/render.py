"""The only place where text and messages become tokens during a rollout, and tokens become the text an environment sees.

I4: a prompt grows only at its end. What was sampled stays as it was sampled: decoding and encoding it again could give other
tokens, and the learner would then train on something that the sampler never saw.

Chats. The first messages are the tokenizer's chat template, with the generation prompt. For later ones the template renders a made-up
conversation, one question, one answer that is a mark, and the new messages: what stands behind the mark is how an answer is closed,
the new messages and the next generation prompt, whatever the template puts before it (a default system message, thoughts it leaves
out of earlier answers). The closing is part of the observation, less the end token if the action drew it itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from headrace.errors import RecipeError
from headrace.roles import Tokenizer
from headrace.types import Action, Completion, Observation, SamplingParameters

_SHORT = 64
_NUM_CACHED = 8192
_MARK = "HEADRACE-ANSWER"
_MADE_UP = ({"role": "user", "content": "Q"}, {"role": "assistant", "content": _MARK})


class ShortTextCache:
    """A tokenizer that remembers short texts: environments say the same few things again and again, and a Hugging Face call takes
    about 50 us whatever its length."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.chat_template = getattr(tokenizer, "chat_template", None)

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

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(conversation, **options)  # type: ignore[attr-defined]  # not every tokenizer has one


def render_observation(
    tokenizer: Tokenizer, observation: Observation, *, first: bool, context: Sequence[int] = (), stop_tokens: Sequence[int] = ()
) -> list[int]:
    """[observation] tokens of what the environment shows. Only a first prompt of text gets the tokenizer's own special tokens (BOS).

    `context`: all tokens so far, which end with an action; `stop_tokens`: those that end one. Both matter to later messages only.
    Raises RecipeError for messages when the tokenizer has no chat template, and whatever a template raises for roles it refuses.
    """
    if not observation.messages:
        return list(tokenizer.encode(observation.text, add_special_tokens=first))
    if first:
        return list(tokenizer.encode(_chat_text(tokenizer, observation.messages), add_special_tokens=False))
    tokens = list(tokenizer.encode(_behind_the_mark(tokenizer, observation.messages), add_special_tokens=False))
    ended = context[-1] if context and context[-1] in stop_tokens else None
    return tokens[tokens.index(ended) + 1 :] if ended in tokens[:2] else tokens  # some templates put a space before the end token


def end_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What ends an action: the tokenizer's end token, and the one with which its chat template ends an answer (they may differ)."""
    found = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if has_chat_template(tokenizer):
        closing = tokenizer.encode(_behind_the_mark(tokenizer, (), prompt=False).lstrip(), add_special_tokens=False)[:1]
        found += [token for token in closing if token not in found and token in getattr(tokenizer, "all_special_ids", ())]
    return tuple(found)


def has_chat_template(tokenizer: Tokenizer) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _chat_text(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, prompt: bool = True) -> str:
    if not has_chat_template(tokenizer):
        raise RecipeError(
            "There are messages to render, but the model's tokenizer has no chat template.",
            remedy="Give texts (`prompt`, Observation(text=...)), or a model that has one: chat_template.jinja beside its tokenizer.",
        )
    rendered: str = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        [dict(message) for message in messages], add_generation_prompt=prompt, tokenize=False
    )
    return rendered


def _behind_the_mark(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, prompt: bool = True) -> str:
    _, mark, behind = _chat_text(tokenizer, (*_MADE_UP, *messages), prompt=prompt).partition(_MARK)
    if not mark:
        raise RecipeError("The tokenizer's chat template does not show an assistant's message, so a chat cannot be continued.", remedy="Use another one.")
    return behind


def read_action(tokenizer: Tokenizer, completion: Completion, sampling: SamplingParameters) -> Action:
    """The action as the environment sees it: the text ends before the stop token or the first stop string."""
    tokens = completion.tokens
    spoken = tokens[:-1] if tokens and tokens[-1] in sampling.stop_tokens else tokens
    text = tokenizer.decode(list(spoken), skip_special_tokens=True)
    cuts = [text.find(stop) for stop in sampling.stop_strings if stop in text]
    return Action(text=text[: min(cuts)] if cuts else text, tokens=tokens, stop_reason=completion.stop_reason)
