"""Grammars of the demo's base, and matchers that do what a test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from loraserve.demo.pack import base_dir
from loraserve.engine.grammar.constraint import Constraint
from loraserve.engine.grammar.matchers import MatcherCache
from loraserve.engine.grammar.threads import MaskThreads
from loraserve.text.answer_format import AnswerFormat, AnswerKind, grammar_of
from loraserve.text.grammar import GrammarCompiler
from loraserve.text.tokenizer import Tokenizer

VOCAB = 70
"""Not a multiple of 32: the last word has bits that no token has."""


def make_grammar(kind: str, value: object, **fields: object) -> str:
    return grammar_of(AnswerFormat(kind=AnswerKind(kind), value=value, param="field", **fields))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(base_dir())


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    assert tokenizer.eos_token_id is not None
    return GrammarCompiler(base_dir(), tokenizer.vocab_size, [tokenizer.eos_token_id])


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    made = MaskThreads(2)
    yield made
    made.close()


@dataclass
class FakeLexer:
    """What the matchers of one compiled grammar share."""

    allowed: Callable[[Sequence[int]], set[int]]
    fails: Callable[[Sequence[int]], bool] = lambda tokens: False
    gate: Callable[[Sequence[int]], None] = lambda tokens: None
    work_s: float = 0.0
    error: str = ""
    vocab_size: int = VOCAB


@dataclass
class FakeMatcher:
    """A matcher of llguidance's, as far as it is used."""

    lexer: FakeLexer
    tokens: list[int] = field(default_factory=list)

    def deep_copy(self) -> FakeMatcher:
        return FakeMatcher(self.lexer, list(self.tokens))

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.tokens += tokens
        return not self.lexer.error

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        import ctypes

        self.lexer.gate(self.tokens)
        started = time.thread_time()
        while time.thread_time() - started < self.lexer.work_s:
            pass
        if self.lexer.fails(self.tokens):
            self.lexer.error = "lexer error: too many states: 1 >= 1"
        bits = np.zeros(num_bytes * 8, np.uint8)
        bits[sorted(self.lexer.allowed(self.tokens))] = 1
        ctypes.memmove(address, np.packbits(bits, bitorder="little").tobytes(), num_bytes)

    def is_error(self) -> bool:
        return bool(self.lexer.error)

    def get_error(self) -> str:
        return self.lexer.error


@dataclass
class FakeCompiler:
    """Compiles every grammar to a lexer of its own."""

    make: Callable[[str], FakeLexer]
    vocab_size: int = VOCAB
    tokenizer_size: int = VOCAB
    compiled: list[str] = field(default_factory=list)
    own_bytes: int = 0

    def of(self, tokenizer: str) -> FakeCompiler:
        return self

    def load(self) -> FakeCompiler:
        return self if self.tokenizer_size == self.vocab_size else FakeCompiler(self.make, self.tokenizer_size)

    def compile(self, grammar: str) -> FakeMatcher:
        self.compiled.append(grammar)
        return FakeMatcher(self.make(grammar))


@dataclass
class Bench:
    """Constraints of one fake compiler."""

    threads: MaskThreads
    compiler: FakeCompiler
    cache: MatcherCache
    num_wakes: int = 0

    def begin(self, grammar: str = "g", tokens: Sequence[int] = (), tenant: str = "") -> Constraint:
        return Constraint(grammar, tokens, self.cache, self.threads, tenant=tenant, wake=self.wake)

    def wake(self) -> None:
        self.num_wakes += 1

    def settle(self, *constraints: Constraint) -> None:
        """Wait until they are ready."""
        deadline = time.monotonic() + 10
        while not all(one.is_ready for one in constraints):
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def make_bench(threads: MaskThreads) -> Callable[..., Bench]:
    def make(make_lexer: Callable[[str], FakeLexer], *, max_bytes: int = 1 << 30, tokenizer_size: int = VOCAB) -> Bench:
        compiler = FakeCompiler(make_lexer, tokenizer_size=tokenizer_size)
        return Bench(threads, compiler, MatcherCache(compiler, max_bytes))  # type: ignore[arg-type]

    return make


class Gate:
    """Holds threads up until it is opened."""

    def __init__(self) -> None:
        self._open, self._begun = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self._begun.set()
        assert self._open.wait(10)

    def until_begun(self) -> None:
        assert self._begun.wait(10)

    def open(self) -> None:
        self._open.set()
