"""Files in other people's buckets, read once, in pieces: what an adapter is pulled from."""

from __future__ import annotations

from collections.abc import Iterator

import obstore

from adapters_store import bucket_of
from adapters_store.objects import PIECE_BYTES, bucket_errors, open_bucket


def open_object(url: str, name: str) -> tuple[int, Iterator[bytes]]:
    """The size and the bytes of the object `name` below ``s3://bucket/prefix``, all of one state of it.

    Raises:
        BlobNotFound: there is none.
        ConfigError: the URL is none.
        StorageError: the bucket can't be reached or refuses; also while the pieces are taken.
    """
    bucket = open_bucket(*bucket_of(url))
    with bucket_errors(name):
        found = obstore.head(bucket, name)
        num_bytes, e_tag = int(found["size"]), found["e_tag"]

    def pieces() -> Iterator[bytes]:
        for start in range(0, num_bytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, num_bytes)
            with bucket_errors(name):
                options = {"range": (start, end), **({"if_match": e_tag} if e_tag else {})}
                piece = bytes(obstore.get(bucket, name, options=options).bytes())  # type: ignore[arg-type]
            yield piece

    return num_bytes, pieces()
