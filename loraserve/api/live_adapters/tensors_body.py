"""JSON body with an adapter's weights in base64: the weights are decoded as they arrive.

So a body of any size occupies little memory, and no long string holds up the event loop.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import AsyncIterator, Awaitable, Callable

from loraserve.errors import InvalidRequest, PayloadTooLarge
from loraserve.limits import LIMITS, MIB

FIELDS = ("serialized_named_tensors", "serialized_tensors")
"""Names of the weights: SGLang's present one, and the earlier one."""
# A quote inside a string has a backslash before it. White space is possessive: what a client sends
# much of would otherwise be tried from every place.
_START = re.compile(rb'(?<!\\)"(?:' + "|".join(FIELDS).encode() + rb')"\s*+:\s*+(?:\[\s*+)?"')
_OVERLAP_BYTES = 256
_FLUSH_BYTES = 1 * MIB
_FIRST_BYTES = 9


class TensorsBody:
    """Separates the first string of `FIELDS` from the rest of a JSON text.

    The text that is left has an empty string in its place.
    """

    def __init__(self) -> None:
        self.text = bytearray()
        """The text without the weights."""
        self._has_begun = False
        self._has_ended = False
        self._carry = b""
        self._is_padded = False
        self._num_bytes = 0
        self._first = b""

    @property
    def has_tensors(self) -> bool:
        """Whether the whole string has been there."""
        return self._has_ended

    def feed(self, piece: bytes) -> bytes:
        """Take the next piece of the body, and return the decoded weights in it.

        Raises:
            InvalidRequest: they aren't base64, or aren't safetensors.
            PayloadTooLarge: the text or the weights exceed their limit.
        """
        if self._has_begun and not self._has_ended:
            return self._take_tensors(piece)
        seen = max(0, len(self.text) - _OVERLAP_BYTES)
        self.text += piece
        found = None if self._has_begun else _START.search(self.text, seen)
        data = b""
        if found is not None:
            self._has_begun = True
            rest = bytes(self.text[found.end() :])
            del self.text[found.end() :]
            data = self._take_tensors(rest)
        if len(self.text) > LIMITS.max_body_bytes:
            raise PayloadTooLarge(f"The body without its tensors exceeds the limit of {LIMITS.max_body_bytes} bytes.")
        return data

    def _take_tensors(self, piece: bytes) -> bytes:
        end = piece.find(b'"')
        if end < 0:
            return self._decode(piece)
        data = self._decode(piece[:end])
        if self._carry:
            raise _no_base64()
        self._has_ended = True
        self.text += piece[end:]
        return data

    def _decode(self, piece: bytes) -> bytes:
        piece = self._carry + piece
        whole = len(piece) - len(piece) % 4
        self._carry = piece[whole:]
        if not piece:
            return b""
        if self._is_padded:
            raise _no_base64()
        try:
            data = binascii.a2b_base64(piece[:whole], strict_mode=True)
        except binascii.Error:
            raise _no_base64() from None
        self._is_padded = piece[:whole].endswith(b"=")
        self._num_bytes += len(data)
        if self._num_bytes > LIMITS.max_upload_bytes:
            raise PayloadTooLarge(f"The tensors exceed the limit of {LIMITS.max_upload_bytes} bytes.", param=FIELDS[0])
        if len(self._first) < _FIRST_BYTES:
            self._first += data[: _FIRST_BYTES - len(self._first)]
            refuse_pickle(self._first)
        return data


async def read_tensors(
    body: AsyncIterator[bytes], write: Callable[[bytearray], Awaitable[object]]
) -> tuple[bytes, bool]:
    """Give the weights in the body to `write`, and return the rest, and whether weights came.

    Raises:
        InvalidRequest, PayloadTooLarge: as `TensorsBody.feed`.
    """
    tensors, waiting = TensorsBody(), bytearray()
    async for piece in body:
        waiting += tensors.feed(piece)
        if len(waiting) >= _FLUSH_BYTES:
            await write(waiting)
            waiting = bytearray()
    if waiting:
        await write(waiting)
    return bytes(tensors.text), tensors.has_tensors


def refuse_pickle(first: bytes) -> None:
    """Refuse weights whose first bytes are a pickle's or those of torch.save's archive.

    Raises:
        InvalidRequest
    """
    # the length of a safetensors header may begin like a pickle; a brace follows it
    is_safetensors = len(first) < _FIRST_BYTES or first[8:9] == b"{"
    if is_safetensors or not first.startswith((b"\x80", b"PK\x03\x04")):
        return
    raise InvalidRequest(
        f"{FIELDS[0]} is a pickle, as SGLang's MultiprocessingSerializer and torch.save make it: "
        "this server never unpickles.",
        param=FIELDS[0],
        hint="Send base64 of safetensors.torch.save(tensors), or the bytes themselves as multipart/form-data.",
    )


def _no_base64() -> InvalidRequest:
    return InvalidRequest(f"{FIELDS[0]} isn't base64.", param=FIELDS[0])
