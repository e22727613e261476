"""A cursor says what its matcher stands by: it raises where the matcher is in an error."""

from __future__ import annotations

import numpy as np
import pytest
from llguidance import LLExecutor

from loraserve.engine.grammar.cursor import (
    GrammarCursor,
    MatcherFailed,
    compute_masks_together,
    consume_together,
)
from loraserve.errors import GrammarDeadEnd
from loraserve.text.grammar import GrammarCompiler
from loraserve.text.tokenizer import Tokenizer

from .conftest import make_grammar

SPECIAL = make_grammar("grammar", 'start: "hello" <|user|> "there"')
DEAD = make_grammar("grammar", 'start: "ab" dead | "c"\ndead: "x" never\nnever: NEVER\nNEVER: /x+/ & /y+/')


def cursor_of(compiler: GrammarCompiler, grammar: str, text: str, tokenizer: Tokenizer) -> GrammarCursor:
    """Return a cursor that has consumed the text."""
    cursor = GrammarCursor(compiler.compile(grammar))
    cursor.consume(tokenizer.encode(text, add_special_tokens=False))
    return cursor


def mask_of(cursor: GrammarCursor, compiler: GrammarCompiler) -> set[int]:
    buffer = np.zeros(-(-compiler.load().vocab_size // 32), np.uint32)
    cursor.compute_mask(buffer)
    return set(np.flatnonzero(np.unpackbits(buffer.view(np.uint8), bitorder="little")).tolist())


def test_search_for_forced_tokens_keeps_the_mask(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    cursor = cursor_of(compiler, SPECIAL, "hello", tokenizer)
    user = tokenizer.token_to_id("<|user|>")
    assert cursor.forced(1) == (user,)
    assert mask_of(cursor, compiler) == {user}
    assert not cursor.try_token(tokenizer.eos_token_id)
    assert cursor.try_token(user)


def test_mask_of_dead_end_is_refused(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    cursor = cursor_of(compiler, DEAD, "abx", tokenizer)
    with pytest.raises(GrammarDeadEnd):
        mask_of(cursor, compiler)
    # it stays in its error, and says nothing that could be taken for an answer's end
    with pytest.raises(GrammarDeadEnd):
        cursor.try_token(tokenizer.eos_token_id)
    assert cursor.forced(4) == ()


def test_failures_of_matchers_together_stay_apart(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    dead, good, bad = (cursor_of(compiler, grammar, "", tokenizer) for grammar in (DEAD, SPECIAL, SPECIAL))
    executor = LLExecutor(num_threads=1)
    texts = ["abx", "hello", "other"]
    behind = [
        (cursor, tokenizer.encode(text, add_special_tokens=False))
        for cursor, text in zip((dead, good, bad), texts, strict=True)
    ]
    first, second, third = consume_together(executor, behind)
    assert first is None
    assert second is None
    assert isinstance(third, MatcherFailed)
    rows = np.zeros((2, -(-compiler.load().vocab_size // 32)), np.uint32)
    first, second = compute_masks_together(executor, [dead, good], rows)
    assert isinstance(first, GrammarDeadEnd)
    assert second is None
