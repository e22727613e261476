"""The store in a bucket keeps what it acknowledged, gives back nothing but what was put in,
and fails cleanly.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bucket import BucketService, bucket_service

pytest.importorskip("obstore", reason="needs obstore")

from adapters_store import BlobStore, open_store
from adapters_store.base import check_digest
from adapters_store.objects import PIECE_BYTES
from loraserve import faults
from loraserve.errors import BlobCorrupt, BlobNotFound, ConfigError, StorageError, StorageFull

DATA = b"weights" * 1000
DIGEST = check_digest(hashlib.sha256(DATA).hexdigest())
PATH = f"{DIGEST[:2]}/{DIGEST[2:4]}/{DIGEST}"


@pytest.fixture(scope="module")
def service() -> Iterator[BucketService]:
    with bucket_service() as running:
        yield running


@pytest.fixture
def url(service: BucketService, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    bucket = "b" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]
    return service.make(bucket) + "/some/prefix"


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[BlobStore]:
    opened = open_store(url, spool=tmp_path / "spool")
    yield opened
    opened.close()


def put(store: BlobStore, data: bytes = DATA) -> str:
    with store.stage() as staged:
        staged.write(data)
        return staged.commit()


def object_path(url: str) -> str:
    return f"{url.removeprefix('s3://')}/{PATH}"


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 5])
def test_committed_blob_reads_back_under_digest(store: BlobStore, size: int) -> None:
    data = os.urandom(size)
    with store.stage() as staged:
        for start in range(0, size, 3_000_000):
            staged.write(data[start : start + 3_000_000])
        assert bytes(staged.read()) == data
        digest = staged.commit()
    assert digest == hashlib.sha256(data).hexdigest()
    assert bytes(store.read(digest)) == data
    assert b"".join(store.read_pieces(digest)) == data
    assert store.num_bytes(digest) == size
    assert list(store.iter_digests()) == [digest]


def test_every_store_on_bucket_sees_blob_at_once(store: BlobStore, url: str) -> None:
    other = open_store(url)
    put(store)
    assert bytes(other.read(DIGEST)) == DATA
    assert other.delete(DIGEST)
    assert not store.exists(DIGEST)
    other.close()


def test_read_result_belongs_to_caller(store: BlobStore) -> None:
    put(store)
    view = store.read(DIGEST)
    view[0] = 0
    assert bytes(store.read(DIGEST)) == DATA


def test_uncommitted_blob_leaves_no_object(store: BlobStore, tmp_path: Path) -> None:
    with store.stage() as staged:
        staged.write(DATA)
    with pytest.raises(StorageError, match="stage a new one"):
        staged.commit()
    assert list(store.iter_digests()) == []
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_damaged_object_is_never_given_out(store: BlobStore, url: str, service: BucketService) -> None:
    put(store)
    service.put(object_path(url), DATA[:-1] + b"!")
    with pytest.raises(BlobCorrupt, match="hash to"):
        store.read(DIGEST)
    with pytest.raises(BlobCorrupt, match="hash to"):
        list(store.read_pieces(DIGEST))


def test_last_piece_is_withheld_until_blob_is_verified(store: BlobStore, url: str, service: BucketService) -> None:
    data = bytearray(os.urandom(2 * PIECE_BYTES + 5))
    digest = put(store, bytes(data))
    data[-1] ^= 1
    service.put(object_path(url).replace(PATH, f"{digest[:2]}/{digest[2:4]}/{digest}"), bytes(data))
    pieces = store.read_pieces(digest)
    assert [len(next(pieces)), len(next(pieces))] == [PIECE_BYTES, PIECE_BYTES]
    with pytest.raises(BlobCorrupt):
        next(pieces)


def test_repeated_commit_repairs_damaged_object(store: BlobStore, url: str, service: BucketService) -> None:
    put(store)
    service.put(object_path(url), b"damaged")
    put(store)
    assert bytes(store.read(DIGEST)) == DATA


def test_unfaithful_bytes_are_never_stored(store: BlobStore) -> None:
    for size in (100, 2 * PIECE_BYTES):
        staged = store.stage()
        staged.write(os.urandom(size))
        os.pwrite(staged._live_fd(), b"other", 10)  # type: ignore[attr-defined]
        with pytest.raises(StorageError, match="differ from the bytes that were written"):
            staged.commit()
    assert list(store.iter_digests()) == []


def test_full_disk_is_reported_and_leaves_no_file(store: BlobStore) -> None:
    staged = store.stage()
    with faults.arm("blob.write", "ENOSPC"), pytest.raises(StorageFull):
        staged.write(DATA)
    with pytest.raises(StorageError, match="stage a new one"):
        staged.commit()


def test_an_absent_blob_is_not_found(store: BlobStore) -> None:
    for call in (store.read, store.num_bytes, lambda digest: list(store.read_pieces(digest))):
        with pytest.raises(BlobNotFound):
            call(DIGEST)
    assert not store.exists(DIGEST)
    assert not store.delete(DIGEST)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", DIGEST.upper(), DIGEST[:-1], DIGEST + "0"])
def test_only_digests_become_keys(store: BlobStore, digest: str) -> None:
    for call in (store.read, store.exists, store.delete):
        if call == store.exists:
            assert not call(digest)
        else:
            with pytest.raises(BlobNotFound):
                call(digest)


def test_unavailable_service_is_no_missing_blob(
    store: BlobStore, service: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    away = open_store("s3://elsewhere/prefix")
    with pytest.raises(StorageError) as caught:
        away.read(DIGEST)
    assert not isinstance(caught.value, BlobNotFound | BlobCorrupt)
    away.close()


def test_vanished_bucket_is_no_missing_blob(store: BlobStore, url: str, service: BucketService) -> None:
    service.client.delete_bucket(Bucket=url.removeprefix("s3://").partition("/")[0])
    with pytest.raises(StorageError) as caught:
        store.read(DIGEST)
    assert not isinstance(caught.value, BlobNotFound | BlobCorrupt)


def test_missing_bucket_refuses_start(url: str) -> None:
    with pytest.raises(ConfigError, match="doesn't exist"):
        open_store("s3://no-such-bucket")


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://KEY:SECRET@bucket/prefix",
        "s3://bucket/prefix?region=x",
        "s3://bucket/a/../b",
        "s3://Bucket",
        "s3://bucket:99/x",
        "gs://bucket",
    ],
)
def test_url_without_bucket_is_refused_without_repeating_url(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "SECRET" not in str(caught.value)


def test_discarding_waits_for_the_write_under_way(store: BlobStore) -> None:
    staged = store.stage()
    writing, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        writing.set()
        may_end.wait(10)

    with faults.arm("blob.write", wait), ThreadPoolExecutor(2) as threads:
        written = threads.submit(staged.write, DATA)
        assert writing.wait(10)
        discarded = threads.submit(staged.discard)
        with pytest.raises(TimeoutError):
            discarded.result(0.1)
        may_end.set()
        written.result(10)
        discarded.result(10)
    with pytest.raises(StorageError, match="stage a new one"):
        staged.write(DATA)


def test_truncated_staged_file_is_never_stored(store: BlobStore) -> None:
    data = os.urandom(PIECE_BYTES + 100)
    staged = store.stage()
    staged.write(data)
    os.ftruncate(staged._live_fd(), PIECE_BYTES + 50)  # type: ignore[attr-defined]
    with pytest.raises(StorageError):
        staged.commit()
    assert not store.exists(hashlib.sha256(data).hexdigest())
