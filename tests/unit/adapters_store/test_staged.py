"""What is staged can be looked at: from memory while it is short, from its file, verified,
when it isn't.
"""

import ctypes
import errno
import os
from pathlib import Path

import pytest

from adapters_store import LocalStore
from adapters_store import staged as staged_module
from adapters_store.files import fresh_memory
from adapters_store.staged import KEPT_BYTES
from loraserve.errors import StorageError


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "blobs")


def test_a_short_file_is_not_read_again(store: LocalStore) -> None:
    pieces = [os.urandom(size) for size in (1, 70_000, 3 << 20)]
    with store.stage(is_looked_at=True) as staged:
        for piece in pieces:
            staged.write(piece)
            # were it read, these bytes would be found, and refused
            os.pwrite(staged._live_fd(), b"other", 0)
        view = staged.read()
        assert bytes(view) == b"".join(pieces)
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 0
    # whoever looks at it may do so for longer
    assert bytes(view) == b"".join(pieces)


@pytest.mark.parametrize("piece_bytes", [KEPT_BYTES + 1, (KEPT_BYTES >> 2) + 1])
def test_a_long_file_is_read_back_and_verified(store: LocalStore, piece_bytes: int) -> None:
    data = os.urandom(KEPT_BYTES + 8)
    with store.stage(is_looked_at=True) as staged:
        for start in range(0, len(data), piece_bytes):
            staged.write(data[start : start + piece_bytes])
        assert bytes(staged.read()) == data
        os.pwrite(staged._live_fd(), b"other", 0)
        with pytest.raises(StorageError, match="differ from the bytes that were written"):
            staged.read()


def test_exactly_budgeted_bytes_are_kept(store: LocalStore) -> None:
    data = os.urandom(KEPT_BYTES)
    with store.stage(is_looked_at=True) as staged:
        staged.write(data)
        os.pwrite(staged._live_fd(), b"other", 0)
        assert bytes(staged.read()) == data


def test_removed_file_cannot_be_read(store: LocalStore) -> None:
    staged = store.stage(is_looked_at=True)
    staged.write(b"bytes")
    staged.discard()
    with pytest.raises(StorageError, match="stage a new one"):
        staged.read()


def test_unwatched_bytes_are_not_kept(store: LocalStore) -> None:
    with store.stage() as staged:
        staged.write(b"bytes")
        assert bytes(staged.read()) == b"bytes"
        os.pwrite(staged._live_fd(), b"other", 0)
        with pytest.raises(StorageError, match="differ from the bytes that were written"):
            staged.read()


def test_file_is_reread_where_system_gives_no_addresses(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(staged_module, "fresh_memory", refuse)
    with store.stage(is_looked_at=True) as staged:
        staged.write(b"bytes")
        assert bytes(staged.read()) == b"bytes"


def test_memory_read_into_is_private() -> None:
    """Only private pages may be huge."""
    view = fresh_memory(KEPT_BYTES)
    view[0] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    lines = Path("/proc/self/maps").read_text().splitlines()
    own = [line for line in lines if int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)]
    assert [line.split()[1] for line in own] == ["rw-p"]
