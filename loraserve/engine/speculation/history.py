"""Texts of ended requests, by tenant and adapter, for those that come later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from loraserve.engine.request import Request, VersionName
from loraserve.engine.speculation.token_index import SEPARATOR, TokenIndex
from loraserve.types import Digest, TenantId

MAX_TOKENS = 1 << 14
"""Tokens that are kept of one tenant and adapter."""
MAX_TEXT_TOKENS = 1 << 11
"""Tokens of one request that are kept: the last ones."""
MAX_NAMES = 64
"""Versions of the same bytes that a tenant's texts may be of: beyond it they begin again."""

HistoryKey = tuple[TenantId, Digest | None]
"""A tenant and its adapter's digest; None: the base."""


def is_of(
    tenant: TenantId, versions: Iterable[VersionName], owner: TenantId, name: str | None, version: int | None
) -> bool:
    """Check whether a text was made by a version, or by any of an adapter or of a tenant.

    Args:
        tenant: whose request it was.
        versions: what its adapter consists of.
        name: None: of all of the owner's adapters, and of its own requests.
        version: None: of all versions.
    """
    if name is None and tenant == owner:
        return True
    return any(of == owner and name in (None, named) and version in (None, number) for of, named, number in versions)


def history_key(request: Request) -> HistoryKey:
    """Build the key of the texts that the same model made for the same tenant."""
    return request.tenant, None if request.adapter is None else request.adapter.digest


class History:
    """Indices of prompts and answers: one for each tenant and adapter, so that none sees another's.

    The least recently used are forgotten first.
    """

    def __init__(self, max_bytes: int) -> None:
        """Begin without texts.

        Args:
            max_bytes: bytes of all indices at most.
        """
        self.num_bytes = 0
        """Bytes of all indices."""
        self._max_bytes = max_bytes
        self._indices: OrderedDict[HistoryKey, TokenIndex] = OrderedDict()
        # under which names each has been requested: the same bytes may be versions of several
        self._versions: dict[HistoryKey, set[VersionName]] = {}

    def __len__(self) -> int:
        return len(self._indices)

    def get(self, key: HistoryKey) -> TokenIndex | None:
        """Look up a tenant's and adapter's index, and count a use; None if there is none."""
        index = self._indices.get(key)
        if index is not None:
            self._indices.move_to_end(key)
        return index

    def add(self, key: HistoryKey, token_ids: Sequence[int], versions: Collection[VersionName] = ()) -> None:
        """Add a request's text.

        Args:
            versions: that the adapter consists of.
        """
        named = self._versions.get(key, set()) | {*versions}
        if len(named) > MAX_NAMES and key in self._indices:
            self._drop(key)
            named = {*versions}
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = TokenIndex(MAX_TOKENS)
        else:
            self.num_bytes -= index.num_bytes
        self._indices.move_to_end(key)
        index.add([*token_ids[-MAX_TEXT_TOKENS:], SEPARATOR])
        self.num_bytes += index.num_bytes
        self._versions[key] = named
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._indices)))

    def forget(self, digest: Digest) -> None:
        """Forget the texts of an adapter's version, of whichever tenant."""
        for key in [key for key in self._indices if key[1] == digest]:
            self._drop(key)

    def forget_deleted(self, owner: TenantId, name: str | None, version: int | None) -> list[HistoryKey]:
        """Forget the texts for which `is_of` is true; return their keys.

        Another owner's version of the same bytes keeps its texts.
        """
        gone = [key for key, versions in self._versions.items() if is_of(key[0], versions, owner, name, version)]
        for key in gone:
            self._drop(key)
        return gone

    def _drop(self, key: HistoryKey) -> None:
        self.num_bytes -= self._indices.pop(key).num_bytes
        del self._versions[key]
