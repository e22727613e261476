"""Loads of adapters within a budget of host memory, however many run at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from cachetools import LRUCache

from adapters_store import BlobStore
from loraserve.adapters.load_memory import LoadMemory, NotEnoughMemory, Reservation
from loraserve.errors import BlobCorrupt, BlobNotFound, StorageError
from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.types import AdapterRef, Digest

_MAX_REMEMBERED = 65_536

Load = Callable[[AdapterRef, Reservation], LoadedAdapter]
"""Load one adapter, taking from the reservation what it holds."""


class BoundedLoads:
    """Loads whose files, unfolded factors and packed tensors are within a budget together.

    The first load of an adapter begins with its file twice: as it is read, and packed. One that
    finds that it unfolds to more than what is free lets go of all, and begins again once there is
    enough; from then on its need is known.

    What a load made counts until `taken`: the residency counts it from then on.
    """

    def __init__(self, store: BlobStore, load: Load, budget_bytes: int) -> None:
        """Make a budget without loads.

        Args:
            load: called on loaders' threads, again where the bytes didn't suffice.
        """
        self.memory = LoadMemory(budget_bytes)
        self._store = store
        self._load = load
        self._lock = threading.Lock()
        self._needs: LRUCache[Digest, int] = LRUCache(_MAX_REMEMBERED)
        # of loads that have ended well, until `taken`
        self._ended: dict[Digest, Reservation] = {}

    def load(self, ref: AdapterRef) -> LoadedAdapter:
        """Load the adapter on a loader's thread; wait for memory first.

        Raises:
            LoraserveError: as the load does; AdapterUnavailable also after `close`.
        """
        with self._lock:
            known = self._needs.get(ref.digest)
        num_bytes = self._first_need(ref) if known is None else known
        while True:
            reservation = self.memory.reserve(num_bytes)
            try:
                loaded = self._load(ref, reservation)
                with self._lock:
                    self._needs[ref.digest] = reservation.num_taken
                reservation.shrink(loaded.num_bytes)
                self._ended[ref.digest] = reservation
                return loaded
            except NotEnoughMemory as error:
                reservation.give_back()
                num_bytes = error.num_bytes
            except BaseException:
                reservation.give_back()
                raise

    def taken(self, digest: Digest) -> None:
        """Give back the bytes of a load that has ended; no-op if it failed."""
        reservation = self._ended.pop(digest, None)
        if reservation is not None:
            reservation.give_back()

    def close(self) -> None:
        """Refuse loads that wait for memory, and all that come."""
        self.memory.close()

    def check(self) -> list[str]:
        """List the broken invariants, in words; empty when all hold."""
        return self.memory.check()

    def _first_need(self, ref: AdapterRef) -> int:
        num_bytes = 0
        for part in (one.adapter for one in ref.parts) if ref.parts else (ref,):
            if part.memory is None:
                # the load reports what is wrong with it
                with suppress(BlobCorrupt, BlobNotFound, StorageError, OSError):
                    num_bytes += self._store.num_bytes(part.weights_blob)
        return 2 * num_bytes
