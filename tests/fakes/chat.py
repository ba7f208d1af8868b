"""Tokenizers with the chat templates of well-known model families, over bytes: nothing is downloaded."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{ '<|begin|>' }}{% for message in messages %}{{ '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
STRICT = (
    "{{ '<bos>' }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' + message['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
INSTRUCT = (
    "{{ '<s>' }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' </s>' }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% set last = namespace(user=0) %}{% for message in messages %}{% if message['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message['content'] %}{% if message['role'] == 'assistant' and loop.index0 < last.user %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_FAMILIES = {
    # template, end token of the tokenizer, special tokens
    "chatml": (CHATML, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "headers": (HEADERS, "<|eot|>", ("<|begin|>", "<|start|>", "<|end|>", "<|eot|>")),
    "strict": (STRICT, "<eos>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),  # its answers end otherwise than its texts
    "instruct": (INSTRUCT, "</s>", ("<s>", "</s>")),  # a space before the end token
    "thinking": (THINKING, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),  # leaves the thoughts of earlier answers out
}
FAMILIES = tuple(_FAMILIES)


@functools.cache
def chat_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """One token a byte and the family's special tokens."""
    template, end, special = _FAMILIES[family]
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, extra_special_tokens=[token for token in special if token != end], chat_template=template
    )
