"""Follow a request's grammar: compute which tokens are allowed after each token."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from loraserve.engine.grammar.cursor import (
    GrammarCursor,
    MatcherFailed,
    compute_masks_together,
    consume_together,
)
from loraserve.engine.grammar.matchers import CompiledGrammar, MatcherCache
from loraserve.engine.grammar.threads import Lane, MaskThreads
from loraserve.engine.grammar.token_mask import Words, cut, has_token, likeliest, unpacked, without
from loraserve.errors import EngineError, GrammarDeadEnd, GrammarTooComplex, InvariantViolation, LoraserveError
from loraserve.text.grammar import dead_end_error, grammar_error

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

SLOW_MASK_S = 0.003
"""Processor time of a mask after which the request's next ones are computed on the thread for slow
ones.
"""
_NUM_SLOW_MASKS = 16
"""Masks that are computed there after a slow one."""
MAX_MASK_S = 0.25
"""Processor time of a mask after which the request fails."""
TOGETHER_S = 0.0005
"""Seconds that each of the masks computed together may take on average, in addition to
`SLOW_MASK_S`.

If they take longer, the next ones are computed one by one, each with its own time.
"""
_MAX_RESTARTS = 8
"""Lexers that failed under a request, each time after another token, at most."""
_TOKENS_AT_ONCE = 64
"""Tokens that are followed without a break for other threads of the interpreter."""


class Constraint:
    """The tokens that a request's grammar allows after the output that there is.

    `advance` begins to compute the next mask as soon as a token is known. Until `is_ready` the
    matcher and the mask belong to a thread, unless `is_gathered`; from then on, until the next
    `advance`, to the steps' thread. That may `look_ahead` behind tokens that the request has not
    said yet.

    A lexer that is over a limit fails for all matchers that share it. So a matcher that fails is
    rebuilt once, with a lexer of its own, and follows the whole output again; only what fails then
    too ends the request. That holds ahead of the request too: what a matcher returns before it is
    checked for an error isn't used (`GrammarCursor`).

    Attributes:
        is_ready: whether the mask, or `error`, is there.
        error: reason why there is no mask.
        mask_s: processor time that the last token and the mask after it took; of masks computed
            together, an equal part of the time.
        wanted: token that is taken if it is allowed, so that the mask isn't needed then; None:
            unknown.
        is_gathered: whether the mask waits for the end of a forward pass.
        threads: those that compute the masks.
        vocab_size: tokens of the base's logits, or of a version's tokenizer that has more; others
            are never allowed. 0 until the grammar is compiled.
    """

    __slots__ = (
        "_buffer",
        "_cache",
        "_compiled",
        "_cursor",
        "_depth",
        "_failed_at",
        "_grammar",
        "_has_followed",
        "_is_late",
        "_is_lost",
        "_is_over",
        "_mask_depth",
        "_num_alone",
        "_num_bytes",
        "_num_restarts",
        "_num_slow",
        "_tenant",
        "_token_ids",
        "_tokenizer",
        "_wake",
        "_words",
        "error",
        "is_gathered",
        "is_ready",
        "mask_s",
        "threads",
        "vocab_size",
        "wanted",
    )

    def __init__(
        self,
        grammar: str,
        token_ids: Sequence[int],
        cache: MatcherCache,
        threads: MaskThreads,
        *,
        tenant: str = "",
        num_bytes: int = 0,
        tokenizer: str = "",
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Compile the grammar, follow the output so far and compute the mask after it, on a thread.

        Args:
            token_ids: the output.
            tenant: whose request it is: tenants have turns on the threads, and grammars of their
                own.
            num_bytes: bytes of the compiled grammar; 0: unknown.
            tokenizer: as for `GrammarCompiler.of`.
            wake: called on a thread when a mask is there that no step waits for.
        """
        self.is_ready = self.is_gathered = False
        self.error: LoraserveError | None = None
        self.mask_s = 0.0
        self.threads = threads
        self._grammar, self._num_bytes, self._cache = grammar, num_bytes, cache
        self.vocab_size = 0
        self._token_ids = list(token_ids)
        self._tenant, self._wake, self._tokenizer = tenant, wake, tokenizer
        self._compiled: CompiledGrammar | None = None
        self._cursor: GrammarCursor | None = None
        self._buffer: Words = np.empty(0, np.uint32)
        self._words = self._buffer
        self.wanted: int | None = None
        # tokens behind the output after which the next one is looked at, and those after which the
        # mask in `_words` is; -1: there is none
        self._depth, self._mask_depth = 0, -1
        self._is_late = self._is_over = self._is_lost = self._has_followed = False
        self._num_slow = self._num_alone = self._num_restarts = 0
        self._failed_at: int | None = None
        self._submit(self._begin, Lane.COMPILE)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the mask follows."""
        return len(self._token_ids)

    @property
    def is_held(self) -> bool:
        """Whether a step didn't wait for the mask, which still isn't there.

        No step should compute the request until then.
        """
        return self._is_late and not self.is_ready

    @property
    def permitted(self) -> int | None:
        """A token that is allowed next, for which no mask was computed; None: see the mask."""
        cursor = self._cursor
        return cursor.ahead[self._depth] if cursor is not None and len(cursor.ahead) > self._depth else None

    @property
    def may_look_ahead(self) -> bool:
        """Whether the steps' thread may follow tokens itself: where each takes microseconds."""
        return (
            self._compiled is not None
            and not self._compiled.is_slow
            and not self._num_slow
            and not self._num_alone
            and self.error is None
            and (self.is_ready or self.is_gathered)
        )

    def advance(self, token_ids: Sequence[int]) -> None:
        """Begin to compute the mask after more tokens of output."""
        self.is_ready = self._is_late = False
        self.wanted, self._depth, self._mask_depth = None, 0, -1
        self._token_ids += token_ids
        if self._cursor is not None:
            try:
                self._cursor.settle(token_ids)
            except MatcherFailed:
                self._is_lost = True
        if self._is_lost or self._num_slow or self._num_alone or not self.threads.gather(self, self._tenant):
            self._resume()

    def _resume(self) -> None:
        """Compute the next mask on a thread, with another matcher if this one failed."""
        if self._is_lost:
            self._submit(self._begin, Lane.COMPILE)
        else:
            self._submit(self._follow, Lane.SLOW if self._num_slow else Lane.FAST)

    def start_over(self, wanted: int | None = None) -> bool:
        """Go back to the place right after the output: the last step may have been lost.

        Args:
            wanted: token that is taken if it is allowed; None: unknown.

        Return whether it is known what is allowed there. If not, `is_ready` shows when.
        """
        self._depth = 0
        if self._mask_depth == 0 or (wanted is not None and self.permitted == wanted):
            return True
        # a step that proposed another token, or that looked ahead, was dropped since
        if self.look_ahead((), wanted):
            return True
        self.is_ready, self._is_late, self.wanted = False, True, None
        self._resume()
        return False

    def look_ahead(self, token_ids: Sequence[int], wanted: int | None) -> bool:
        """Move to the place after tokens that the request may sample next, on the steps' thread.

        From then on what is allowed is for that place, until `advance`.

        Args:
            token_ids: allowed ones.
            wanted: token that is taken if it is allowed; None: unknown.

        Return whether that is known: not where it takes long, or the grammar is used elsewhere.
        """
        compiled, cursor = self._compiled, self._cursor
        if compiled is None or cursor is None or not self.may_look_ahead:
            return False
        return self._at_once(compiled, lambda: self._move(cursor, token_ids, wanted)) or False

    def _move(self, cursor: GrammarCursor, token_ids: Sequence[int], wanted: int | None) -> bool:
        cursor.go_to(token_ids)
        self._depth = len(token_ids)
        if wanted is None or not cursor.try_token(wanted):
            self._compute_mask()
        return True

    def follow_at_once(self) -> bool:
        """Follow the last token and the wanted one behind it on the steps' thread, while gathered.

        That is for answers whose last wanted token was allowed, as those of a base that follows its
        grammar mostly are: for such a one the way to a thread and back takes longer.

        Return whether the wanted token is allowed, and no mask needed; else it stays gathered.
        """
        compiled, cursor, wanted = self._compiled, self._cursor, self.wanted
        if not self._has_followed or compiled is None or cursor is None or wanted is None or not self.may_look_ahead:
            return False

        def follow() -> bool:
            if cursor.num_said < len(self._token_ids):
                cursor.consume(self._token_ids[cursor.num_said :])
            return self._is_ahead(cursor, wanted)

        started = time.perf_counter()
        self._has_followed = self._at_once(compiled, follow) or False
        if self._has_followed:
            self.mask_s = time.perf_counter() - started
            self.is_ready, self.is_gathered = True, False
        return self._has_followed

    @staticmethod
    def _is_ahead(cursor: GrammarCursor, wanted: int) -> bool:
        """Be ahead by the wanted token, if the grammar allows it; return whether it does."""
        if cursor.ahead and cursor.ahead[0] != wanted:
            cursor.go_to(())
        return bool(cursor.ahead) or cursor.try_token(wanted)

    def forced(self, count: int) -> tuple[int, ...]:
        """Find tokens that the grammar leaves no choice about, if it is fast; `count` at most.

        A search for them takes of the lexer's limits. A request whose lexer was once over one has
        no more searches, so that it fails only where it would without them.
        """
        compiled, cursor = self._compiled, self._cursor
        if compiled is None or cursor is None or not self.may_look_ahead or self._num_restarts:
            return ()

        def find() -> tuple[int, ...]:
            cursor.go_to(())
            cursor.consume(self._token_ids[cursor.num_said :])
            return cursor.forced(count)

        return self._at_once(compiled, find) or ()

    def _at_once(self, compiled: CompiledGrammar, work: Callable[[], _T]) -> _T | None:
        """Do some work with the matcher on the steps' thread; None if that isn't possible.

        A grammar that once took long is left to the threads. If the matcher fails, or allows
        nothing, another is made with the next token, which finds out whether the request fails.
        """
        if self._is_lost or not compiled.lock.acquire(blocking=False):
            return None
        started = time.thread_time()
        try:
            return work()
        except (KeyboardInterrupt, SystemExit):
            raise
        except GrammarDeadEnd:
            self._is_lost = True
            return None
        except BaseException:
            # llguidance reports panics as subclasses of BaseException
            logger.warning("a grammar's matcher failed ahead of its request", exc_info=True)
            self._is_lost = True
            return None
        finally:
            compiled.lock.release()
            if time.thread_time() - started > SLOW_MASK_S:
                compiled.is_slow = True

    def end(self) -> None:
        """Do nothing more: the request is over, and what is queued for it needn't be computed."""
        self._is_over = True

    def note_late(self) -> None:
        """Note that a step has gone on without the mask."""
        self._is_late = True

    @property
    def words(self) -> Words:
        """The mask."""
        if self._mask_depth != self._depth:
            raise InvariantViolation("a mask is read, and there is none of this place")
        return self._words

    def allows(self, token_id: int) -> bool:
        """Check whether the token may come next."""
        return token_id == self.permitted or (token_id < self.vocab_size and has_token(self.words, token_id))

    def allowed_words(self, unwanted: Sequence[int]) -> Words:
        """Remove the unwanted tokens from the mask; keep them where it allows no others."""
        words = self.words
        found = [token_id for token_id in unwanted if has_token(words, token_id)]
        return without(words, found) if found else words

    def allowed(self, unwanted: Sequence[int] = ()) -> npt.NDArray[np.bool_]:
        """Unpack `allowed_words` to [vocab_size] bool."""
        return unpacked(self.allowed_words(unwanted), self.vocab_size)

    def likeliest(self, logits: npt.NDArray[np.float32], unwanted: Sequence[int] = ()) -> int:
        """Find the likeliest of the tokens that `allowed_words` allows; of equals the first.

        Args:
            logits: [vocab_size].
        """
        return likeliest(self.allowed_words(unwanted), logits)

    def _submit(self, work: Callable[[], None], lane: Lane) -> None:
        self.threads.submit(lambda: self._run(work, lane), lane, self._tenant)

    # on a thread

    def _run(self, work: Callable[[], None], lane: Lane) -> None:
        """Do a job's work; what it raises ends the request.

        A lexer that may have failed for another request is rebuilt instead.
        """
        if self._is_over:
            return
        try:
            work()
        except MatcherFailed as failure:
            if self._may_restart():
                self._submit(self._begin, Lane.COMPILE)
                return
            self.error = grammar_error(str(failure))
        except LoraserveError as error:
            self.error = error
        except BaseException as error:
            # llguidance reports panics as subclasses of BaseException
            logger.exception("a grammar's matcher failed")
            self.error = EngineError(f"The grammar's matcher failed: {type(error).__name__}.")
        self.is_ready = True
        if lane is not Lane.FAST or self._is_late:
            self._wake()

    def _may_restart(self) -> bool:
        """Forget the lexer that failed; return whether to continue with another.

        Not if one of the request's own failed after the same output.
        """
        if self._compiled is not None:
            self._cache.discard(self._tenant, self._grammar, self._compiled, tokenizer=self._tokenizer)
        if self._failed_at == self.num_output_tokens or self._num_restarts == _MAX_RESTARTS:
            return False
        self._failed_at = self.num_output_tokens
        self._num_restarts += 1
        return True

    def _begin(self) -> None:
        self._compiled = self._cache.get(self._tenant, self._grammar, self._num_bytes, tokenizer=self._tokenizer)
        self.vocab_size = self._compiled.vocab_size
        if not len(self._buffer):
            self._buffer = np.zeros(self._compiled.mask_num_words, np.uint32)
        self._cursor, self._is_lost = GrammarCursor(self._compiled.new_matcher()), False
        self._follow()

    def _follow(self) -> None:
        """Consume the output that the matcher hasn't, and compute the mask after it."""
        if self._compiled is None or self._cursor is None:
            raise EngineError("The grammar's matcher isn't there.")
        cursor = self._cursor
        token_ids = self._token_ids[cursor.num_said :]
        with self._compiled.lock:
            cursor.go_to(())
            for first in range(0, len(token_ids) - 1, _TOKENS_AT_ONCE):
                cursor.consume(token_ids[first : min(first + _TOKENS_AT_ONCE, len(token_ids) - 1)])
            started = time.thread_time()
            cursor.consume(token_ids[-1:])
            self._compute_mask()
            self.mask_s = time.thread_time() - started
        if self.mask_s > MAX_MASK_S:
            raise GrammarTooComplex(f"The grammar took {self.mask_s:.1f} s to follow for one token.")
        if self.mask_s > SLOW_MASK_S:
            self._compiled.is_slow = True
        self._num_slow = _NUM_SLOW_MASKS if self.mask_s > SLOW_MASK_S else max(0, self._num_slow - 1)
        self._num_alone = max(0, self._num_alone - 1)

    def follow_together(self, masks: list[Constraint]) -> None:
        """Follow the last token of each of a tenant's requests, and compute the masks after them.

        A mask isn't needed where the wanted token is allowed. The matcher consumes it at once, and
        looks at its tables, which no cache holds after a forward pass, once for both. All cores
        share the rest, whose times can't be measured apart.
        """
        live = [mask for mask in masks if not mask._is_over]
        grammars = {id(mask._compiled): mask._compiled for mask in live if mask._compiled is not None}
        with ExitStack() as locks:
            for compiled in grammars.values():
                locks.enter_context(compiled.lock)
            started = time.perf_counter()
            failures: dict[int, BaseException] = {}
            try:
                self._follow_rows(live, max(1, len(grammars)), failures)
            except BaseException as error:
                # llguidance reports panics as subclasses of BaseException, and not of which matcher
                failures = dict.fromkeys(map(id, live), error)
            total_s = time.perf_counter() - started
        num_alone = _NUM_SLOW_MASKS if total_s > SLOW_MASK_S + TOGETHER_S * len(live) else 0
        for mask in live:
            mask.mask_s, mask._num_alone = total_s / len(live), num_alone
            mask._run(partial(_raise, failures.get(id(mask))), Lane.FAST)

    def _follow_rows(self, live: Sequence[Constraint], num_grammars: int, failures: dict[int, BaseException]) -> None:
        """Do what `follow_together` does, and note the failures by the masks' ids."""
        executor = self._cache.executor(num_grammars)
        followed = [(mask, mask._cursor) for mask in live if mask._cursor is not None and not mask._is_lost]
        failures.update((id(mask), MatcherFailed("it failed ahead of its request")) for mask in live if mask._is_lost)
        behind = [(cursor, mask._token_ids[cursor.num_said :]) for mask, cursor in followed]
        rest: list[tuple[Constraint, GrammarCursor]] = []
        for (mask, cursor), failure in zip(followed, consume_together(executor, behind), strict=True):
            try:
                if failure is not None:
                    raise failure
                if mask.wanted is None:
                    cursor.go_to(())
                mask._has_followed = mask.wanted is not None and mask._is_ahead(cursor, mask.wanted)
                if not mask._has_followed:
                    rest.append((mask, cursor))
            except (MatcherFailed, GrammarDeadEnd) as error:
                failures[id(mask)] = error
        # tokenizers of versions may have more tokens than the base's
        for num_words in {len(mask._buffer) for mask, _ in rest}:
            same = [(mask, cursor) for mask, cursor in rest if len(mask._buffer) == num_words]
            rows = np.zeros((len(same), num_words), np.uint32)
            found = compute_masks_together(executor, [cursor for _, cursor in same], rows)
            for (mask, _), row, failure in zip(same, rows, found, strict=True):
                try:
                    if failure is not None:
                        raise failure
                    mask._take(row, 0)
                except (MatcherFailed, GrammarDeadEnd) as error:
                    failures[id(mask)] = error

    def _compute_mask(self) -> None:
        if self._cursor is None:
            raise EngineError("The grammar's matcher isn't there.")
        self._mask_depth = -1
        self._cursor.compute_mask(self._buffer)
        self._take(self._buffer, self._depth)

    def _take(self, buffer: Words, depth: int) -> None:
        """Take a mask that the matcher stands by.

        Raises:
            GrammarDeadEnd: it allows none of the tokens that the logits have.
        """
        words = cut(buffer, self.vocab_size)
        if not words.any():
            raise dead_end_error()
        self._words, self._mask_depth = words, depth


def _raise(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure
