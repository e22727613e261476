"""`client.usage`: who used what, and what it cost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal

from loraserve.sdk.call import Call, Result
from loraserve.sdk.transport.paging import all_rows, all_rows_async
from loraserve.sdk.transport.transport import AsyncTransport, Transport

ROOT = "/api/v1/usage"
GROUPS = ("tenant", "adapter", "version", "hour", "day")


class UsageSum(Result):
    """What was used, of everything that the groups below have in common. A group that wasn't asked for is None."""

    tenant: str | None = None
    tenant_id: str | None = None
    """It stays, where a name may be given again after a delete."""
    adapter: str | None = None
    """``NAME``, ``OWNER/NAME``, or a sum of adapters; None: the base."""
    version: int | None = None
    hour: datetime | None = None
    """Its beginning, in UTC."""
    day: date | None = None
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt tokens, those that weren't computed again."""
    completion_tokens: int
    """Those that clients were given."""
    undelivered_tokens: int = 0
    """Those that nobody received. They cost nothing."""
    cost: Decimal | None = None
    """By the prices at the time of use, exact; None: there were none."""
    currency: str | None = None

    @property
    def label(self) -> str:
        """The groups' values as one word."""
        values = (getattr(self, group) for group in GROUPS if group in self.model_fields_set)
        return "/".join("-" if value is None else str(value) for value in values) or "all"


def _params(
    tenant: str | None,
    adapter: str | None,
    start: datetime | None,
    end: datetime | None,
    group_by: Sequence[str],
) -> dict[str, str]:
    given = {"tenant": tenant, "adapter": adapter, "from": _instant(start), "to": _instant(end)}
    params = {name: value for name, value in given.items() if value is not None}
    return params | {"group_by": ",".join(group_by)} if group_by else params


def _instant(at: datetime | None) -> str | None:
    # A naive instant is this machine's.
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _csv(params: dict[str, str]) -> Call[str]:
    return Call("GET", ROOT, lambda _answer, body: body.decode(), params=params | {"format": "csv"})


class Usage:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def sums(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        group_by: Sequence[str] = (),
    ) -> Iterator[UsageSum]:
        """What was used, summed by `group_by`; pages are asked for as they're needed.

        Args:
            tenant: None: the key's own; for an admin key, everyone's.
            adapter: this one's alone; the base's id: the base's.
            start, end: in whole hours; None: without a bound.
            group_by: of ``tenant``, ``adapter``, ``version``, ``hour``, ``day``; none: one sum of all (one for each currency).
        """
        return all_rows(self._transport, ROOT, UsageSum, _params(tenant, adapter, start, end, group_by))

    def csv(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        group_by: Sequence[str] = (),
    ) -> str:
        """As `sums`, as a file of comma-separated values with a line of names first."""
        return self._transport.send(_csv(_params(tenant, adapter, start, end, group_by)))


class AsyncUsage:
    """As `Usage`, awaiting."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def sums(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        group_by: Sequence[str] = (),
    ) -> AsyncIterator[UsageSum]:
        """As `Usage.sums`."""
        return all_rows_async(self._transport, ROOT, UsageSum, _params(tenant, adapter, start, end, group_by))

    async def csv(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        group_by: Sequence[str] = (),
    ) -> str:
        """As `Usage.csv`."""
        return await self._transport.send(_csv(_params(tenant, adapter, start, end, group_by)))
