"""Tenants, their keys, the adapters granted to them, and their usage."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from pydantic import Field

from loraserve.sdk.call import Result

GROUPS = ("tenant", "adapter", "version", "hour", "day")
Limits = Mapping[str, int | float | None]


class Tenant(Result):
    id: str
    """The identifier, never given twice, unlike the name."""
    name: str
    limits: dict[str, int | float | None] = Field(default_factory=dict)
    """Bounds on stored adapters and on requests; None: only the server's own bounds."""
    weight: float = 1.0
    """The tenant's share of the engine against other tenants' weights,
    when there isn't enough for all.
    """
    prices: dict[str, Any] | None = None
    """Prices per million tokens, as decimal text; None: its tokens have no price."""
    created_at: datetime


class Key(Result):
    """An API key without its secret."""

    id: str
    name: str
    scopes: list[str]
    prefix: str
    """The secret's first characters, to tell keys apart."""
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class NewKey(Key):
    """A key just created: the only answer that ever holds the secret."""

    key: str = Field(repr=False)


class AdminKey(Key):
    """A key of operators without its secret."""

    role: str
    """``admin``, ``operator:read`` or ``metrics:read``."""


class NewAdminKey(AdminKey):
    """A key just created: the only answer that ever holds the secret."""

    key: str = Field(repr=False)


class Grant(Result):
    adapter: str
    tenant: str
    """The name of the tenant that may use it."""
    created_at: datetime


class UsageSum(Result):
    """Usage summed over one value of each group below. A group that wasn't requested is None."""

    tenant: str | None = None
    tenant_id: str | None = None
    """The tenant's identifier, unique even if its name is given again after a delete."""
    adapter: str | None = None
    """``NAME``, ``OWNER/NAME``, or a sum of adapters; None: the base."""
    version: int | None = None
    hour: datetime | None = None
    """The start of the hour, in UTC."""
    day: date | None = None
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that weren't computed again."""
    completion_tokens: int
    """Tokens delivered to clients."""
    undelivered_tokens: int = 0
    """Generated tokens that no client received. They cost nothing."""
    num_cached_requests: int = 0
    """Requests, among `num_requests`, whose answers the result cache had."""
    cached_completion_tokens: int = 0
    """Tokens, among `completion_tokens`, of these answers."""
    cost: Decimal | None = None
    """The exact cost by the prices at the time of use; None: there were none."""
    currency: str | None = None

    @property
    def label(self) -> str:
        """The groups' values as one word."""
        values = (getattr(self, group) for group in GROUPS if group in self.model_fields_set)
        return "/".join("-" if value is None else str(value) for value in values) or "all"
