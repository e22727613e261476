"""When each tenant last used each adapter, in this process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from loraserve.types import Digest, TenantId


class LastUsed:
    """Bounded: the longest unused pairs are forgotten first.

    Residency is shared between tenants that hold the same bytes. What a tenant is told of it starts from its own use, so that it
    can't learn of another's.
    """

    def __init__(self, *, max_entries: int = 100_000, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._at: OrderedDict[tuple[TenantId, Digest], float] = OrderedDict()

    def touch(self, tenant: TenantId, digest: Digest) -> None:
        self._at[tenant, digest] = self._clock()
        self._at.move_to_end((tenant, digest))
        if len(self._at) > self._max_entries:
            self._at.popitem(last=False)

    def seconds_since(self, tenant: TenantId, digest: Digest) -> float | None:
        """None: never, or long forgotten."""
        at = self._at.get((tenant, digest))
        return None if at is None else self._clock() - at
