"""A stand-in for a model of Hermes' family, with tools and reasoning, for a fake engine.

A test's module imports the fixtures `base` and `model_dir`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

TEMPLATES = Path(__file__).resolve().parents[1] / "unit" / "text" / "templates"
EOS = "<|eos|>"
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_start|>", "<|im_end|>")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ångström"}}\n</tool_call>'
TIME_CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text half of a model of Hermes' family; its markers are special tokens."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HFTokenizer(models.BPE(vocab={char: id_ for id_, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, *MARKERS])
    tokenizer.add_tokens(["<|late|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text((TEMPLATES / "hermes.jinja").read_text())
    return path


@pytest.fixture
def base(base: Any) -> Any:
    return msgspec.structs.replace(base, max_model_len=4096)


def prompt_of(engine: Any) -> str:
    """The prompt of the engine's last request, with its special tokens."""
    text: str = engine.tokenizer.decode(engine.seen[-1].prompt_token_ids, skip_special_tokens=False)
    return text
