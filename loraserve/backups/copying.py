"""Copies of blobs from one store to another, several at a time, verified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from adapters_store.base import BlobStore
from loraserve.backups.blob_index import CORRUPT, MISSING
from loraserve.errors import BlobCorrupt, BlobNotFound
from loraserve.types import Digest

T = TypeVar("T")
_AT_ONCE = 4


class BlobCopies:
    """Copies of blobs, and what was found on the way."""

    def __init__(self, source: BlobStore, target: BlobStore) -> None:
        self.sizes: dict[Digest, int] = {}
        """Bytes of the blobs that are in the target now."""
        self.damaged: dict[Digest, str] = {}
        """Blobs that the source hasn't, or has with other bytes."""
        self.num_copied = 0
        self.num_copied_bytes = 0
        self._source = source
        self._target = target

    async def copy(self, digests: Iterable[Digest]) -> None:
        """Copy the blobs; read those back that are there already, and replace damaged ones.

        Raises:
            StorageFull, StorageError: a store fails, for other reasons than a damaged blob.
        """
        await for_each(digests, self._copy)

    def _copy(self, digest: Digest) -> None:
        size = whole_size(self._target, digest)
        if size is not None:
            self.sizes[digest] = size
            return
        try:
            with self._target.stage() as staged:
                for piece in self._source.read_pieces(digest):
                    staged.write(piece)
                staged.commit()
                self.sizes[digest] = staged.num_bytes
        except (BlobNotFound, BlobCorrupt) as error:
            self.damaged[digest] = MISSING if isinstance(error, BlobNotFound) else CORRUPT
        else:
            self.num_copied += 1
            self.num_copied_bytes += self.sizes[digest]


def whole_size(store: BlobStore, digest: Digest) -> int | None:
    """Measure the blob's size once all of it is verified; None if it is missing or damaged.

    Raises:
        StorageError
    """
    try:
        return sum(map(len, store.read_pieces(digest)))
    except (BlobNotFound, BlobCorrupt):
        return None


async def for_each(items: Iterable[T], work: Callable[[T], None]) -> None:
    """Call `work` with each item, in threads, a few at a time; raise the first error."""
    left = iter(items)

    async def run() -> None:
        for item in left:
            await asyncio.to_thread(work, item)

    tasks = [asyncio.create_task(run()) for _ in range(_AT_ONCE)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
