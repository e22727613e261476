"""A file sent in pieces: what has arrived stays, so that a broken connection costs no more than the piece that was on its way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from loraserve import errors
from loraserve.sdk.call import Call, Result, encode, idempotency_key, read_into, segment
from loraserve.sdk.file_piece import FilePiece, Progress
from loraserve.sdk.retry import RetryPolicy
from loraserve.sdk.transport.steps import Pause, Steps, Work

ROOT = "/api/v1/uploads"
PIECE_BYTES = 16 * 1024 * 1024

_BROKEN = (
    errors.ConnectionFailed,
    errors.ClientTimeout,
    errors.Overloaded,
    errors.UploadOffsetMismatch,
    errors.UploadDigestMismatch,
    errors.UploadNotFound,
)
"""What is no word against the file: ask how much arrived, and go on from there."""


class UploadState(Result):
    """A resumable upload, as far as it has come."""

    id: str
    sha256: str
    size: int
    received: int
    """Bytes from the first on that are durable."""
    is_complete: bool
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's bytes as they were when they were hashed."""

    sha256: str
    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        with path.open("rb") as file:
            found = path.stat()
            return cls(hashlib.file_digest(file, "sha256").hexdigest(), found.st_size, found.st_mtime_ns)


def _create(state: FileState) -> Call[UploadState]:
    body = encode({"sha256": state.sha256, "size": state.num_bytes})
    return Call("POST", ROOT, read_into(UploadState), headers=idempotency_key(), body=body)


def _path(upload: UploadState) -> str:
    return f"{ROOT}/{segment(upload.id, 'upload')}"


def _get(upload: UploadState) -> Call[UploadState]:
    return Call("GET", _path(upload), read_into(UploadState))


def _patch(upload: UploadState, path: Path, on_progress: Callable[[Progress], object] | None) -> Call[UploadState]:
    end = min(upload.received + PIECE_BYTES, upload.size)
    piece = FilePiece(path, upload.received, end, upload.size, on_progress)
    return Call("PATCH", _path(upload), read_into(UploadState), piece=piece)


def send_file(path: Path, policy: RetryPolicy, on_progress: Callable[[Progress], object] | None) -> Steps[str]:
    """Return the file's SHA-256 once the server has all of its bytes, durably. What it has of them already isn't sent again.

    Raises:
        AdapterFormatError: the file changed meanwhile.
        LoraserveError: the server refused it, or more tries than `policy` allows brought not one byte.
    """
    state: FileState = yield Work(lambda: FileState.of(path))
    upload: UploadState = yield _create(state)
    most, num_failures = upload.received, 0
    call = _patch(upload, path, on_progress)
    while not upload.is_complete:
        failure: errors.LoraserveError | None = None
        try:
            upload = yield call
        except _BROKEN as error:
            failure = error
        if failure is not None:
            yield from _check_unchanged(path, state)
            delay = policy.delay_after_failure(num_failures)
            if delay is None:
                raise failure
            num_failures += 1
            yield Pause(delay)
            # One that is gone begins again.
            call = _create(state) if isinstance(failure, errors.UploadNotFound) else _get(upload)
            continue
        if upload.received > most:
            # Further than ever: what was in the way is behind.
            most, num_failures = upload.received, 0
        call = _patch(upload, path, on_progress)
    if on_progress is not None:
        on_progress(Progress(state.num_bytes, state.num_bytes))
    return state.sha256


def _check_unchanged(path: Path, state: FileState) -> Steps[None]:
    found = yield Work(path.stat)
    if (found.st_size, found.st_mtime_ns) != (state.num_bytes, state.modified_ns):
        raise errors.AdapterFormatError(
            f"{path} changed while it was being sent.", hint="Push again when nothing writes to the directory."
        )
