"""Content-addressed bytes: what an adapter's files are kept in."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from adapters_store.base import BlobStore, StagedBlob
from adapters_store.local import LocalStore
from loraserve.errors import ConfigError

__all__ = ["BlobStore", "LocalStore", "StagedBlob", "open_store"]


def open_store(url: str) -> BlobStore:
    """The store that `url` names, ready to use: ``file:///var/lib/loraserve/blobs``.

    Raises:
        ConfigError: a scheme that isn't implemented, or a folder that can't be used.
    """
    parts = urlsplit(url)
    if parts.scheme != "file":
        raise ConfigError(
            f'The store "{parts.scheme or url}" isn\'t implemented.',
            hint="Use file:///absolute/path; object stores aren't served yet.",
        )
    path = unquote(parts.path)
    if (
        parts.netloc not in ("", "localhost")
        or parts.query
        or parts.fragment
        or not path.startswith("/")
        or "\0" in path
    ):
        raise ConfigError(f"The store's URL {url!r} isn't file:///absolute/path.")
    return LocalStore(Path(path))
