"""The local store keeps what it acknowledged, gives back nothing but what was put in,
and fails cleanly.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters_store import LocalStore, open_store
from loraserve import faults
from loraserve.errors import BlobCorrupt, BlobNotFound, ConfigError, StorageError, StorageFull
from loraserve.types import Digest

DATA = b"weights" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = LocalStore(tmp_path / "store")
    yield opened
    opened.close()


def put(store: LocalStore, data: bytes = DATA) -> str:
    with store.stage() as staged:
        staged.write(data)
        return staged.commit()


def blob_path(store: LocalStore, digest: str = DIGEST) -> Path:
    return store.root / digest[:2] / digest[2:4] / digest


def staged_files(store: LocalStore) -> list[Path]:
    return list((store.root / "staging").iterdir())


def replace_content(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("size", [0, 1, 7, (1 << 20) - 1, 1 << 20, (3 << 20) + 5])
def test_committed_blob_reads_back_under_digest(store: LocalStore, size: int) -> None:
    data = os.urandom(size)
    with store.stage() as staged:
        for start in range(0, size, 700_000):
            staged.write(data[start : start + 700_000])
        assert staged.num_bytes == size
        assert bytes(staged.read()) == data
        digest = staged.commit()
    assert digest == hashlib.sha256(data).hexdigest()
    assert bytes(store.read(digest)) == data
    assert store.num_bytes(digest) == size
    assert list(store.iter_digests()) == [digest]


@pytest.mark.parametrize("size", [0, 1, (1 << 20), (2 << 20) + 5])
def test_a_blob_comes_in_pieces_too(store: LocalStore, size: int) -> None:
    data = os.urandom(size)
    assert b"".join(store.read_pieces(put(store, data))) == data


def test_last_piece_of_damaged_blob_is_withheld(store: LocalStore) -> None:
    data = bytearray(os.urandom((1 << 20) + 5))
    digest = put(store, bytes(data))
    data[0] ^= 1
    replace_content(blob_path(store, digest), bytes(data))
    pieces = store.read_pieces(digest)
    assert len(next(pieces)) == 1 << 20
    with pytest.raises(BlobCorrupt, match="hash to"):
        next(pieces)


def test_abandoned_pieces_hold_no_open_file(store: LocalStore) -> None:
    digest = put(store)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        store.read_pieces(digest)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_read_result_belongs_to_caller(store: LocalStore) -> None:
    put(store)
    view = store.read(DIGEST)
    view[0] = 0
    assert bytes(store.read(DIGEST)) == DATA


def test_blobs_are_private_read_only_files(store: LocalStore) -> None:
    put(store)
    path = blob_path(store)
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    for folder in (path.parent, path.parent.parent, store.root, store.root / "staging"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_publicly_readable_root_is_made_private(tmp_path: Path) -> None:
    root = tmp_path / "open"
    root.mkdir(mode=0o755)
    LocalStore(root).close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_uncommitted_blob_leaves_no_file(store: LocalStore) -> None:
    with store.stage() as staged:
        staged.write(DATA)
    staged.discard()
    assert staged_files(store) == []
    assert list(store.iter_digests()) == []
    with pytest.raises(StorageError, match="stage a new one"):
        staged.write(b"more")


def test_a_staged_blob_can_be_committed_only_once(store: LocalStore) -> None:
    staged = store.stage()
    staged.write(DATA)
    staged.commit()
    with pytest.raises(StorageError, match="stage a new one"):
        staged.commit()
    assert store.exists(DIGEST)


def test_same_content_twice_is_single_blob(store: LocalStore) -> None:
    assert put(store) == put(store)
    assert len(list(store.iter_digests())) == 1


def test_delete_says_whether_there_was_a_blob(store: LocalStore) -> None:
    put(store)
    assert store.delete(DIGEST)
    assert not store.delete(DIGEST)
    assert not store.exists(DIGEST)
    with pytest.raises(BlobNotFound):
        store.read(DIGEST)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "..",
        "../../etc/passwd",
        "a" * 63,
        "a" * 65,
        "A" * 64,
        "g" * 64,
        "a" * 62 + "/.",
        "a" * 63 + "\n",
        "٣" * 64,
        "\0" * 64,
    ],
)
def test_no_other_text_ever_becomes_a_path(store: LocalStore, bad: str) -> None:
    for call in (store.read, store.num_bytes, store.delete):
        with pytest.raises(BlobNotFound, match="isn't a SHA-256"):
            call(bad)
    assert not store.exists(DIGEST)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "empty"])
def test_damaged_bytes_are_never_returned(store: LocalStore, damage: str) -> None:
    put(store)
    flipped = bytearray(DATA)
    flipped[3000] ^= 1
    content = {"flipped": bytes(flipped), "truncated": DATA[:-1], "longer": DATA + b"x", "empty": b""}[damage]
    replace_content(blob_path(store), content)
    with pytest.raises(BlobCorrupt, match="is corrupt"):
        store.read(DIGEST)


def test_repeated_upload_heals_damaged_blob(store: LocalStore) -> None:
    put(store)
    replace_content(blob_path(store), b"rubbish")
    put(store)
    assert bytes(store.read(DIGEST)) == DATA


def test_links_are_never_followed(store: LocalStore, tmp_path: Path) -> None:
    put(store)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(DATA)
    path = blob_path(store)
    path.unlink()
    path.symlink_to(elsewhere)
    with pytest.raises(BlobCorrupt, match="plain folder"):
        store.read(DIGEST)
    path.unlink()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / DIGEST).write_bytes(DATA)
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path / "folder")
    with pytest.raises(BlobCorrupt, match="plain folder"):
        store.read(DIGEST)


def test_pipe_replacing_blob_neither_blocks_nor_answers(store: LocalStore) -> None:
    put(store)
    blob_path(store).unlink()
    os.mkfifo(blob_path(store))
    with pytest.raises(BlobCorrupt, match="regular file"):
        store.read(DIGEST)


def test_full_disk_is_reported_and_upload_removed(store: LocalStore) -> None:
    staged = store.stage()
    with faults.arm("blob.write", "ENOSPC"), pytest.raises(StorageFull, match="No space left"):
        staged.write(DATA)
    assert staged_files(store) == []
    put(store)
    assert bytes(store.read(DIGEST)) == DATA


@pytest.mark.parametrize(("code", "kind"), [("EIO", StorageError), ("ENOSPC", StorageFull), ("EDQUOT", StorageFull)])
@pytest.mark.parametrize("point", ["blob.fsync", "blob.folder_fsync", "blob.before_rename", "blob.after_rename"])
def test_failed_commit_leaves_no_file_and_is_final(
    store: LocalStore, point: str, code: str, kind: type[StorageError]
) -> None:
    staged = store.stage()
    staged.write(DATA)
    with faults.arm(point, code), pytest.raises(kind):
        staged.commit()
    with pytest.raises(StorageError, match="stage a new one"):
        staged.commit()
    assert staged_files(store) == []
    assert not store.exists(DIGEST)
    assert [p.name for p in store.root.iterdir()] == ["staging"]
    put(store)
    assert bytes(store.read(DIGEST)) == DATA


def test_failed_commit_never_removes_acknowledged_blob(store: LocalStore) -> None:
    put(store)
    staged = store.stage()
    staged.write(DATA)
    with faults.arm("blob.folder_fsync", "EIO"), pytest.raises(StorageError):
        staged.commit()
    assert bytes(store.read(DIGEST)) == DATA


def test_fsync_precedes_rename_and_folder_fsync_follows(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        real_fsync(fd)

    def rename(*args: object, **kwargs: object) -> None:
        calls.append("rename")
        real_rename(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    put(store)
    # the blob's folder, and the two above it, which are new
    assert calls == ["file", "rename", "folder", "folder", "folder"]
    calls.clear()
    put(store)
    assert calls == ["file", "rename", "folder"]


WRITER = """
import sys
from adapters_store import LocalStore
from pathlib import Path
store = LocalStore(Path(sys.argv[1]))
with store.stage() as staged:
    staged.write(b"weights" * 1000)
    print(staged.commit(), flush=True)
