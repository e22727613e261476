"""How many of something are under way: bounded for each tenant, so that nobody takes every place, and for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from loraserve.errors import Overloaded, RateLimited
from loraserve.types import TenantId


class Places:
    """Places for something that takes a while, of which a tenant may have a few and all tenants some more.

    Args:
        what: what they are called in messages, in the plural.
    """

    def __init__(self, what: str, *, max_in_all: int, max_per_tenant: int) -> None:
        self._what = what
        self._max_in_all = max_in_all
        self._max_per_tenant = max_per_tenant
        self._taken: Counter[TenantId] = Counter()

    def take(self, tenant: TenantId) -> None:
        """A place is the tenant's until `give_back`.

        Raises:
            RateLimited: the tenant has as many as it may.
            Overloaded: all are taken.
        """
        if self._taken[tenant] >= self._max_per_tenant:
            raise RateLimited(
                f"{self._taken[tenant]} {self._what} of this tenant are under way, the most at a time.",
                retry_after_s=5,
            )
        if self._taken.total() >= self._max_in_all:
            raise Overloaded(f"{self._taken.total()} {self._what} are under way, the most at a time.", retry_after_s=5)
        self._taken[tenant] += 1

    def give_back(self, tenant: TenantId) -> None:
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            # one entry per tenant with a place, not per tenant ever seen
            del self._taken[tenant]

    @contextmanager
    def taken(self, tenant: TenantId) -> Iterator[None]:
        """A place for the length of a with block.

        Raises:
            RateLimited, Overloaded: as `take`.
        """
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)
