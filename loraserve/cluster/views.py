"""Views of a request and of a replica, on which placement decides."""

from __future__ import annotations

from collections.abc import Mapping

from loraserve.types import Digest, RequestId, Struct, TenantId, Tier


class PlacementRequest(Struct, frozen=True):
    """A request as the router sees it.

    Attributes:
        digest: of its adapter; None: it is for the base alone.
        num_bytes: of the adapter's files; 0: unknown.
        prefixes: hashes of the beginnings of its prompt, from the shortest to the longest, each of
            its tenant and adapter alone.
        tokens_per_prefix: tokens by which one beginning is longer than the one before.
        target: replica that it is for, and no other; None: any.
    """

    request_id: RequestId
    tenant: TenantId
    digest: Digest | None = None
    num_bytes: int = 0
    prefixes: tuple[int, ...] = ()
    tokens_per_prefix: int = 0
    target: str | None = None


class ReplicaView(Struct, frozen=True):
    """A replica as the router knows it when it places one request.

    Attributes:
        residency: tier by digest of the adapters in its memory; one that isn't here is on disk.
        num_running, num_waiting: requests in its engine's steps and queue, with those that were
            sent and not yet reported.
        num_slots: sequences that it computes at once.
        num_cached_prefixes: how many of the request's `prefixes` it has computed of late.
        recent_load: requests per second that were sent to it of late.
    """

    id: str
    residency: Mapping[Digest, Tier] = {}
    num_running: int = 0
    num_waiting: int = 0
    num_slots: int = 1
    num_cached_prefixes: int = 0
    recent_load: float = 0.0
