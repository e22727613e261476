"""Memory that adapters take while they are read and unfolded, within a budget of bytes.

A file's size shows little of it: LoKr of 0.2 MB takes 88 MB until it is packed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from loraserve.errors import AdapterUnavailable


class NotEnoughMemory(Exception):
    """Raised by `Reservation.take` where others hold the bytes; the work begins again with them.

    Attributes:
        num_bytes: bytes to begin with.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


class LoadMemory:
    """Bytes of all loads that are under way, which never exceed the budget together.

    A load that needs more than the budget runs while there is no other. Threads wait for bytes in
    the order in which they came, so that small loads can't keep a large one waiting for ever.

    Invariants (`check`):
        The bytes of several loads are within the budget.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._changed = threading.Condition()
        self._reservations: set[Reservation] = set()
        # threads that wait for bytes, in their order
        self._waiting: list[object] = []
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes that loads hold now."""
        with self._changed:
            return self._num_bytes()

    def reserve(self, num_bytes: int) -> Reservation:
        """Wait for the bytes, and take them.

        Raises:
            AdapterUnavailable: the budget was closed.
        """
        turn, reservation = object(), Reservation(self, num_bytes)
        with self._changed:
            self._waiting.append(turn)
            try:
                self._changed.wait_for(
                    lambda: self._is_closed or (self._waiting[0] is turn and self._fits(num_bytes, None))
                )
                if self._is_closed:
                    raise AdapterUnavailable("The engine stops.", hint="Try again.")
                self._reservations.add(reservation)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
        return reservation

    @contextmanager
    def reserved(self, num_bytes: int) -> Iterator[Reservation]:
        """Wait for the bytes, and hold them in the block."""
        reservation = self.reserve(num_bytes)
        try:
            yield reservation
        finally:
            reservation.give_back()

    def close(self) -> None:
        """Refuse the threads that wait for bytes, and all that come."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def check(self) -> list[str]:
        """List the broken invariants, in words; empty when all hold."""
        with self._changed:
            if len(self._reservations) > 1 and self._num_bytes() > self.budget_bytes:
                return [f"loads: {self._num_bytes()} bytes are over the budget of {self.budget_bytes}"]
            return []

    def _num_bytes(self) -> int:
        return sum(reservation.num_bytes for reservation in self._reservations)

    def _fits(self, num_bytes: int, own: Reservation | None) -> bool:
        others = [one.num_bytes for one in self._reservations if one is not own]
        return not others or sum(others) + num_bytes <= self.budget_bytes

    def _resize(self, reservation: Reservation, num_bytes: int) -> None:
        with self._changed:
            if num_bytes > reservation.num_bytes and not self._fits(num_bytes, reservation):
                raise NotEnoughMemory(num_bytes)
            reservation.num_bytes = num_bytes
            self._changed.notify_all()

    def _give_back(self, reservation: Reservation) -> None:
        with self._changed:
            self._reservations.discard(reservation)
            self._changed.notify_all()


class Reservation:
    """Bytes that one load holds.

    Attributes:
        num_bytes: bytes that it holds, changed by `LoadMemory` alone.
        num_taken: bytes that the load has taken of them.
    """

    def __init__(self, memory: LoadMemory, num_bytes: int) -> None:
        self._memory = memory
        self.num_bytes = num_bytes
        self.num_taken = 0

    def take(self, num_bytes: int) -> None:
        """Take bytes, and hold more if they don't suffice; never wait.

        A load that waited here would hold what the others wait for.

        Raises:
            NotEnoughMemory: other loads hold them.
        """
        self.num_taken += num_bytes
        if self.num_taken > self.num_bytes:
            self._memory._resize(self, self.num_taken)

    def shrink(self, num_bytes: int) -> None:
        """Hold at most this many bytes from now on."""
        if num_bytes < self.num_bytes:
            self._memory._resize(self, num_bytes)

    def give_back(self) -> None:
        """Give all bytes back; no-op the second time."""
        self._memory._give_back(self)
