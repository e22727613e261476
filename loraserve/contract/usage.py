"""Tokens used, and their cost."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from typing import Annotated

from pydantic import PlainSerializer

from loraserve.contract.result import ALWAYS, OPTIONAL, Result

GROUPS = ("tenant", "adapter", "version", "hour", "day")
Cost = Annotated[Decimal, PlainSerializer(lambda cost: f"{cost:f}", return_type=str, when_used="json")]
"""Exact amount of money, sent as decimal text without an exponent."""


class PromptTokensDetails(Result):
    cached_tokens: int = 0


class ReasoningDetails(Result):
    reasoning_tokens: int = 0


class Usage(Result):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int
    prompt_tokens_details: Annotated[PromptTokensDetails | None, ALWAYS] = None
    completion_tokens_details: Annotated[PromptTokensDetails | None, OPTIONAL, ALWAYS] = None
    """All of the answer's tokens; only where it was kept, and the request asked for that."""
    cost: Annotated[Cost | None, OPTIONAL, ALWAYS] = None
    """The exact cost by the tenant's prices; None: it has none."""
    currency: Annotated[str | None, OPTIONAL, ALWAYS] = None


class UsageSum(Result):
    """Usage summed over one value of each group below. A group that wasn't requested is None."""

    tenant: Annotated[str | None, OPTIONAL] = None
    tenant_id: Annotated[str | None, OPTIONAL] = None
    """The tenant's identifier, unique even if its name is given again after a delete."""
    adapter: Annotated[str | None, OPTIONAL] = None
    """``NAME``, ``OWNER/NAME``, or a sum of adapters; None: the base."""
    version: Annotated[int | None, OPTIONAL] = None
    """None: the base, or a sum."""
    hour: Annotated[datetime | None, OPTIONAL] = None
    """The start of the hour, in UTC: ``2026-11-21T17:00:00Z``."""
    day: Annotated[date | None, OPTIONAL] = None
    num_requests: int
    """Number of requests with at least one delivered token."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that weren't computed again: found in the prefix cache, or of answers that the
    result cache had.
    """
    completion_tokens: int
    """Tokens delivered to clients."""
    undelivered_tokens: int = 0
    """Generated tokens that no client received. They cost nothing."""
    num_cached_requests: int = 0
    """Requests, among `num_requests`, whose answers the result cache had."""
    cached_completion_tokens: int = 0
    """Tokens, among `completion_tokens`, of these answers, at most at the cached price."""
    cost: Cost | None = None
    """The exact cost by the prices at the time of use; None: there were none."""
    currency: str | None = None

    @property
    def label(self) -> str:
        """The groups' values as one word."""
        values = (getattr(self, group) for group in GROUPS if group in self.model_fields_set)
        return "/".join("-" if value is None else str(value) for value in values) or "all"
