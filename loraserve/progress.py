"""Current work of a process, noted by its working thread and read by the thread that reports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """Count the moves of one working thread and describe its work. Any thread may read.

    One thread writes.

    A reader that sees the same `num_moves` twice knows that the thread reached none of its marks in
    between. Marks are close together: a piece of a file while a base is loaded, a part of a layer
    within a step. A mark costs about 50 ns.

    Attributes:
        num_moves: marks reached since the start; it only grows.
        on_begin: called at each `begin`, to report it at once; None: not needed.
    """

    __slots__ = ("_done", "_total", "_what", "num_moves", "on_begin")

    def __init__(self) -> None:
        self.num_moves = 0
        self.on_begin: Callable[[], None] | None = None
        self._what, self._done, self._total = "starting", 0, 0

    def begin(self, what: str, total: int = 0) -> None:
        """Begin other work.

        Args:
            what: as in "the engine is …": ``loading shard 1 of 4``.
            total: number of parts, if `advance` counts them; 0: it doesn't.
        """
        self._what, self._done, self._total = what, 0, total
        self.num_moves += 1
        if self.on_begin is not None:
            self.on_begin()

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Do other work in the block, then resume the current work where it was."""
        before, done, total = self._what, self._done, self._total
        self.begin(what)
        try:
            yield
        finally:
            self.begin(before, total)
            self._done = done

    def advance(self, done: int) -> None:
        """Note that so many parts are done."""
        self._done = done
        self.num_moves += 1

    def tick(self) -> None:
        """Note that the work goes on."""
        self.num_moves += 1

    @property
    def what(self) -> str:
        """Current work, without its progress."""
        return self._what

    def __str__(self) -> str:
        total = self._total
        return f"{self._what}: {self._done:,} of {total:,}" if total else self._what
