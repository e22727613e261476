"""Adapters in anonymous memory: read by path while it is held, sealed, counted, and freed."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import msgspec
import pytest

from adapters_store import MemoryBlob, read_memory
from loraserve.errors import BlobCorrupt, BlobNotFound, RateLimited, StorageError, StorageFull
from loraserve.types import Digest

CONFIG, PIECES = b'{"r": 8}', [os.urandom(size) for size in (1, 70_000, 3 << 20)]
WEIGHTS = b"".join(PIECES)


def digest(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())


def filled() -> MemoryBlob:
    blob = MemoryBlob()
    for piece in PIECES:
        blob.write(piece)
    return blob


def test_files_are_read_by_path_without_copy() -> None:
    blob = filled()
    assert (blob.num_bytes, blob.digest) == (len(WEIGHTS), digest(WEIGHTS))
    assert bytes(blob.read()) == WEIGHTS
    memory = blob.seal(CONFIG)
    config, weights = read_memory(memory, digest(CONFIG), digest(WEIGHTS))
    assert (bytes(config), bytes(weights)) == (CONFIG, WEIGHTS)
    # what a reader changes is its own
    weights[0] ^= 1
    again = read_memory(memory, digest(CONFIG), digest(WEIGHTS))
    assert bytes(again[1]) == WEIGHTS
    blob.close()
    assert bytes(again[1]) == WEIGHTS


def test_sealed_memory_takes_no_change() -> None:
    blob = filled()
    memory = blob.seal(CONFIG)
    for attempt in (
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: os.ftruncate(fd, 1),
        lambda fd: os.ftruncate(fd, 1 << 30),
    ):
        fd = os.open(memory.path, os.O_RDWR)
        with pytest.raises(PermissionError):
            attempt(fd)
        os.close(fd)


def test_freed_memory_is_gone_and_foreign_bytes_refused(tmp_path: Path) -> None:
    blob = filled()
    memory = blob.seal(CONFIG)
    for config, weights in ((WEIGHTS, WEIGHTS), (CONFIG, CONFIG)):
        with pytest.raises(BlobCorrupt):
            read_memory(memory, digest(config), digest(weights))
    with pytest.raises(BlobCorrupt):
        read_memory(msgspec.structs.replace(memory, config_bytes=1), digest(CONFIG), digest(WEIGHTS))
    blob.close()
    blob.close()
    with pytest.raises(BlobNotFound):
        read_memory(memory, digest(CONFIG), digest(WEIGHTS))
    for call in (blob.read, lambda: blob.write(b"x"), lambda: blob.seal(b"")):
        with pytest.raises(StorageError, match="freed"):
            call()


def test_bytes_are_counted_until_freed() -> None:
    taken: list[int] = []

    def take(num_bytes: int) -> None:
        if sum(taken) + num_bytes > 100:
            raise RateLimited("enough")
        taken.append(num_bytes)

    blob = MemoryBlob(take=take, give_back=lambda num_bytes: taken.append(-num_bytes))
    blob.write(bytes(60))
    with pytest.raises(RateLimited):
        blob.write(bytes(60))
    blob.seal(bytes(40))
    assert sum(taken) == 100
    blob.close()
    blob.close()
    assert sum(taken) == 0


def test_a_system_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    blob = MemoryBlob()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(StorageFull):
            blob.write(b"x")
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(StorageError, match="Linux"):
        MemoryBlob()
