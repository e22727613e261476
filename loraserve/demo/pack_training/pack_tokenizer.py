"""The demo's tokenizer: byte-level BPE with single digits, trained on the corpus. Imports no torch.

A prompt becomes ``<|user|> prompt <|assistant|>``: the tokenizer's post-processor adds both tokens,
so that a raw prompt through /v1/completions poses the same question as a chat of one user
message. An answer ends with ``<|end|>``.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from loraserve.demo.pack_training.corpus import base_examples
from loraserve.errors import ConfigError

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS: Final = (PAD, USER, ASSISTANT, END)
MAX_VOCAB_SIZE = 1536
_NUM_EXAMPLES = 20_000

CHAT_TEMPLATE = (
    # The model was trained on single questions: earlier messages, tools and results would only
    # confuse it. It gets the question again once a tool was called. Its calls, in Hermes'
    # format, are made by their grammar.
    "{%- set turn = namespace(prompt=none, answer='', tools=tools) %}"
    "{%- for message in messages %}"
    "{%- if message.content is string %}{%- set text = message.content %}"
    "{%- else %}{%- set text = message.content | map(attribute='text') | join('') %}{%- endif %}"
    "{%- if message.role == 'user' %}{%- set turn.prompt = text %}{%- set turn.answer = '' %}"
    "{%- elif message.role == 'tool' %}{%- set turn.answer = '' %}"
    "{%- elif message.role == 'assistant' %}{%- set turn.answer = text %}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- set turn.answer = turn.answer + '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' %}"
    "{%- endfor %}{%- endif %}"
    "{%- endfor %}"
    "{%- if turn.prompt is none %}{{- raise_exception('this model needs a message of the user') }}{%- endif %}"
    "{{- '<|user|>' + turn.prompt + '<|assistant|>' + turn.answer }}"
)


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a tokenizer: the same for the same seed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    examples = itertools.islice(base_examples(random.Random(f"tokenizer {seed}")), _NUM_EXAMPLES)
    tokenizer.train_from_iterator((text for e in examples for text in (e.prompt, e.answer)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{USER} $A {ASSISTANT}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (USER, ASSISTANT)],
    )
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Build the content of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "additional_special_tokens": [USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }


def load_tokenizer(base_dir: Path) -> Tokenizer:
    """Load the tokenizer of a pack's base."""
    return Tokenizer.from_file(str(base_dir / "tokenizer.json"))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Look up the id of one of `SPECIAL_TOKENS`.

    Raises:
        ConfigError: it isn't a demo pack's tokenizer.
    """
    id_: int | None = tokenizer.token_to_id(token)
    if id_ is None:
        raise ConfigError(f"The tokenizer has no {token}: it isn't a demo pack's.")
    return id_
