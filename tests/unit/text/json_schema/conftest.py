"""Answers by chance under a schema, and whether a text is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from loraserve.demo.pack import base_dir
from loraserve.text.answer_format import AnswerFormat, AnswerKind, grammar_of
from loraserve.text.grammar import GrammarCompiler
from loraserve.text.tokenizer import Tokenizer

MAX_TOKENS = 200


class Babbler:
    """Answers by chance among the tokens that a schema allows, and ends where it may."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer(base_dir())
        self._eos = self._tokenizer.eos_token_id or 0
        self._compiler = GrammarCompiler(base_dir(), self._tokenizer.vocab_size, [self._eos])

    def grammar(self, schema: object, **fields: Any) -> str:
        return grammar_of(AnswerFormat(kind=AnswerKind.JSON_SCHEMA, value=schema, param="schema", **fields))

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = self._compiler.compile(grammar)
        return matcher.consume_tokens(self._tokenizer.encode(text, add_special_tokens=False)) and matcher.is_accepting()

    def answers(self, grammar: str, count: int, seed: int = 0) -> Iterator[str]:
        """Yield as many answers that come to an end."""
        draw, origin = np.random.default_rng(seed), self._compiler.compile(grammar)
        for _ in range(4 * count):
            matcher, tokens = origin.deep_copy(), list[int]()
            while len(tokens) < MAX_TOKENS:
                bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
                assert not matcher.is_error(), matcher.get_error()
                allowed = np.flatnonzero(bits[: self._tokenizer.vocab_size])
                token_id = self._eos if self._eos in allowed and draw.random() < 0.5 else int(draw.choice(allowed))
                if token_id == self._eos:
                    break
                tokens.append(token_id)
                assert matcher.consume_token(token_id)
            else:
                continue
            yield b"".join(map(self._tokenizer.token_bytes, tokens)).decode()
            count -= 1
            if not count:
                return


@pytest.fixture(scope="session")
def babbler() -> Babbler:
    return Babbler()


@pytest.fixture(scope="session")
def accepts(babbler: Babbler) -> Callable[..., bool]:
    """Whether a text is an answer to a schema."""
    return lambda schema, text, **fields: babbler.accepts(babbler.grammar(schema, **fields), text)
