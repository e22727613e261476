"""Lines of a batch: those of its input, read piece by piece, and those of its results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from adapters_store.base import BlobStore
from loraserve.batches.records import BatchError, BatchLine, BatchRecord, LineAnswer
from loraserve.limits import LIMITS, MIB
from loraserve.types import Digest

_LINES_AT_ONCE = 256
_BYTES_AT_ONCE = 1 * MIB
OK_STATUS = 200
_DONE, _NOT_DONE = b"+", b"-"
"""First byte of a line in a chunk, which marks the file that it is for."""


def read_lines(store: BlobStore, blob: Digest) -> Iterator[list[BatchLine]]:
    """Yield the lines of a blob that aren't blank, some hundred at a time.

    No more than a piece of the blob and a line are in memory.

    Raises:
        BlobNotFound, BlobCorrupt, StorageError: the blob can't be read to its end.
    """
    number, num_bytes = 0, 0
    found: list[BatchLine] = []
    for data in _split(store.read_pieces(blob)):
        number += 1
        if data is not None and not data.strip():
            continue
        found.append(BatchLine(number, data))
        num_bytes += 0 if data is None else len(data)
        if len(found) >= _LINES_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
            yield found
            found, num_bytes = [], 0
    if found:
        yield found


def _split(pieces: Iterator[bytes]) -> Iterator[bytes | None]:
    """Yield each line without its end; None for one that is too long."""
    rest = bytearray()
    is_skipping = False
    for piece in pieces:
        *whole, last = piece.split(b"\n")
        for text in whole:
            is_long = is_skipping or len(rest) + len(text) > LIMITS.max_batch_line_bytes
            yield None if is_long else bytes(rest + text)
            rest.clear()
            is_skipping = False
        is_skipping = is_skipping or len(rest) + len(last) > LIMITS.max_batch_line_bytes
        if is_skipping:
            rest.clear()
        else:
            rest += last
    if rest or is_skipping:
        yield None if is_skipping else bytes(rest)


def result_line(batch: BatchRecord, number: int, custom_id: str, answer: LineAnswer) -> bytes:
    """Format the line of a chunk with a route's answer."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": None}
    head = _json({"id": result_id(batch, number), "custom_id": custom_id, "response": response, "error": None})
    # the body is JSON already, and may be long
    before, _, after = head.rpartition(b'"body": null')
    mark = _DONE if answer.status == OK_STATUS else _NOT_DONE
    return mark + before + b'"body": ' + answer.body + after + b"\n"


def undone_line(batch: BatchRecord, number: int, custom_id: str | None, error: BatchError) -> bytes:
    """Format the line of the error file for a request that wasn't computed."""
    found = {"code": error.code, "message": error.message}
    line = {"id": result_id(batch, number), "custom_id": custom_id, "response": None, "error": found}
    return _json(line) + b"\n"


def result_id(batch: BatchRecord, number: int) -> str:
    """Format the id of a line's result: the same however often it is computed."""
    return f"batch_req_{batch.id.removeprefix('batch_')}_{number}"


def read_results(store: BlobStore, chunk: Digest) -> Iterator[tuple[bool, bytes]]:
    """Yield the runs of a chunk, and whether they are for the output file.

    Raises:
        BlobNotFound, BlobCorrupt, StorageError
    """
    mark = b""
    for piece in store.read_pieces(chunk):
        for text in piece.splitlines(keepends=True):
            # a piece may end within a line
            if not mark:
                mark, text = text[:1], text[1:]
            yield mark == _DONE, text
            if text.endswith(b"\n"):
                mark = b""


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
