"""Tenants and their keys, operators' keys, and the caller."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from loraserve.contract.result import Result


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


class Whoami(Result):
    """Caller, as the server sees it."""

    tenant: str
    """Name of the tenant that it acts for; an admin's, unless it names one: default."""
    key_id: str
    scopes: list[str]
    is_admin: bool
    sees_all: bool
    """Whether lists that can are of all tenants: an admin that names none."""
    limits: dict[str, int | float | None]
    """Limits of the tenant; None: only the server's own bounds."""
    weight: float
    has_console: bool
    """Whether this server has the web console."""
