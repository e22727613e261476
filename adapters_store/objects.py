"""Blobs in an S3 bucket: ``PREFIX/ab/cd/<sha256>``.

An acknowledged blob is visible at once to all servers on the bucket.

An object is put whole or not at all, so that readers never see half of it. Staged bytes wait in an
unnamed local file, which disappears with its process: the digest, and with it the key, is known
only at the end. Writing an object again replaces it by an equal one, which repairs a corrupt
object.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from adapters_store.base import MARKER, MAX_MARKER_BYTES, check_digest, corrupt, verified
from adapters_store.files import fresh_memory, storage_errors
from adapters_store.staged import StagedFile, read_back, reads_back_differently
from loraserve import faults
from loraserve.errors import BlobNotFound, ConfigError, StorageError, StorageFull
from loraserve.types import Digest

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Piece size of larger reads and writes; each piece is a request with its own time limit."""
_PUTS_AT_ONCE, _GETS_AT_ONCE, _READ_AHEAD = 2, 8, 4
_NUM_TRIES = 3
"""Attempts of a read during which the object is replaced."""
_TIMEOUTS: ClientConfig = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
_RETRIES: RetryConfig = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
_ABSENT = (NotFoundError, FileNotFoundError)
"""Errors of absent objects; obstore raises the builtin one too."""
_EMPTY = hashlib.sha256(b"").hexdigest()
_KEY = re.compile(r"([0-9a-f]{2})/([0-9a-f]{2})/(\1\2[0-9a-f]{60})")
_HINT = (
    "The bucket, its region and credentials come from the URL and the AWS_* variables "
    "(AWS_ENDPOINT_URL for other services)."
)


