"""Aliases of an adapter, their splits and shadows, and grants to other tenants."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from loraserve.contract.adapter import Share
from loraserve.contract.result import ALWAYS, Result


class Shadow(Result):
    """A copy of `share` (0 to 1) of the requests runs on `version`; its answers are dropped."""

    version: int
    share: float


class Alias(Result):
    """A name that points to a version: `live` is what the adapter's bare name means."""

    adapter: str
    name: str
    """The alias's own."""
    version: int
    """The version; of a split, that with the largest weight."""
    split: list[Share] | None = None
    """The versions of a split; None: all traffic goes to `version`."""
    shadow: Shadow | None = None
    revision: Annotated[int | None, ALWAYS] = None
    """Number in the alias's ETag."""
    updated_at: datetime

    @property
    def alias(self) -> str:
        """Its name: as a column beside the adapter's."""
        return self.name


class ShadowHour(Result):
    """Comparison of a shadow version with the one that answered, over an hour."""

    hour: datetime
    """The hour's first instant."""
    version: int
    """Version that answered."""
    shadow_version: int
    num_requests: int
    num_failed: int
    """Requests that the shadow failed to answer."""
    num_equal: int
    """Requests to which both gave the same tokens."""
    num_tokens: int
    """Tokens of the answers, of requests that the shadow answered too."""
    num_agreed_tokens: int
    """Tokens of the answers before the first difference."""
    live_ms: int
    shadow_ms: int
    """Milliseconds from the request to the last token,
    summed over the requests that both answered.
    """

    @property
    def num_compared(self) -> int:
        return self.num_requests - self.num_failed


class Grant(Result):
    """Permission of another tenant to use an adapter."""

    adapter: str
    tenant: str
    """The name of the tenant that may use it."""
    created_at: datetime
