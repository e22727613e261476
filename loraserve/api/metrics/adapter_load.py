"""Load of each tenant's adapters on this server: waiting and running requests, and their rate."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from loraserve.limits import LIMITS
from loraserve.memory.eviction import MAX_NAMES, NEVER, Uses
from loraserve.registry.catalog.last_used import UsedVersion, VersionKey, version_key
from loraserve.registry.composition import versions_of
from loraserve.tenant_cache import TenantCache
from loraserve.types import AdapterRef, Digest

Key = TypeVar("Key", bound=Hashable)


class AdapterLoad:
    """Count requests by version, not by bytes.

    Tenants with the same bytes have each their own load.
    """

    def __init__(self, *, max_versions: int = MAX_NAMES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_versions = max_versions
        self._clock = clock
        self._running: Counter[VersionKey] = Counter()
        self._waiting_names: Counter[str] = Counter()
        self._running_names: Counter[str] = Counter()
        # the last used last
        self._uses: OrderedDict[VersionKey, Uses] = OrderedDict()
        # of a name each, by its adapter's owner: no tenant's names push out those of one with fewer
        self._digests: TenantCache[Digest] = TenantCache(LIMITS.max_named_residents, share=1.0)

    def begin(self, adapter: AdapterRef | None, names: Sequence[str], owners: Sequence[str] = ()) -> AdapterUse:
        """Count one request for the adapter as waiting; `end` must follow.

        Args:
            adapter: None: the base, which isn't counted. A sum counts for each of its parts.
            names: under which a router would request it, one for each part; none: it is counted
                without being named.
            owners: names of the tenants that own the parts; none: their ids stand in for them.
        """
        versions = versions_of(adapter)
        now_s = self._clock()
        for key in map(version_key, versions):
            self._uses[key] = self._uses.get(key, NEVER).used(now_s)
            self._uses.move_to_end(key)
        while len(self._uses) > self._max_versions:
            self._uses.popitem(last=False)
        if names:
            for name, owner, one in zip(names, owners or [one.tenant for one in versions], versions, strict=True):
                self._digests.put(owner, name, one.digest, 1)
        self._waiting_names.update(names)
        return AdapterUse(self, [version_key(one) for one in versions], list(names))

    def num_running(self, version: UsedVersion) -> int:
        """Count the version's requests that are past their first token and not done."""
        return self._running[version_key(version)]

    def uses_per_s(self, version: UsedVersion) -> float:
        """Compute how often the version was used of late; 0 if it never was, or is forgotten."""
        return self._uses.get(version_key(version), NEVER).per_second(self._clock())

    def waiting_names(self) -> list[str]:
        """List the names of the adapters with a request before its first token, sorted."""
        return sorted(self._waiting_names)

    def running_names(self) -> list[str]:
        """List the names of the adapters with a request past its first token, sorted."""
        return sorted(self._running_names)

    def named_digests(self) -> dict[tuple[str, str], Digest]:
        """Map owner and name to the digests of the adapters that were requested last."""
        return {(owner, str(name)): digest for owner, name, digest in self._digests.items()}

    def _answer(self, keys: Iterable[VersionKey], names: Iterable[str]) -> None:
        _subtract(self._waiting_names, names)
        self._running_names.update(names)
        self._running.update(keys)

    def _end(self, keys: Iterable[VersionKey], names: Iterable[str], *, is_running: bool) -> None:
        if is_running:
            _subtract(self._running, keys)
        _subtract(self._running_names if is_running else self._waiting_names, names)


class AdapterUse:
    """Request counted in an `AdapterLoad`, from its arrival to its end."""

    def __init__(self, load: AdapterLoad, keys: list[VersionKey], names: list[str]) -> None:
        self._load = load
        self._keys = keys
        self._names = names
        self._is_running = False
        self._has_ended = False

    def answer(self) -> None:
        """Count the request as running, since its first token is there; no-op when called again."""
        if not self._is_running and not self._has_ended:
            self._is_running = True
            self._load._answer(self._keys, self._names)

    def end(self) -> None:
        """Count the request no more; no-op when called again."""
        if not self._has_ended:
            self._has_ended = True
            self._load._end(self._keys, self._names, is_running=self._is_running)


def _subtract(counter: Counter[Key], keys: Iterable[Key]) -> None:
    for key in keys:
        counter[key] -= 1
        if counter[key] <= 0:
            # one entry per live adapter, not per adapter ever seen
            del counter[key]
