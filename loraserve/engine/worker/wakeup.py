"""How other threads end the wait of the step's thread for messages: a pipe that it waits for as well."""

from __future__ import annotations

import os
from contextlib import suppress


class Wakeup:
    """Rung by any thread, waited for by one.

    Instead of a look each millisecond, which costs whoever loads meanwhile the interpreter's lock, and whoever waits for the load up to a millisecond more.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        for fd in (self._read_fd, self._write_fd):
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        """What is readable once somebody has rung."""
        return self._read_fd

    def ring(self) -> None:
        """End the wait, or the next one. Costs a microsecond; rung again before it was heard, nothing."""
        # full: it has been rung often enough
        with suppress(BlockingIOError):
            os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """What was rung so far is heard."""
        with suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def close(self) -> None:
        """Nobody rings any more."""
        os.close(self._read_fd)
        os.close(self._write_fd)
