from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from loraserve.errors import ConfigError
from loraserve.text.tokenizer import Tokenizer, _truncate

MakeDir = Callable[..., Path]


def test_encoding_and_decoding_are_inverse(make_model_dir: MakeDir) -> None:
    tokenizer = Tokenizer(make_model_dir("byte_level"))
    text = " naïve 中文 👩‍👩‍👧 \n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_post_processor_decides_bos_without_config(make_model_dir: MakeDir) -> None:
    tokenizer = Tokenizer(make_model_dir("byte_level", {"bos_token": "<|bos|>"}))
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 0
    assert 0 not in tokenizer.encode("a", add_special_tokens=False)


def test_add_bos_token_false_removes_template_bos(make_model_dir: MakeDir) -> None:
    tokenizer = Tokenizer(make_model_dir("byte_level", {"bos_token": "<|bos|>", "add_bos_token": False}))
    assert 0 not in tokenizer.encode("a")
    # what the caller wrote stays
    assert tokenizer.encode("<|bos|>a")[0] == 0


def test_add_bos_token_true_never_doubles_bos(make_model_dir: MakeDir) -> None:
    tokenizer = Tokenizer(make_model_dir("byte_level", {"bos_token": {"content": "<|bos|>"}, "add_bos_token": True}))
    assert tokenizer.encode("a").count(0) == 1


@pytest.mark.parametrize("config", [{}, {"bos_token": "<|bos|>", "add_bos_token": False}])
@pytest.mark.parametrize("kind", ["byte_level", "llama2"])
def test_texts_and_pairs_are_truncated_like_tokenizers_library(
    make_model_dir: MakeDir, kind: str, config: dict[str, object]
) -> None:
    path = make_model_dir(kind, config)
    tokenizer, other = Tokenizer(path), tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    long, short = "a longer text, in many tokens", "two words"
    for text, pair in ((long, None), (long, short), (short, long), (long, long)):
        assert len(tokenizer.encode_within(text, pair, max_tokens=None)) <= 200
        for max_tokens in (1, 2, 3, 5, 8, 13, 21, 40, 200):
            for direction in ("left", "right"):
                ids = tokenizer.encode_within(text, pair, max_tokens=max_tokens, keeps_end=direction == "left")
                assert len(ids) <= max_tokens
                if config or max_tokens < 3:
                    continue
                other.enable_truncation(max_tokens, direction=direction)
                assert ids == other.encode(text, pair).ids
    assert tokenizer.encode_within(long, max_tokens=None) == tokenizer.encode(long)
    bare = tokenizer.encode_within(long, max_tokens=4, add_special_tokens=False)
    assert bare == tokenizer.encode(long, add_special_tokens=False)[:4]


@pytest.mark.parametrize("keeps_end", [False, True])
@pytest.mark.parametrize("length", [0, 1, 3, 999, 1000, 1001])
def test_truncated_text_is_not_kept_in_pieces(make_model_dir: MakeDir, length: int, keeps_end: bool) -> None:
    tokenizer = Tokenizer(make_model_dir("byte_level"))
    text = "0 1 2 3 4 5 6 7 8 9 " * 100
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 1001
    encoding = tokenizer._encode(text, False)
    _truncate(encoding, length, keeps_end=keeps_end)
    assert encoding.ids == (ids[max(0, len(ids) - length) :] if keeps_end else ids[:length])
    assert len(encoding.overflowing) <= 1


def test_token_bytes_concatenate_to_the_text(make_model_dir: MakeDir) -> None:
    for kind in ("byte_level", "llama2"):
        tokenizer = Tokenizer(make_model_dir(kind))
        ids = tokenizer.encode("ab 中é👩", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "ab 中é👩"


def test_an_id_outside_the_vocabulary_has_no_bytes(make_model_dir: MakeDir) -> None:
    tokenizer = Tokenizer(make_model_dir("byte_level"))
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.id_to_token(10**6) is None


def test_directory_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer_config_is_a_config_error(make_model_dir: MakeDir) -> None:
    path = make_model_dir("byte_level")
    (path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        Tokenizer(path)


def test_text_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, loraserve.text.tokenizer, loraserve.text.chat_template; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "set()"
    )
