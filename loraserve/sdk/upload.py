"""An adapter directory on its way to the server: read in pieces, counted, sent as multipart/form-data."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import anyio.to_thread

from loraserve import errors
from loraserve.sdk.file_piece import CHUNK_BYTES, Progress

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


class Upload:
    """The two files of a PEFT directory as one multipart body of known length, which can be sent again from its start."""

    def __init__(self, directory: str | Path, on_progress: Callable[[Progress], object] | None = None) -> None:
        """Raises AdapterFormatError where the directory isn't one that PEFT's `save_pretrained` makes."""
        config_path, self._weights_path = find_files(Path(directory))
        config = config_path.read_bytes()
        self._weights_bytes = self._weights_path.stat().st_size
        self._on_progress = on_progress
        boundary = secrets.token_hex(16)
        self._head = (
            _part_head(boundary, "config", CONFIG_FILE, "application/json")
            + config
            + b"\r\n"
            + _part_head(boundary, "weights", WEIGHTS_FILE, "application/octet-stream")
        )
        self._tail = f"\r\n--{boundary}--\r\n".encode()
        self.headers = {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(self.num_bytes),
        }

    @property
    def num_bytes(self) -> int:
        return len(self._head) + self._weights_bytes + len(self._tail)

    def pieces(self) -> Iterator[bytes]:
        """The body, from its start, at most CHUNK_BYTES in memory at a time."""
        with self._weights_path.open("rb") as file:
            yield from self._report(0, self._head)
            sent = 0
            while sent < self._weights_bytes:
                chunk = self._check(file.read(self._next_bytes(sent)), sent)
                sent += len(chunk)
                yield from self._report(len(self._head) + sent - len(chunk), chunk)
            yield from self._report(self.num_bytes - len(self._tail), self._tail)
        self._tell(self.num_bytes)

    async def apieces(self) -> AsyncIterator[bytes]:
        """As `pieces`; the file is read on a thread."""
        file: BinaryIO = await anyio.to_thread.run_sync(self._weights_path.open, "rb")
        with file:
            for piece in self._report(0, self._head):
                yield piece
            sent = 0
            while sent < self._weights_bytes:
                chunk = self._check(await anyio.to_thread.run_sync(file.read, self._next_bytes(sent)), sent)
                sent += len(chunk)
                for piece in self._report(len(self._head) + sent - len(chunk), chunk):
                    yield piece
            for piece in self._report(self.num_bytes - len(self._tail), self._tail):
                yield piece
        self._tell(self.num_bytes)

    def _report(self, sent_before: int, chunk: bytes) -> Iterator[bytes]:
        self._tell(sent_before)
        yield chunk

    def _tell(self, sent_bytes: int) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress(sent_bytes, self.num_bytes))

    def _next_bytes(self, sent: int) -> int:
        return min(CHUNK_BYTES, self._weights_bytes - sent)

    def _check(self, chunk: bytes, sent: int) -> bytes:
        if not chunk:
            raise errors.AdapterFormatError(
                f"{self._weights_path} became shorter while it was being sent: {sent} of {self._weights_bytes} bytes were there.",
                hint="Push again when nothing writes to the directory.",
            )
        return chunk


def find_files(directory: Path) -> tuple[Path, Path]:
    """The config's and the weights' path in a PEFT directory.

    Raises:
        AdapterFormatError: one of them isn't there; the message says what is.
    """
    expected = f"Expected a directory with {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT's save_pretrained() makes it."
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "doesn't exist"
        raise errors.AdapterFormatError(f"{directory} {found}.", hint=expected)
    config, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    if not weights.is_file() and (directory / "adapter_model.bin").exists():
        raise errors.AdapterFormatError(
            f"{directory} holds pickled weights (adapter_model.bin), which a server must never load.",
            hint="Save it again with model.save_pretrained(dir, safe_serialization=True).",
        )
    missing = [path.name for path in (config, weights) if not path.is_file()]
    if missing:
        there = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
        raise errors.AdapterFormatError(
            f"{directory} has no {' and no '.join(missing)}; it holds {there}.", hint=expected
        )
    return config, weights


def _part_head(boundary: str, field: str, filename: str, content_type: str) -> bytes:
    lines = (
        f"--{boundary}",
        f'Content-Disposition: form-data; name="{field}"; filename="{filename}"',
        f"Content-Type: {content_type}",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
