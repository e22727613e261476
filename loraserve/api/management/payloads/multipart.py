"""Read an upload from the socket to a staged file.

It is hashed and bounded on the way, never held whole.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from loraserve.errors import InvalidRequest, PayloadTooLarge
from loraserve.limits import LIMITS, MIB

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

    from adapters_store import MemoryBlob, StagedBlob
    from loraserve.background import Throttle

CONFIG, WEIGHTS = "config", "weights"
_EXPECTED = f"Send multipart/form-data with the two parts {CONFIG} and {WEIGHTS}."
_FLUSH_BYTES = 1 * MIB
_MAX_BOUNDARY_BYTES = 70


def multipart_boundary(request: Request) -> bytes:
    """Return the boundary in the request's content type.

    Raises:
        InvalidRequest: the body isn't multipart/form-data.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= _MAX_BOUNDARY_BYTES:
        raise InvalidRequest(
            "The body isn't multipart/form-data with a boundary.", param="Content-Type", hint=_EXPECTED
        )
    return boundary


async def read_upload(request: Request, boundary: bytes, weights: StagedBlob | MemoryBlob, throttle: Throttle) -> bytes:
    """Return the part `CONFIG`, after writing the part `WEIGHTS` to `weights`, piece by piece.

    Parts may come in any order; file names are ignored.

    Raises:
        InvalidRequest: a part is missing, unknown, there twice, encoded, or the body ends early.
        PayloadTooLarge: a part is over its bound; the rest isn't read.
        StorageError: `weights` can't be written.
    """
    parts = _Parts()
    parser = MultipartParser(boundary, callbacks=parts.callbacks())
    try:
        async for chunk in request.stream():
            parser.write(chunk)
            if len(parts.weights) >= _FLUSH_BYTES:
                await throttle.run(partial(weights.write, parts.take_weights()))
    except FormParserError as error:
        raise InvalidRequest("The body isn't well-formed multipart/form-data.", hint=_EXPECTED) from error
    except ClientDisconnect:
        # No client reads the answer, and it isn't a failure of the server's.
        raise InvalidRequest("The client disconnected before the end of the body.") from None
    if not parts.is_complete:
        raise InvalidRequest("The body ends before its closing boundary.", hint="Upload it again.")
    for name in (CONFIG, WEIGHTS):
        if name not in parts.seen:
            raise InvalidRequest(f'The part "{name}" is missing.', param=name, hint=_EXPECTED)
    await throttle.run(partial(weights.write, parts.take_weights()))
    return bytes(parts.config)


class _Parts:
    """Parts found so far by the parser, which calls back with pieces of any size."""

    def __init__(self) -> None:
        self.config = bytearray()
        self.weights = bytearray()
        self.seen: set[str] = set()
        self.is_complete = False
        self._part = ""
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._num_weights_bytes = 0

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._name_part,
            "on_part_data": self._add_data,
            "on_end": self._end,
        }

    def take_weights(self) -> bytearray:
        taken, self.weights = self.weights, bytearray()
        return taken

    def _begin_part(self) -> None:
        self._part = ""
        self._headers = {}

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _name_part(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"")
        if kind != b"form-data" or name not in (CONFIG.encode(), WEIGHTS.encode()):
            raise InvalidRequest("The body has an unknown part.", hint=_EXPECTED)
        self._part = name.decode()
        if self._part in self.seen:
            raise InvalidRequest(f'The part "{self._part}" appears twice.', param=self._part, hint=_EXPECTED)
        self.seen.add(self._part)
        encoding = self._headers.get(b"content-transfer-encoding", b"binary").strip().lower()
        if encoding not in (b"binary", b"8bit", b"7bit"):
            raise InvalidRequest(
                f'The part "{self._part}" has a Content-Transfer-Encoding; send it unencoded.', param=self._part
            )

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == CONFIG:
            if len(self.config) + end - start > LIMITS.max_adapter_config_bytes:
                raise PayloadTooLarge(
                    f'The part "{CONFIG}" exceeds the limit of {LIMITS.max_adapter_config_bytes} bytes.', param=CONFIG
                )
            self.config += data[start:end]
            return
        self._num_weights_bytes += end - start
        if self._num_weights_bytes > LIMITS.max_upload_bytes:
            raise PayloadTooLarge(
                f'The part "{WEIGHTS}" exceeds the limit of {LIMITS.max_upload_bytes} bytes.', param=WEIGHTS
            )
        # no copy on the way
        self.weights += memoryview(data)[start:end]

    def _end(self) -> None:
        self.is_complete = True
