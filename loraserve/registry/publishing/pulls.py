"""Pulls: the server fetches an adapter from a source that the operator allows, and publishes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from loraserve.adapter_folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILES, shard_names
from loraserve.adapters.extra_files import FILE_NAMES, MAX_BYTES, ExtraFiles, with_tokenizer
from loraserve.background import SERVER_NICENESS, lower_thread_priority
from loraserve.db.idempotency import Once
from loraserve.errors import AdapterFormatError, SourceTooSlow
from loraserve.limits import LIMITS
from loraserve.registry.operations import OperationProgress, OperationRecord, Operations, Result
from loraserve.registry.publishing.inspector import UploadInspector
from loraserve.registry.publishing.publisher import Publisher
from loraserve.registry.publishing.sources import NoSuchFile, Source, check_allowed, parse_source
from loraserve.registry.uploads.staging import BoundedBlob
from loraserve.registry.uploads.transfers import Uploads
from loraserve.tokenizer_identity import TOKENIZER_FILES
from loraserve.types import TenantId

KIND = "pull"


class Pulls:
    """Begin operations that pull.

    Args:
        allow: patterns of the sources that may be pulled from; nothing is allowed without any.
        monotonic: clock that measures a source's rate.
    """

    def __init__(
        self,
        uploads: Uploads,
        inspector: UploadInspector,
        publisher: Publisher,
        operations: Operations,
        allow: Sequence[str],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._uploads = uploads
        self._inspector, self._publisher = inspector, publisher
        self._operations = operations
        self.allowed = tuple(allow)
        self._monotonic = monotonic
        # threads of their own: a pull may wait for its source for hours
        self._threads = ThreadPoolExecutor(
            LIMITS.max_concurrent_operations, "pull", initializer=lower_thread_priority, initargs=(SERVER_NICENESS,)
        )

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
        """Begin an operation that publishes the adapter at `source`.

        It becomes a version of the tenant's `name`.

        Raises:
            InvalidRequest: the name or the source isn't valid.
            PermissionDenied: the operator doesn't allow this source.
            Overloaded, Replay: as `Operations.begin`.
        """
        self._inspector.check_name(name)
        found = parse_source(source)
        check_allowed(found, self.allowed)

        async def work(progress: OperationProgress) -> Result:
            return await self._pull(tenant, name, found, progress, actor=actor, is_promoting=is_promoting)

        return await self._operations.begin(tenant, KIND, f"{name} from {source}", work, actor=actor, once=once)

    async def _pull(
        self,
        tenant: TenantId,
        name: str,
        source: Source,
        progress: OperationProgress,
        *,
        actor: str,
        is_promoting: bool,
    ) -> Result:
        staged = await self._uploads.stage(tenant)
        try:
            rate = _MinimumRate(source.address, self._monotonic)
            fetch = partial(_fetch, source, staged, progress, rate)
            config, extras = await asyncio.get_running_loop().run_in_executor(self._threads, fetch)
            published = await self._publisher.publish(
                tenant,
                name,
                config,
                staged,
                actor=actor,
                extras=extras,
                is_promoting=is_promoting,
                on_stored=lambda: self._uploads.end_arrival(tenant, staged),
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


class _MinimumRate:
    """Bound the time that one pull waits for its source.

    It may wait for `LIMITS.pull_grace_s` plus the time that its bytes take at
    `LIMITS.min_pull_bytes_per_s`. A rate fits files of any size, also where the source doesn't
    state the size. The time to write the bytes doesn't count.
    """

    def __init__(self, address: str, monotonic: Callable[[], float]) -> None:
        self._address = address
        self._monotonic = monotonic
        self._waited_s = 0.0
        self._num_bytes = 0

    def opened(self, source: Source, file: str) -> tuple[int | None, Iterator[bytes]]:
        """Open the file as `source.open` does, and bound the time that its pieces take.

        Raises:
            SourceTooSlow: also while the pieces are read.
        """
        began = self._monotonic()
        size, pieces = source.open(file)
        self._count(began, 0)
        return size, self._in_time(pieces)

    def _in_time(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        while True:
            began = self._monotonic()
            piece = next(pieces, None)
            if piece is None:
                return
            self._count(began, len(piece))
            yield piece

    def _count(self, began: float, num_bytes: int) -> None:
        self._waited_s += self._monotonic() - began
        self._num_bytes += num_bytes
        if self._waited_s > LIMITS.pull_grace_s + self._num_bytes / LIMITS.min_pull_bytes_per_s:
            raise SourceTooSlow(
                f"{self._address} sent {self._num_bytes} bytes in {self._waited_s:.0f} s; "
                f"expected at least {LIMITS.min_pull_bytes_per_s} "
                f"per second, after {LIMITS.pull_grace_s:g} s.",
                hint="Try again later, or push the files.",
            )


def _fetch(
    source: Source, weights: BoundedBlob, progress: OperationProgress, rate: _MinimumRate
) -> tuple[bytes, ExtraFiles]:
    """Write the weights to `weights`; return the config and the extra files that are there.

    The sizes of all are checked while they are read.
    """
    config = b"".join(_bounded(source, CONFIG_FILE, LIMITS.max_adapter_config_bytes, progress, rate))
    index = _fetch_weights(source, weights, progress, rate)
    extras: dict[str, bytes] = {}
    for part, file in FILE_NAMES.items():
        with suppress(NoSuchFile):
            extras[part] = b"".join(_bounded(source, file, MAX_BYTES[part], progress, rate))
    tokenizer: dict[str, bytes] = {}
    for file, max_bytes in TOKENIZER_FILES.items():
        with suppress(NoSuchFile):
            tokenizer[file] = b"".join(_bounded(source, file, max_bytes, progress, rate))
    return config, replace(with_tokenizer(ExtraFiles.read(extras), tokenizer), index=index)


def _fetch_weights(
    source: Source, weights: BoundedBlob, progress: OperationProgress, rate: _MinimumRate
) -> bytes | None:
    """Write the weights, and return the index of their files if there are several."""
    missing: list[NoSuchFile] = []
    for name in WEIGHTS_FILES:
        try:
            if name == INDEX_FILE:
                index = b"".join(_bounded(source, name, LIMITS.max_adapter_header_bytes, progress, rate))
                break
            for piece in _bounded(source, name, LIMITS.max_upload_bytes, progress, rate):
                weights.write(piece)
        except NoSuchFile as error:
            missing.append(error)
        else:
            return None
    else:
        # names the preferred file
        raise missing[0]
    for number, shard in enumerate(shard_names(index)):
        if number:
            weights.begin_file()
        for piece in _bounded(source, shard, LIMITS.max_upload_bytes - weights.num_bytes, progress, rate):
            weights.write(piece)
    return index


def _bounded(
    source: Source, file: str, max_bytes: int, progress: OperationProgress, rate: _MinimumRate
) -> Iterator[bytes]:
    size, pieces = rate.opened(source, file)
    # the source may send more than the size that it states
    num_bytes = 0
    if size is not None:
        progress.bytes_total = progress.bytes_done + size
    for piece in pieces:
        num_bytes += len(piece)
        if max(num_bytes, size or 0) > max_bytes:
            raise AdapterFormatError(f"{source.address}: {file} exceeds the limit of {max_bytes} bytes.")
        progress.advance(len(piece))
        yield piece
    if size is not None and num_bytes != size:
        raise AdapterFormatError(
            f"{source.address}: {file} ended after {num_bytes} of {size} bytes.", hint="Try again."
        )
