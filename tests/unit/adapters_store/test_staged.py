"""What is staged can be looked at: from memory while it is short, from its file, verified, when it isn't."""

import os
from pathlib import Path

import pytest

from adapters_store import LocalStore
from adapters_store.staged import KEPT_BYTES
from loraserve.errors import StorageError


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "blobs")


def test_a_short_file_is_not_read_again(store: LocalStore) -> None:
    pieces = [os.urandom(size) for size in (1, 70_000, 3 << 20)]
    with store.stage() as staged:
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
    with store.stage() as staged:
        for start in range(0, len(data), piece_bytes):
            staged.write(data[start : start + piece_bytes])
        assert bytes(staged.read()) == data
        os.pwrite(staged._live_fd(), b"other", 0)
        with pytest.raises(StorageError, match="reads back differently"):
            staged.read()


def test_exactly_what_may_be_kept_is_kept(store: LocalStore) -> None:
    data = os.urandom(KEPT_BYTES)
    with store.stage() as staged:
        staged.write(data)
        os.pwrite(staged._live_fd(), b"other", 0)
        assert bytes(staged.read()) == data


def test_nothing_can_be_read_once_it_is_gone(store: LocalStore) -> None:
    staged = store.stage()
    staged.write(b"bytes")
    staged.discard()
    with pytest.raises(StorageError, match="stage a new one"):
        staged.read()
