"""Current work of a process, told by the thread that works and read by the thread that reports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """Count the moves of one working thread, and say what it is doing. Reading is safe on any thread; telling is for one thread.

    A reader that sees the same `num_moves` twice knows that the worker reached none of its marks in between. The marks are close
    together: a piece of a file while a base is loaded, a part of a layer while a step is computed. A mark costs about 50 ns.

    Attributes:
        num_moves: marks reached since the start; it only grows.
        on_begin: called at each `begin`, where a reader wants to know at once; None: none does.
    """

    __slots__ = ("_done", "_total", "_what", "num_moves", "on_begin")

    def __init__(self) -> None:
        self.num_moves = 0
        self.on_begin: Callable[[], None] | None = None
        self._what, self._done, self._total = "starting", 0, 0

    def begin(self, what: str, total: int = 0) -> None:
        """Begin something else.

        Args:
            what: as in "the engine is …": ``loading shard 1 of 4``.
            total: how many parts it has, where they are counted with `advance`; 0: they aren't.
        """
        self._what, self._done, self._total = what, 0, total
        self.num_moves += 1
        if self.on_begin is not None:
            self.on_begin()

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Do something else in the block; go on with what was being done, and as far as it was, after it."""
        before, done, total = self._what, self._done, self._total
        self.begin(what)
        try:
            yield
        finally:
            self.begin(before, total)
            self._done = done

    def advance(self, done: int) -> None:
        """Say that so many of the parts are done."""
        self._done = done
        self.num_moves += 1

    def tick(self) -> None:
        """Say that the work goes on."""
        self.num_moves += 1

    @property
    def what(self) -> str:
        """Current work, without how far it is."""
        return self._what

    def __str__(self) -> str:
        total = self._total
        return f"{self._what}: {self._done:,} of {total:,}" if total else self._what
