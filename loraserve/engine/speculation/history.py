"""Texts of ended requests, by tenant and adapter, for those that come later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from loraserve.engine.request import Request
from loraserve.engine.speculation.token_index import SEPARATOR, TokenIndex
from loraserve.types import Digest, TenantId

MAX_TOKENS = 1 << 14
"""Tokens that are kept of one tenant and adapter."""
MAX_TEXT_TOKENS = 1 << 11
"""Tokens of one request that are kept: the last ones."""

HistoryKey = tuple[TenantId, Digest | None]
"""A tenant and its adapter's digest; None: the base."""


def history_key(request: Request) -> HistoryKey:
    """Return the key of the texts that the same model made for the same tenant."""
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

    def __len__(self) -> int:
        """Return the number of indices."""
        return len(self._indices)

    def get(self, key: HistoryKey) -> TokenIndex | None:
        """Return a tenant's and adapter's index, and count that as a use; None if there is none."""
        index = self._indices.get(key)
        if index is not None:
            self._indices.move_to_end(key)
        return index

    def add(self, key: HistoryKey, token_ids: Sequence[int]) -> None:
        """Add a request's text."""
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = TokenIndex(MAX_TOKENS)
        else:
            self.num_bytes -= index.num_bytes
        self._indices.move_to_end(key)
        index.add([*token_ids[-MAX_TEXT_TOKENS:], SEPARATOR])
        self.num_bytes += index.num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._indices.popitem(last=False)[1].num_bytes

    def forget(self, digest: Digest) -> None:
        """Forget the texts of an adapter's version, of whichever tenant."""
        for key in [key for key in self._indices if key[1] == digest]:
            self.num_bytes -= self._indices.pop(key).num_bytes
