"""Pulls: an adapter fetched by the server itself, from where the operator allows, and published like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from adapters_store import StagedBlob
from loraserve.db.idempotency import Once
from loraserve.errors import AdapterFormatError
from loraserve.limits import LIMITS
from loraserve.registry.operations import OperationRecord, Operations, Progress, Result
from loraserve.registry.sources import Source, check_allowed, parse_source
from loraserve.registry.uploads import Uploads
from loraserve.types import TenantId

KIND = "pull"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Pulls:
    """Begins operations that pull.

    Args:
        allow: patterns of what may be pulled; none: nothing may.
    """

    def __init__(self, uploads: Uploads, operations: Operations, allow: Sequence[str]) -> None:
        self._uploads = uploads
        self._operations = operations
        self._allow = tuple(allow)

    async def begin(
        self,
        tenant: TenantId,
        name: str,
        source: str,
        *,
        actor: str,
        is_promoting: bool = True,
        once: Once[OperationRecord] | None = None,
    ) -> OperationRecord:
        """An operation that publishes the adapter at `source` as a version of the tenant's `name`.

        Raises:
            InvalidRequest: the name or the source can't be one.
            PermissionDenied: the operator doesn't allow it.
            Overloaded, Replay: as `Operations.begin`.
        """
        self._uploads.check_name(name)
        found = parse_source(source)
        check_allowed(found, self._allow)

        async def work(progress: Progress) -> Result:
            return await self._pull(tenant, name, found, progress, actor=actor, is_promoting=is_promoting)

        return await self._operations.begin(tenant, KIND, f"{name} from {source}", work, actor=actor, once=once)

    async def _pull(
        self, tenant: TenantId, name: str, source: Source, progress: Progress, *, actor: str, is_promoting: bool
    ) -> Result:
        staged = await self._uploads.stage(tenant)
        try:
            config = await asyncio.to_thread(_fetch, source, staged, progress)
            published = await self._uploads.publish(
                tenant, name, config, staged, actor=actor, is_promoting=is_promoting
            )
        finally:
            await self._uploads.release(tenant, staged)
        version = published.version
        return {
            "name": version.name,
            "version": version.version,
            "digest": version.digest,
            "state": version.state,
            "is_new": published.is_new,
            "revision": source.revision,
        }


def _fetch(source: Source, weights: StagedBlob, progress: Progress) -> bytes:
    """The config, after the weights went to `weights`; each bounded while it is read."""
    config = b"".join(_bounded(source, CONFIG, LIMITS.max_adapter_config_bytes, progress))
    for piece in _bounded(source, WEIGHTS, LIMITS.max_upload_bytes, progress):
        weights.write(piece)
    return config


def _bounded(source: Source, file: str, max_bytes: int, progress: Progress) -> Iterator[bytes]:
    size, pieces = source.open(file)
    # what a source says of itself is no bound: it may send more
    num_bytes = 0
    if size is not None:
        progress.bytes_total = progress.bytes_done + size
    for piece in pieces:
        num_bytes += len(piece)
        if max(num_bytes, size or 0) > max_bytes:
            raise AdapterFormatError(f"{source.address}: {file} is over its bound of {max_bytes} bytes.")
        progress.advance(len(piece))
        yield piece
    if size is not None and num_bytes != size:
        raise AdapterFormatError(
            f"{source.address}: {file} ended after {num_bytes} of {size} bytes.", hint="Try again."
        )
