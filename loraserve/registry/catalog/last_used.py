"""Times at which each tenant last used each adapter version, in this process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

from loraserve.types import Digest, TenantId

VersionKey = tuple[TenantId, str, int, Digest]
Key = TypeVar("Key", bound=Hashable)


class UsedVersion(Protocol):
    """Version of a tenant's adapter."""

    @property
    def tenant(self) -> TenantId: ...

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> Digest: ...


class LastUsed:
    """Times of last uses, bounded in number; the version unused for longest is forgotten first.

    Tenants with the same bytes share residency. A tenant sees it only after its own use, so that it
    can't learn of another's, and what operators see of one tenant's version doesn't include another
    tenant's use of its own.
    """

    def __init__(self, *, max_entries: int = 100_000, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._by_bytes: OrderedDict[tuple[TenantId, Digest], float] = OrderedDict()
        self._by_tenant: OrderedDict[tuple[TenantId, VersionKey], float] = OrderedDict()
        self._by_anyone: OrderedDict[VersionKey, float] = OrderedDict()

    def touch(self, tenant: TenantId, version: UsedVersion) -> None:
        """Note that the tenant uses the version now.

        A grant may have given it access to another tenant's.
        """
        key = version_key(version)
        self._note(self._by_bytes, (tenant, version.digest))
        self._note(self._by_tenant, (tenant, key))
        self._note(self._by_anyone, key)

    def has_used(self, tenant: TenantId, digest: Digest) -> bool:
        """Check whether the tenant used these bytes, under whatever name.

        False too where that is long forgotten.
        """
        return (tenant, digest) in self._by_bytes

    def seconds_since(self, tenant: TenantId, version: UsedVersion) -> float | None:
        """Compute the time since the tenant's last use of the version.

        None: never, or long forgotten.
        """
        return self._since(self._by_tenant.get((tenant, version_key(version))))

    def seconds_since_anyone(self, version: UsedVersion) -> float | None:
        """Compute the time since any tenant's last use of the version.

        None: never, or long forgotten.
        """
        return self._since(self._by_anyone.get(version_key(version)))

    def _note(self, uses: OrderedDict[Key, float], key: Key) -> None:
        uses[key] = self._clock()
        uses.move_to_end(key)
        if len(uses) > self._max_entries:
            uses.popitem(last=False)

    def _since(self, at: float | None) -> float | None:
        return None if at is None else self._clock() - at


def version_key(version: UsedVersion) -> VersionKey:
    return version.tenant, version.name, version.version, version.digest
