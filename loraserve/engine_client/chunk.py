"""Pieces of an answer as text, and what reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from loraserve.types import FinishReason, Struct, TokenLogprobs


class Chunk(Struct, frozen=True):
    """A piece of an answer.

    Its text is final: text that may be the beginning of a stop string is held back.

    Attributes:
        prompt_logprobs: with the first chunk, if requested.
        stop_reason: the stop string or stop token id that ended the text; None for EOS and length.
        queue_s, adapter_s, prefill_s, adapter_tier, adapter_read_s: with the first chunk.
        pooled: vector of a request that pools, as float32 in little-endian order; with its only
            chunk.
        is_replayed: whether it's of an answer that was kept, and the engine made nothing.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_cached_tokens: int
    queue_s: float
    adapter_s: float
    prefill_s: float
    adapter_tier: str = ""
    adapter_read_s: float = 0.0
    pooled: bytes | None = None
    is_replayed: bool = False


class ChunkReader(Protocol):
    """Reads chunks in the turn of the event loop in which their tokens come.

    Attributes:
        is_ready: checks whether it takes a chunk now, without waiting.
    """

    is_ready: Callable[[], bool]

    def take(self, chunk: Chunk) -> None:
        """Take a chunk, while it is ready."""
        ...