"""


@pytest.mark.parametrize(
    ("point", "is_visible"),
    [
        ("blob.write", False),
        ("blob.fsync", False),
        ("blob.after_fsync", False),
        ("blob.after_rename", True),
        ("blob.after_folder_fsync", True),
    ],
)
def test_killed_writer_leaves_no_partial_file(tmp_path: Path, point: str, is_visible: bool) -> None:
    root = tmp_path / "store"
    environment = {**os.environ, faults.VARIABLE: f"{point}=kill"}
    done = subprocess.run([sys.executable, "-c", WRITER, str(root)], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    # never acknowledged
    assert done.stdout == ""
    store = LocalStore(root)
    assert staged_files(store) == []
    assert store.exists(DIGEST) == is_visible
    assert [bytes(store.read(d)) for d in store.iter_digests()] == [DATA] * is_visible
    store.close()


def test_sweep_removes_only_files_of_dead_writers(store: LocalStore) -> None:
    living = store.stage()
    living.write(DATA)
    (store.root / "staging" / "dead").write_bytes(b"left behind")
    assert store.sweep() == 1
    assert LocalStore(store.root).sweep() == 0
    assert living.commit() == DIGEST


def test_threads_writing_same_blob_agree(store: LocalStore) -> None:
    threads = [threading.Thread(target=put, args=(store, bytes([i % 3]) * 1000)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(store.iter_digests())) == 3
    assert all(hashlib.sha256(store.read(d)).hexdigest() == d for d in store.iter_digests())


def test_foreign_files_in_the_root_are_not_blobs(store: LocalStore) -> None:
    put(store)
    (store.root / "README").write_text("hello")
    (store.root / "ab").mkdir(exist_ok=True)
    (store.root / "ab" / "cd").write_text("a file in a folder's place")
    assert list(store.iter_digests()) == [DIGEST]


@pytest.mark.parametrize(
    ("url", "reason"),
    [("gs://bucket/prefix", "expected file or s3"), ("/plain/path", "expected file or s3"), ("file://host/path", "file:///absolute"),
     ("file:relative", "file:///absolute"), ("file:///a?b=c", "file:///absolute"), ("file:///a%00b", "file:///absolute")],
)  # fmt: skip
def test_url_without_store_is_clear_error(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        open_store(url)


def test_a_file_url_names_a_folder(tmp_path: Path) -> None:
    opened = open_store(f"file://{tmp_path}/with%20space")
    assert (tmp_path / "with space").is_dir()
    opened.close()
    opened.close()


def test_file_as_root_is_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be opened"):
        LocalStore(tmp_path / "file")


@settings(max_examples=30, deadline=None)
@given(chunks=st.lists(st.binary(max_size=50), max_size=6))
def test_any_split_of_bytes_gives_same_blob(chunks: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    store = LocalStore(tmp_path_factory.mktemp("store"))
    with store.stage() as staged:
        for chunk in chunks:
            staged.write(chunk)
        assert bytes(store.read(staged.commit())) == b"".join(chunks)
    store.close()


def test_failed_upload_leaves_equal_concurrent_upload_intact(tmp_path):
    store = LocalStore(tmp_path / "blobs")
    with store.stage() as earlier:
        earlier.write(DATA)
        earlier.commit()
    store.delete(Digest(DIGEST))  # its folders stay
    first, second = store.stage(), store.stage()
    for staged in (first, second):
        staged.write(DATA)
    acknowledged: list[str] = []
    other = threading.Thread(target=lambda: acknowledged.append(second.commit()))

    def let_the_other_come_as_far_as_it_can() -> None:
        if threading.current_thread() is not other and not other.ident:
            other.start()
            other.join(0.3)

    def fail_here_only() -> None:
        if threading.current_thread() is not other:
            raise OSError(errno.EIO, "no")

    with (
        faults.arm("blob.before_rename", let_the_other_come_as_far_as_it_can),
        faults.arm("blob.folder_fsync", fail_here_only),
        pytest.raises(StorageError),
    ):
        first.commit()
    other.join(5)
    assert acknowledged == [DIGEST]
    assert bytes(store.read(DIGEST)) == DATA


def test_discarding_waits_for_the_write_under_way(store: LocalStore) -> None:
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
