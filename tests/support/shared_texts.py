"""The tokenizer and the chat template of a model's directory, read once a process."""

from __future__ import annotations

import functools
from pathlib import Path

from loraserve.text.chat_template import ChatTemplate
from loraserve.text.tokenizer import Tokenizer


@functools.cache
def tokenizer_of(model_dir: Path) -> Tokenizer:
    """Return a model's tokenizer, which tests share and leave as it is."""
    return Tokenizer(model_dir)


@functools.cache
def template_of(model_dir: Path) -> ChatTemplate:
    """Return a model's template, which tests share and leave as it is."""
    return ChatTemplate(model_dir, tokenizer_of(model_dir))
