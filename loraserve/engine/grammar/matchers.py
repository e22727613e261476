"""Compiled grammars in memory, within a budget of bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loraserve.memory.timings import Timings
from loraserve.tenant_cache import TenantCache
from loraserve.text.grammar import GrammarCompiler
from loraserve.types import Histogram

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MAX_THREADS = 8
"""Threads that compute a tenant's masks together, at most."""
LEAST_BYTES, BYTES_PER_CHARACTER = 1 << 20, 64
"""Bytes that a compiled grammar counts with at least: its lexer grows as it is used, by up to
`MAX_LEXER_STATES`.
"""


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A grammar's lexer and rules, which all of its matchers share.

    Attributes:
        origin: a matcher at the grammar's beginning, to copy.
        vocab_size: tokens that may be sampled: the logits' width, or more by a version's own
        tokens.
        mask_num_words: words of 32 bits of a matcher's mask: a bit for each token of tokenizer or
            logits.
        lock: held while a matcher works. The shared lexer has a lock of its own, which would be
            waited for with the interpreter's.
        is_slow: whether a mask once took long.
    """

    origin: LLMatcher
    num_bytes: int
    vocab_size: int
    mask_num_words: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_slow: bool = False

    def new_matcher(self) -> LLMatcher:
        """Copy a matcher at the grammar's beginning. It takes microseconds."""
        with self.lock:
            return self.origin.deep_copy()


class MatcherCache:
    """Compiled grammars by tenant, tokenizer and text.

    Tenants share neither a compilation nor a lexer, which a grammar's use makes faster, or ends.
    Safe to use from several threads.

    Args:
        compiler: makes what isn't there.
        max_bytes: budget, as in `TenantCache`; a grammar over a tenant's share is compiled for each
            request.

    Attributes:
        num_compiled: compilations so far, failed ones included.
    """

    def __init__(
        self, compiler: GrammarCompiler, max_bytes: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.num_compiled = 0
        self._compiler, self._clock = compiler, clock
        self._lock = threading.Lock()
        self._compiled: TenantCache[CompiledGrammar] = TenantCache(max_bytes)
        self._compile_s = Timings()
        self._executors: dict[int, LLExecutor] = {}

    @property
    def num_bytes(self) -> int:
        return self._compiled.num_bytes

    @property
    def num_grammars(self) -> int:
        with self._lock:
            return len(self._compiled)

    @property
    def compile_s(self) -> Histogram:
        """Seconds of each compilation."""
        return self._compile_s.histogram

    def executor(self, num_lexers: int) -> LLExecutor:
        """Provide threads that follow several matchers at once, without the interpreter's lock.

        They are no more than the lexers: threads would wait for each other at one lexer's lock.
        """
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1, num_lexers)
        with self._lock:
            if num_threads not in self._executors:
                from llguidance import LLExecutor

                self._executors[num_threads] = LLExecutor(num_threads=num_threads)
            return self._executors[num_threads]

    def get(self, tenant: str, grammar: str, num_bytes: int = 0, *, tokenizer: str = "") -> CompiledGrammar:
        """Look up the tenant's compiled grammar, which is compiled now if it isn't there.

        Args:
            num_bytes: what it takes, as measured before; 0: unknown.
            tokenizer: as for `GrammarCompiler.of`.

        Raises:
            InvalidRequest, ConfigError: as `GrammarCompiler.compile`.
        """
        with self._lock:
            compiled = self._compiled.get(tenant, (tokenizer, grammar))
        return self._compile(tenant, grammar, num_bytes, tokenizer) if compiled is None else compiled

    def discard(self, tenant: str, grammar: str, compiled: CompiledGrammar, *, tokenizer: str = "") -> None:
        """Forget a compiled grammar whose lexer failed: none of its matchers works any more."""
        with self._lock:
            if self._compiled.get(tenant, (tokenizer, grammar)) is compiled:
                self._compiled.drop(tenant, (tokenizer, grammar))

    def _compile(self, tenant: str, grammar: str, num_bytes: int, tokenizer: str) -> CompiledGrammar:
        # building the tokenizer isn't the grammar's time
        compiler = self._compiler.of(tokenizer)
        num_words = -(-compiler.load().vocab_size // 32)
        started = self._clock()
        try:
            matcher = compiler.compile(grammar)
        finally:
            with self._lock:
                self.num_compiled += 1
                self._compile_s.add(self._clock() - started)
        grammar_bytes = max(LEAST_BYTES, num_bytes or BYTES_PER_CHARACTER * len(grammar))
        # it keeps the tokenizer in memory, however many others have been used since
        num_bytes = grammar_bytes + compiler.own_bytes
        compiled = CompiledGrammar(matcher, num_bytes, compiler.vocab_size, num_words)
        with self._lock:
            self._compiled.put(tenant, (tokenizer, grammar), compiled, compiled.num_bytes)
        return compiled
