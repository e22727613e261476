"""An engine's grammars: compiled ones, the threads that follow them, and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loraserve.engine.grammar.constraint import Constraint
from loraserve.engine.grammar.matchers import MatcherCache
from loraserve.engine.grammar.threads import MaskThreads
from loraserve.limits import LIMITS
from loraserve.text.grammar import GrammarCompiler
from loraserve.types import Histogram, SamplingParams, TenantId


class Constraints:
    """Make requests' constraints, for the steps' thread.

    Other threads start with the first grammar.

    Args:
        wake: called on a thread when a request that no step computes has its mask.
        are_beside_steps: whether masks are computed during forward passes, or between them; as
            `MaskThreads`.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        max_bytes: int = LIMITS.max_grammar_cache_bytes,
        wake: Callable[[], None] = lambda: None,
        are_beside_steps: bool = True,
    ) -> None:
        self._wake = wake
        self._are_beside_steps = are_beside_steps
        self._cache = MatcherCache(compiler, max_bytes)
        self._threads: MaskThreads | None = None
        self._num_live = self._num_failures = 0

    def begin(self, params: SamplingParams, token_ids: Sequence[int], tenant: TenantId) -> Constraint:
        """Begin the constraint of a request with that much output already; it isn't ready yet."""
        if self._threads is None:
            self._threads = MaskThreads(are_beside_steps=self._are_beside_steps)
        self._num_live += 1
        return Constraint(
            params.grammar,
            token_ids,
            self._cache,
            self._threads,
            tenant=tenant,
            num_bytes=params.grammar_bytes,
            tokenizer=params.tokenizer,
            wake=self._wake,
        )

    def end(self, constraint: Constraint) -> None:
        """Note the end of a constraint's request."""
        constraint.end()
        if self._threads is not None:
            # what is gathered for it holds its matcher
            self._threads.release()
        self._num_live -= 1
        self._num_failures += constraint.error is not None

    def stats(self) -> dict[str, Any]:
        cache, threads = self._cache, self._threads
        return {
            "num_constrained": self._num_live,
            "num_grammars": cache.num_grammars,
            "grammar_bytes": cache.num_bytes,
            "grammars_compiled": cache.num_compiled,
            "grammar_failures": self._num_failures,
            "late_masks": 0 if threads is None else threads.num_late,
            "grammar_compile_s": cache.compile_s,
            "mask_s": Histogram() if threads is None else threads.mask_s.histogram,
            "mask_wait_s": Histogram() if threads is None else threads.wait_s.histogram,
        }

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.close()