def open_bucket(bucket: str, prefix: str) -> S3Store:
    """Create a client of the bucket below `prefix`, configured by the AWS_* variables.

    No request is made.

    Raises:
        ConfigError: the variables are inconsistent.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    client = _TIMEOUTS
    # an explicit http:// is intended
    if endpoint.startswith("http://"):
        client = {**_TIMEOUTS, "allow_http": True}
    try:
        return S3Store(
            bucket,
            prefix=prefix or None,
            checksum_algorithm="SHA256",
            client_options=client,
            retry_config=_RETRIES,
        )
    except (BaseError, ValueError) as error:
        logger.warning("the bucket %s can't be opened: %s", bucket, error)
        raise ConfigError(f'The bucket "{bucket}" can\'t be opened with this configuration.', hint=_HINT) from error


class ObjectStore:
    """`BlobStore` in a bucket that any number of processes and machines may share.

    Args:
        bucket: client of the bucket; its prefix is the store's root.
        url: name of the store in messages.
        spool: folder for running uploads; None: the system's folder for temporary files.
    """

    def __init__(self, bucket: S3Store, url: str, *, spool: Path | None = None) -> None:
        """Probe the bucket; log it if the bucket is unreachable.

        Raises:
            ConfigError: there is no such bucket, access is denied, or `spool` can't be created.
        """
        self._bucket = bucket
        self._url = url
        self._spool = spool
        self._fetchers = ThreadPoolExecutor(_GETS_AT_ONCE, thread_name_prefix="blob-fetch")
        if spool is not None:
            try:
                spool.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"The folder {spool} for uploads can't be made: {error.strerror}.") from error
        self._probe()

    def stage(self, *, is_looked_at: bool = False) -> SpooledBlob:
        # without a name from the start where the system can: nothing to sweep after a crash
        with (
            storage_errors("A staged file can't be created"),
            tempfile.TemporaryFile(dir=self._spool, buffering=0) as file,
        ):
            return SpooledBlob(self, os.dup(file.fileno()), is_looked_at=is_looked_at)

    def read(self, digest: str) -> memoryview:
        digest = check_digest(digest)
        for _ in range(_NUM_TRIES - 1):
            try:
                return self._read(digest)
            except _Replaced:
                continue
        return self._read(digest)

    def _read(self, digest: Digest) -> memoryview:
        num_bytes, pieces = self._fetch(digest)
        view = fresh_memory(num_bytes)
        sha = hashlib.sha256()
        position = 0
        for piece in pieces:
            sha.update(piece)
            view[position : position + len(piece)] = piece
            position += len(piece)
        if sha.hexdigest() != digest:
            raise corrupt(digest, num_bytes, sha.hexdigest())
        return view

    def read_pieces(self, digest: str) -> Iterator[bytes]:
        digest = check_digest(digest)
        return verified(digest, self._fetch(digest)[1])

    def num_bytes(self, digest: str) -> int:
        digest = check_digest(digest)
        with bucket_errors(digest):
            return int(obstore.head(self._bucket, _key(digest))["size"])

    def exists(self, digest: str) -> bool:
        try:
            self.num_bytes(digest)
        except BlobNotFound:
            return False
        return True

    def delete(self, digest: str) -> bool:
        digest = check_digest(digest)
        if not self.exists(digest):
            return False
        with storage_errors(f"The blob {digest} can't be removed"):
            faults.hit("blob.delete")
        with bucket_errors(digest):
            obstore.delete(self._bucket, _key(digest))
        return True

    def iter_digests(self) -> Iterator[Digest]:
        with bucket_errors("list"):
            for batch in obstore.list(self._bucket, chunk_size=1000):
                for found in batch:
                    if match := _KEY.fullmatch(found["path"]):
                        yield Digest(match[3])

    def read_marker(self) -> bytes | None:
        return self._read_marker()[0]

    def swap_marker(self, expected: bytes | None, data: bytes) -> bool:
        found, e_tag = self._read_marker()
        if found != expected:
            return False
        with bucket_errors("marker"):
            try:
                if found is None:
                    obstore.put(self._bucket, MARKER, data, mode="create", use_multipart=False)
                elif e_tag is not None:
                    obstore.put(self._bucket, MARKER, data, mode={"e_tag": e_tag}, use_multipart=False)
                else:
                    raise NotSupportedError("no ETag")
            except (AlreadyExistsError, PreconditionError, *_ABSENT) as error:
                if "NoSuchBucket" in str(error):
                    raise
                return False
            except (NotSupportedError, BaseError) as error:
                if not (isinstance(error, NotSupportedError) or "NotImplemented" in str(error)):
                    raise
                # a service without conditional writes: the last of two at once wins, and the other
                # finds out
                logger.warning("the store %s has no conditional writes: %s", self._url, _first_line(error))
                obstore.put(self._bucket, MARKER, data, use_multipart=False)
        # the service's word isn't enough: some take a condition and don't heed it
        return self._read_marker()[0] == data[: MAX_MARKER_BYTES + 1]

    def _read_marker(self) -> tuple[bytes | None, str | None]:
        """Read the marker's bytes and its ETag."""
        try:
            with bucket_errors("marker"):
                found = obstore.get(self._bucket, MARKER)
                if found.meta["size"] > MAX_MARKER_BYTES:
                    # no marker, whatever it is: its bytes aren't fetched
                    start = obstore.get_range(self._bucket, MARKER, start=0, end=MAX_MARKER_BYTES + 1)
                    return bytes(start), found.meta["e_tag"]
                return bytes(found.bytes()), found.meta["e_tag"]
        except BlobNotFound:
            return None, None

    def sweep(self) -> int:
        # Staged files have no name. What a dead server had begun to put in parts, the bucket's own
        # lifecycle rule removes.
        return 0

    def close(self) -> None:
        """Stop fetching; no-op if called again."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    def _probe(self) -> None:
        try:
            next(iter(obstore.list(self._bucket, chunk_size=1)), None)
        except (BaseError, OSError) as error:
            is_absent = isinstance(error, _ABSENT) or "NoSuchBucket" in str(error)
            is_refused = isinstance(error, PermissionDeniedError | UnauthenticatedError)
            if is_absent or is_refused:
                reason = "doesn't exist" if is_absent else "refuses these credentials"
                raise ConfigError(f"The store {self._url} can't be opened: the bucket {reason}.", hint=_HINT) from error
            # Away for now: the base answers without it, and adapters will when it is back.
            logger.warning("the store %s doesn't answer yet: %s", self._url, _first_line(error))

    def _put(self, digest: Digest, fd: int, num_bytes: int) -> None:
        """Put the file's bytes durably as an object, and verify their hash on the way."""
        with storage_errors("The upload can't be made durable"):
            faults.hit("blob.before_put")
        with bucket_errors(digest):
            if num_bytes <= PIECE_BYTES:
                obstore.put(self._bucket, _key(digest), read_back(fd, num_bytes, digest), use_multipart=False)
            else:
                obstore.put(
                    self._bucket,
                    _key(digest),
                    _spooled_pieces(fd, num_bytes, digest),
                    chunk_size=PIECE_BYTES,
                    max_concurrency=_PUTS_AT_ONCE,
                )
        with storage_errors("The upload can't be made durable"):
            faults.hit("blob.after_put")

    def _fetch(self, digest: Digest) -> tuple[int, Iterator[bytes]]:
        """Fetch the object's size and its bytes in pieces, all of one state.

        Some pieces are fetched ahead.

        Raises:
            BlobNotFound, StorageError: raised at once for the first piece, and during iteration for
                later ones.
        """
        if digest == _EMPTY:
            # a range of nothing can't be requested
            self.num_bytes(digest)
            return 0, iter(())
        with storage_errors(f"The blob {digest} can't be read"):
            faults.hit("blob.read")
        with bucket_errors(digest):
            first = obstore.get(self._bucket, _key(digest), options={"range": (0, PIECE_BYTES)})
            num_bytes, e_tag = int(first.meta["size"]), first.meta["e_tag"]
            data = bytes(first.bytes())
        return num_bytes, self._rest(digest, data, num_bytes, e_tag)

    def _rest(self, digest: Digest, first: bytes, num_bytes: int, e_tag: str | None) -> Iterator[bytes]:
        _check_length(first, min(PIECE_BYTES, num_bytes))
        yield first
        starts = iter(range(PIECE_BYTES, num_bytes, PIECE_BYTES))
        ahead: deque[Future[bytes]] = deque()

        def fetch(start: int) -> bytes:
            end = min(start + PIECE_BYTES, num_bytes)
            with bucket_errors(digest):
                # of the same object as the first piece: one that was put meanwhile may be cut into
                # other parts
                options = {"range": (start, end), **({"if_match": e_tag} if e_tag else {})}
                data = bytes(obstore.get(self._bucket, _key(digest), options=options).bytes())  # type: ignore[arg-type]
            return _check_length(data, end - start)

        try:
            while True:
                while len(ahead) < _READ_AHEAD and (start := next(starts, None)) is not None:
                    ahead.append(self._fetchers.submit(fetch, start))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


