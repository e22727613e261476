"""A run of a file's bytes on its way to the server, as the body of one request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import anyio.to_thread

from loraserve import errors

CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of an upload or a download has been handed over."""

    sent_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        share = 100 * self.sent_bytes // self.total_bytes if self.total_bytes else 100
        return f"{self.sent_bytes:,} of {self.total_bytes:,} bytes ({share} %)"


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes `start` to `end` (exclusive) of a file of `file_bytes`; it can be sent again from its start."""

    path: Path
    start: int
    end: int
    file_bytes: int
    on_progress: Callable[[Progress], object] | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(self.end - self.start),
            "Content-Range": f"bytes {self.start}-{self.end - 1}/{self.file_bytes}",
        }

    def pieces(self) -> Iterator[bytes]:
        """The bytes, at most CHUNK_BYTES in memory at a time.

        Raises:
            AdapterFormatError: the file ends before `end`.
        """
        with self.path.open("rb") as file:
            file.seek(self.start)
            at = self.start
            while at < self.end:
                self._tell(at)
                chunk = self._check(file.read(min(CHUNK_BYTES, self.end - at)), at)
                at += len(chunk)
                yield chunk
            self._tell(at)

    async def apieces(self) -> AsyncIterator[bytes]:
        """As `pieces`; the file is read on a thread."""
        file: BinaryIO = await anyio.to_thread.run_sync(self.path.open, "rb")
        with file:
            file.seek(self.start)
            at = self.start
            while at < self.end:
                self._tell(at)
                chunk = self._check(await anyio.to_thread.run_sync(file.read, min(CHUNK_BYTES, self.end - at)), at)
                at += len(chunk)
                yield chunk
            self._tell(at)

    def _tell(self, sent_bytes: int) -> None:
        if self.on_progress is not None:
            self.on_progress(Progress(sent_bytes, self.file_bytes))

    def _check(self, chunk: bytes, at: int) -> bytes:
        if not chunk:
            raise errors.AdapterFormatError(
                f"{self.path} became shorter while it was being sent: {at} of {self.file_bytes} bytes were there.",
                hint="Push again when nothing writes to the directory.",
            )
        return chunk
