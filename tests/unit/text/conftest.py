"""Small tokenizers of each kind that real models have, built here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. 1234567890",
    "  leading spaces, trailing spaces  \n\nnew lines\t tabs",
    "中文字符测试 日本語テスト 한국어 👩‍👩‍👧‍👦 🇫🇷 naïve café Ωμέγα ‏שלום",
    "SELECT * FROM tickets WHERE age > 81;",
]


def byte_level() -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken(" añadido ", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return tokenizer


def sentencepiece(*, strip: bool) -> Tokenizer:
    """As Llama 2's and Mistral's (`strip`) or Gemma's."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", "▁▁", *"abcdefgh.,", "é", "▁a", "▁b", "▁ab", "cd", "中", "▁中", "文"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "▁"), ("▁", "a"), ("▁", "b"), ("▁a", "b"), ("c", "d"), ("▁", "中")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3, "▁": 4, "é": 5, "中": 6}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "the": 3, ".": 4, ",": 5, "don": 6, "'": 7, "t": 8}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama2": lambda: sentencepiece(strip=True),
    "gemma": lambda: sentencepiece(strip=False),
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}


@pytest.fixture(scope="session")
def make_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model directory that holds only what text needs."""

    def make(kind: str = "byte_level", config: dict[str, Any] | None = None) -> Path:
        path = tmp_path_factory.mktemp(kind)
        KINDS[kind]().save(str(path / "tokenizer.json"))
        if config is not None:
            (path / "tokenizer_config.json").write_text(json.dumps(config))
        return path

    return make
