"""Tokenizers with the markers of every family, and their parsers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers
from tool_answers import EOS, MARKERS, TOOLS

from loraserve.text.tokenizer import Tokenizer
from loraserve.text.tool_parsers.parser import Parser
from loraserve.text.tool_parsers.table import tool_format


@pytest.fixture(scope="session", params=["special", "added", "text"])
def markers_are(request: pytest.FixtureRequest) -> str:
    """Whether markers are special tokens, added tokens, or text like any other."""
    kind: str = request.param
    return kind


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    def make(markers_are: str = "special", markers: Iterable[str] = MARKERS) -> Tokenizer:
        path = tmp_path_factory.mktemp("tokenizer")
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = HFTokenizer(models.BPE(vocab={char: id_ for id_, char in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([EOS])
        if markers_are == "special":
            tokenizer.add_special_tokens(list(markers))
        elif markers_are == "added":
            tokenizer.add_tokens(list(markers))
        tokenizer.save(str(path / "tokenizer.json"))
        return Tokenizer(path)

    return make


@pytest.fixture(scope="session")
def make_parser(make_tokenizer: Callable[..., Tokenizer]) -> Callable[..., Parser]:
    tokenizer = make_tokenizer("text")

    def make(name: str, template: str = "", hidden: Iterable[str] = ()) -> Parser:
        format_ = tool_format(name, tokenizer, template)
        assert format_ is not None
        return format_.parser(TOOLS, tuple(hidden))

    return make
