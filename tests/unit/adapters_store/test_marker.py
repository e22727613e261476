"""Marker of a store: put whole, durably, and by one of several that try at once;
in a directory and in a bucket.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket import BucketService, bucket_service

pytest.importorskip("obstore", reason="needs obstore")

from adapters_store import BlobStore, LocalStore, open_store
from adapters_store.base import MARKER, MAX_MARKER_BYTES
from loraserve import faults
from loraserve.errors import StorageError


@pytest.fixture(scope="module")
def service() -> Iterator[BucketService]:
    with bucket_service() as running:
        yield running


@pytest.fixture(params=["directory", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "directory":
        return f"file://{tmp_path / 'blobs'}"
    service: BucketService = request.getfixturevalue("service")
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    return service.make("m" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]) + "/prefix"


@pytest.fixture
def store(url: str) -> Iterator[BlobStore]:
    opened = open_store(url)
    yield opened
    opened.close()


def test_store_has_no_marker_until_written(store: BlobStore) -> None:
    assert store.read_marker() is None
    assert store.swap_marker(None, b"mine")
    assert store.read_marker() == b"mine"
    assert list(store.iter_digests()) == []


def test_marker_is_replaced_only_by_holder(store: BlobStore, url: str) -> None:
    other = open_store(url)
    assert not store.swap_marker(b"anything", b"mine")
    assert store.swap_marker(None, b"mine")
    assert not other.swap_marker(None, b"theirs")
    assert not other.swap_marker(b"other", b"theirs")
    assert other.swap_marker(b"mine", b"mine, again")
    assert not store.swap_marker(b"mine", b"late")
    assert store.read_marker() == b"mine, again"
    other.close()


def test_first_marker_succeeds_for_single_writer(url: str) -> None:
    stores = [open_store(url) for _ in range(4)]
    together = threading.Barrier(len(stores))
    done: list[bool] = [False] * len(stores)

    def put(index: int) -> None:
        together.wait()
        done[index] = stores[index].swap_marker(None, b"%d" % index)

    threads = [threading.Thread(target=put, args=(index,)) for index in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(done) == 1
    assert stores[0].read_marker() == b"%d" % done.index(True)
    for one in stores:
        one.close()


def test_marker_of_any_length_is_read_to_bound(store: BlobStore) -> None:
    assert store.swap_marker(None, b"x" * 2 * MAX_MARKER_BYTES)
    assert len(store.read_marker() or b"") == MAX_MARKER_BYTES + 1


def test_marker_with_failed_fsync_is_not_written(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "blobs")
    with faults.arm("marker.fsync", "EIO"), pytest.raises(StorageError):
        store.swap_marker(None, b"mine")
    assert store.read_marker() is None
    assert list((tmp_path / "blobs" / "staging").iterdir()) == []
    store.close()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_moved_folder_accepts_no_blob_until_restored(tmp_path: Path, is_replaced: bool) -> None:
    root = tmp_path / "blobs"
    store = LocalStore(root)
    under_way = store.stage()
    under_way.write(b"weights")
    root.rename(tmp_path / "moved")
    if is_replaced:
        root.mkdir(mode=0o700)
    for refused in (store.stage, under_way.commit, store.read_marker, lambda: store.swap_marker(None, b"mine")):
        with pytest.raises(StorageError, match="moved or replaced"):
            refused()
    under_way.discard()
    if is_replaced:
        root.rmdir()
    (tmp_path / "moved").rename(root)
    with store.stage() as staged:
        staged.write(b"weights")
        assert store.exists(staged.commit())
    assert not (root / MARKER).exists()
    store.close()
