"""A replica's answer to what base it serves, in bytes."""

from __future__ import annotations

import msgspec

from loraserve.types import BaseSpec

encode_base = msgspec.msgpack.Encoder().encode
decode_base = msgspec.msgpack.Decoder(BaseSpec).decode
