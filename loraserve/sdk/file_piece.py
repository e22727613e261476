"""A range of a file's bytes on its way to the server, as the body of one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loraserve import errors
from loraserve.contract.operation import Progress

CHUNK_BYTES = 256 * 1024


OnProgress = Callable[[Progress], object]


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes `start` to `end` (exclusive) of a file of `file_bytes`.

    It can be sent again from its start.
    """

    path: Path
    start: int
    end: int
    file_bytes: int
    on_progress: OnProgress | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(self.end - self.start),
            "Content-Range": f"bytes {self.start}-{self.end - 1}/{self.file_bytes}",
        }

    def open(self) -> BinaryIO:
        """Open the file at the piece's first byte."""
        file = self.path.open("rb")
        file.seek(self.start)
        return file

    def read_chunk(self, file: BinaryIO, at: int) -> bytes:
        """Read at most CHUNK_BYTES of the piece from byte `at` of the file, where `file` stands.

        Raises:
            AdapterFormatError: the file ends there.
        """
        chunk = file.read(min(CHUNK_BYTES, self.end - at))
        if not chunk:
            raise errors.AdapterFormatError(
                f"{self.path} became shorter while it was being sent: it had {self.file_bytes} bytes and has {at} now.",
                hint="Push again when nothing writes to the directory.",
            )
        return chunk

    def report(self, sent_bytes: int) -> None:
        """Tell the observer how many of the file's bytes have been sent."""
        if self.on_progress is not None:
            self.on_progress(Progress(sent_bytes, self.file_bytes))
