"""`client.usage`: tokens used, and their cost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime

from loraserve.contract.usage import UsageSum
from loraserve.sdk._async.paging import all_rows
from loraserve.sdk._async.transport import AsyncTransport
from loraserve.sdk.call import Call

ROOT = "/api/v1/usage"


class AsyncUsage:
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
        """Yield the usage, summed by `group_by`; pages are requested as they're needed.

        Args:
            tenant: None: the key's own; for an admin key, all tenants.
            adapter: only this adapter; the base's id: only the base.
            start, end: in whole hours; None: no bound.
            group_by: of ``tenant``, ``adapter``, ``version``, ``hour``, ``day``; none: one sum for
                each currency.
        """
        return all_rows(self._transport, ROOT, UsageSum, _params(tenant, adapter, start, end, group_by))

    async def csv(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        group_by: Sequence[str] = (),
    ) -> str:
        """Return the same sums as comma-separated values, with a header line first."""
        params = _params(tenant, adapter, start, end, group_by) | {"format": "csv"}
        return await self._transport.send(Call("GET", ROOT, lambda _answer, body: body.decode(), params=params))


def _params(
    tenant: str | None, adapter: str | None, start: datetime | None, end: datetime | None, group_by: Sequence[str]
) -> dict[str, str]:
    given = {"tenant": tenant, "adapter": adapter, "from": _instant(start), "to": _instant(end)}
    params = {name: value for name, value in given.items() if value is not None}
    return params | {"group_by": ",".join(group_by)} if group_by else params


def _instant(at: datetime | None) -> str | None:
    # a naive instant is in this machine's time zone
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")