class SpooledBlob(StagedFile):
    """`StagedBlob` in an unnamed local file, until it is put under its digest."""

    def __init__(self, store: ObjectStore, fd: int, *, is_looked_at: bool) -> None:
        super().__init__(fd, is_looked_at=is_looked_at)
        self._store = store

    def _make_durable(self, fd: int, digest: Digest) -> None:
        self._store._put(digest, fd, self.num_bytes)


class _Replaced(StorageError):
    """The object was replaced by an equal one since the read began."""


def _key(digest: Digest) -> str:
    return f"{digest[:2]}/{digest[2:4]}/{digest}"


def _check_length(data: bytes, expected: int) -> bytes:
    if len(data) != expected:
        # an error of the answer, not of the object: that would condemn it
        raise StorageError(f"The object store returned {len(data)} bytes; {expected} were requested.")
    return data


def _spooled_pieces(fd: int, num_bytes: int, digest: Digest) -> Iterator[bytes]:
    sha = hashlib.sha256()
    for start in range(0, num_bytes, PIECE_BYTES):
        with storage_errors("The upload can't be read back"):
            piece = os.pread(fd, PIECE_BYTES, start)
        sha.update(piece)
        # the last, also if it is shorter than it was: a file that was cut off must not be put
        if start + PIECE_BYTES >= num_bytes and sha.hexdigest() != digest:
            raise reads_back_differently()
        yield piece


def _first_line(error: Exception) -> str:
    """Cut the library's debug output from the error's message."""
    return str(error).partition("\n\nDebug source")[0]


@contextmanager
def bucket_errors(digest: str) -> Iterator[None]:
    """Translate the bucket's errors to ours, and log their texts.

    Those name the bucket and aren't shown to tenants.
    """
    try:
        yield
    except (BaseError, OSError) as error:
        text = _first_line(error)
        # A bucket that is away must not look like a blob that is gone: the version would be
        # quarantined.
        if isinstance(error, _ABSENT) and "NoSuchBucket" not in text:
            raise BlobNotFound(f"There is no blob {digest}.") from None
        logger.warning("the object store failed (%s): %s", digest, text)
        if "StorageFull" in text or "507 Insufficient Storage" in text:
            raise StorageFull("The object store is full.") from error
        if isinstance(error, PreconditionError):
            raise _Replaced("The object was replaced while it was being read.", hint="Try again.") from error
        raise StorageError(
            "The object store can't be reached, or it refused the request.", hint="Try again."
        ) from error


def open_object(bucket: str, prefix: str, name: str) -> tuple[int, Iterator[bytes]]:
    """Fetch the size and the bytes, in pieces, of the object `name` below the prefix.

    All are of one state of it.

    Raises:
        BlobNotFound: there is no such object.
        StorageError: the bucket can't be reached or refuses; also raised while the pieces are read.
    """
    client = open_bucket(bucket, prefix)
    with bucket_errors(name):
        found = obstore.head(client, name)
        num_bytes, e_tag = int(found["size"]), found["e_tag"]

    def pieces() -> Iterator[bytes]:
        for start in range(0, num_bytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, num_bytes)
            with bucket_errors(name):
                options = {"range": (start, end), **({"if_match": e_tag} if e_tag else {})}
                piece = bytes(obstore.get(client, name, options=options).bytes())  # type: ignore[arg-type]
            yield piece

    return num_bytes, pieces()
