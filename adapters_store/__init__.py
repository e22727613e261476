"""Content-addressed blob stores for adapters' files."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from adapters_store.base import BlobStore, StagedBlob
from adapters_store.local import LocalStore
from adapters_store.memory import MemoryBlob, read_extra_bytes, read_memory
from loraserve.errors import ConfigError

__all__ = ["BlobStore", "LocalStore", "MemoryBlob", "StagedBlob", "open_store", "read_extra_bytes", "read_memory"]

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()=-]+(/[A-Za-z0-9!_.*'()=-]+)*")


def open_store(url: str, *, spool: Path | None = None) -> BlobStore:
    """Open the store at `url`: ``file:///var/lib/loraserve/blobs`` or ``s3://bucket/prefix``.

    Args:
        spool: folder for running uploads to a bucket; None: the system's folder for temporary
            files.

    Raises:
        ConfigError: the scheme isn't implemented, the folder or bucket can't be used, or a package
            is missing.
    """
    parts = _split(url)
    if parts.scheme == "s3":
        bucket, prefix = bucket_of(url)
        if find_spec("obstore") is None:
            raise ConfigError("A store in a bucket needs obstore.", hint='Run: pip install "loraserve[s3]"')
        # an optional package
        from adapters_store.objects import ObjectStore, open_bucket

        return ObjectStore(open_bucket(bucket, prefix), url, spool=spool)
    if parts.scheme != "file":
        raise ConfigError(
            f'The store URL has the scheme "{parts.scheme or "?"}"; expected file or s3.',
            hint="Use file:///absolute/path or s3://bucket/prefix.",
        )
    path = unquote(parts.path)
    if (
        parts.netloc not in ("", "localhost")
        or parts.query
        or parts.fragment
        or not path.startswith("/")
        or "\0" in path
    ):
        raise ConfigError(f"The store URL is {url!r}; expected file:///absolute/path.")
    return LocalStore(Path(path))


def bucket_of(url: str) -> tuple[str, str]:
    """Parse ``s3://bucket/prefix`` to bucket and prefix, which may be empty.

    Raises:
        ConfigError: the URL is invalid. The message doesn't repeat it, because it may contain
            credentials.
    """
    parts = _split(url)
    prefix = parts.path.strip("/")
    is_plain = not (parts.query or parts.fragment) and ".." not in prefix.split("/")
    if parts.scheme != "s3" or not is_plain or not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(
            "The store URL has more in it than a bucket and a prefix; expected s3://bucket/prefix.",
            hint="Credentials, region and endpoint come from the AWS_* variables.",
        )
    if prefix and not _PREFIX.fullmatch(prefix):
        raise ConfigError("The prefix of an s3:// URL should be plain words with slashes between them.")
    return parts.netloc, prefix


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConfigError(
            "The store URL can't be parsed.", hint="Use file:///absolute/path or s3://bucket/prefix."
        ) from error
