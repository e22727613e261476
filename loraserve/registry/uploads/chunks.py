"""Stored bytes of resumable uploads.

They are the chunks, the blob that they make, and that blob as weights to publish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from adapters_store.base import NUM_FIRST_BYTES, BlobStore
from loraserve import faults
from loraserve.background import Pause
from loraserve.db.models import Upload, UploadChunk
from loraserve.errors import BlobCorrupt, BlobNotFound, Conflict
from loraserve.registry.blob_references import add_gc_candidates
from loraserve.types import Digest


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A run of an upload's bytes, stored as a blob of its own until the upload is complete."""

    start: int
    size: int
    digest: Digest


async def chunks_of(session: AsyncSession, upload_id: str) -> list[StoredChunk]:
    """List the upload's chunks in order."""
    query = select(UploadChunk).where(UploadChunk.upload_id == upload_id).order_by(UploadChunk.start)
    return [StoredChunk(row.start, row.size, Digest(row.digest)) for row in (await session.scalars(query)).all()]


async def remove_upload(session: AsyncSession, row: Upload, now: datetime) -> None:
    """Delete the upload and its chunks, and make their blobs candidates for collection."""
    digests = (await session.scalars(select(UploadChunk.digest).where(UploadChunk.upload_id == row.id))).all()
    await session.execute(delete(UploadChunk).where(UploadChunk.upload_id == row.id))
    await session.delete(row)
    await add_gc_candidates(session, [*map(Digest, digests), *([Digest(row.sha256)] if row.is_complete else [])], now)


def assemble(
    store: BlobStore, chunks: Sequence[StoredChunk], sha256: Digest, pause: Pause
) -> tuple[bool, StoredChunk | None]:
    """Commit the blob `sha256` if the chunks make it.

    Returns:
        Whether they do, and the first chunk that is corrupt or missing.
    """
    with store.stage() as staged:
        for chunk in chunks:
            try:
                for piece in store.read_pieces(chunk.digest):
                    staged.write(piece)
                    pause()
            except (BlobCorrupt, BlobNotFound):
                return False, chunk
        if staged.digest != sha256:
            return False, None
        faults.hit("upload.before_assembled")
        staged.commit()
    return True, None


class BytesLost(Conflict):
    """The uploaded bytes are corrupt or gone and must be uploaded again."""


class StoredWeights:
    """Weights to publish whose blob is in the store already."""

    def __init__(self, store: BlobStore, digest: Digest, num_bytes: int) -> None:
        self._store = store
        self.digest = digest
        self.num_bytes = num_bytes

    def read(self) -> memoryview:
        """Read the bytes of the blob.

        Raises:
            BytesLost: the blob is corrupt or gone.
            StorageError: the store fails.
        """
        try:
            return self._store.read(self.digest)
        except (BlobCorrupt, BlobNotFound):
            raise _lost() from None

    @property
    def first_bytes(self) -> bytes:
        """The first `NUM_FIRST_BYTES`, or all that there are.

        Raises:
            BytesLost: the blob is gone, or small and corrupt.
            StorageError: the store fails.
        """
        try:
            return next(self._store.read_pieces(self.digest), b"")[:NUM_FIRST_BYTES]
        except (BlobCorrupt, BlobNotFound):
            raise _lost() from None

    def commit(self) -> Digest:
        """Return the digest; the blob has been durable since its upload completed."""
        return self.digest


def _lost() -> BytesLost:
    return BytesLost("The uploaded bytes are damaged or missing.", hint="Create the upload again, and send all bytes.")
