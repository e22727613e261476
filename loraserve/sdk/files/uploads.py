"""The calls of a resumable upload.

The file is sent in pieces, and a broken connection costs at most one of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from loraserve import errors
from loraserve.contract.operation import Upload
from loraserve.sdk.call import Call, encode, idempotency_key, read_into, segment
from loraserve.sdk.file_piece import FilePiece, OnProgress

ROOT = "/api/v1/uploads"
PIECE_BYTES = 16 * 1024 * 1024

RETRIED = (
    errors.ConnectionFailed,
    errors.ClientTimeout,
    errors.Overloaded,
    errors.UploadOffsetMismatch,
    errors.UploadDigestMismatch,
    errors.UploadNotFound,
)
"""Failures that say nothing against the file: ask how much arrived, and go on from there."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's size, time and digest when it was hashed."""

    sha256: str
    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        with path.open("rb") as file:
            found = path.stat()
            return cls(hashlib.file_digest(file, "sha256").hexdigest(), found.st_size, found.st_mtime_ns)


def create(state: FileState) -> Call[Upload]:
    """Begin an upload, or resume the one of the same bytes."""
    body = encode({"sha256": state.sha256, "size": state.num_bytes})
    return Call("POST", ROOT, read_into(Upload), headers=idempotency_key(), body=body)


def _path(upload: Upload) -> str:
    return f"{ROOT}/{segment(upload.id, 'upload')}"


def get(upload: Upload) -> Call[Upload]:
    """Ask how much of the upload the server has."""
    return Call("GET", _path(upload), read_into(Upload))


def patch(upload: Upload, path: Path, on_progress: OnProgress | None) -> Call[Upload]:
    """Send the next piece of the file."""
    end = min(upload.received + PIECE_BYTES, upload.size)
    piece = FilePiece(path, upload.received, end, upload.size, on_progress)
    return Call("PATCH", _path(upload), read_into(Upload), piece=piece)


def check_unchanged(path: Path, state: FileState) -> None:
    """Check that the file is as it was when it was hashed.

    Raises:
        AdapterFormatError: it isn't.
    """
    found = path.stat()
    if (found.st_size, found.st_mtime_ns) != (state.num_bytes, state.modified_ns):
        raise errors.AdapterFormatError(
            f"{path} changed while it was being sent.", hint="Push again when nothing writes to the directory."
        )
