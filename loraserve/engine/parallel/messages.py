"""Messages between rank 0 and the other ranks of a group, which take effect in their order."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from loraserve.model.parallel.part_facts import PartFacts
from loraserve.types import KernelChoice, Struct


class Region(Struct, frozen=True):
    """Array in an adapter's memory.

    Attributes:
        dtype: torch's name of it.
        start: of its first byte.
        count: of elements.
    """

    dtype: str
    start: int
    count: int


class HoldAdapter(Struct, frozen=True, tag="hold"):
    """Map a rank's part of an adapter, and keep it under a number.

    Attributes:
        path: of the memory, by a descriptor of rank 0.
        offset, num_bytes: the rank's pages in it.
        records: the layout's, int64, as bytes; expert_records: likewise, those of experts.
        experts: (layer, expert) of each row of those.
        norms: (layer, norm, its weight).
    """

    number: int
    path: str
    offset: int
    num_bytes: int
    num_layers: int
    records: bytes
    data: Region
    floats: Region
    row_ids: Region
    norms: tuple[tuple[int, str, Region], ...]
    expert_records: bytes = b""
    experts: tuple[tuple[int, int], ...] = ()


class DropAdapter(Struct, frozen=True, tag="drop"):
    """Free an adapter's part."""

    number: int


class ComputeStep(Struct, frozen=True, tag="step"):
    """Compute a step's rows, or a micro-batch of it; every rank has the same.

    Attributes:
        token_ids, positions, slots, logits_rows: int64, as bytes; no logits_rows: all.
        block_tables: int32, as bytes, `max_blocks` for each sequence.
        adapters: (number, row_start, row_end).
        pooled: kept rows, and the places of logits and of hidden states in them; None: nothing is
            pooled.
    """

    token_ids: bytes
    positions: bytes
    slots: bytes
    query_starts: list[int]
    context_lens: list[int]
    block_tables: bytes
    max_blocks: int
    logits_rows: bytes | None
    adapters: list[tuple[int, int, int]]
    pooled: tuple[bytes, bytes, bytes] | None = None


class OpenCache(Struct, frozen=True, tag="cache"):
    """Reserve the addresses of the rank's part of the KV cache.

    Attributes:
        block_num_bytes: from one block to the next, of this part.
    """

    num_blocks: int
    block_num_bytes: int
    block_size: int


class ReleaseBlocks(Struct, frozen=True, tag="release"):
    """Return the memory of KV blocks, in runs of (first, count)."""

    runs: list[tuple[int, int]]


class Stop(Struct, frozen=True, tag="stop"):
    """End the process."""


ToRank: TypeAlias = OpenCache | HoldAdapter | DropAdapter | ComputeStep | ReleaseBlocks | Stop


class Joining(Struct, frozen=True, tag="joining"):
    """The rank has imported what it needs, and joins the group once all have."""


class PartLoaded(Struct, frozen=True, tag="part"):
    """The rank of a pipeline has read its part of the base.

    Attributes:
        kernels: that are chosen so far, for the engine after this one.
    """

    facts: PartFacts
    kernels: list[KernelChoice]


class Loaded(Struct, frozen=True, tag="loaded"):
    """The rank has its part of the base, and waits for steps."""


class Failed(Struct, frozen=True, tag="failed"):
    """The rank can't continue, and ends.

    Attributes:
        code: of the error; empty for one that isn't ours.
    """

    code: str
    message: str
    hint: str | None = None


FromRank: TypeAlias = Joining | PartLoaded | Loaded | Failed

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """Decode a message of rank 0."""
    return _to_rank.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    """Decode a message of another rank."""
    return _from_rank.decode(data)
