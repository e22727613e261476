"""Read a mask: which tokens it allows, and the likeliest of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
"""A mask: [ceil(vocab_size / 32)] uint32.

Bit ``i % 32`` of word ``i // 32`` is set where token i is allowed.
"""

_BITS = np.arange(32)
_FEW_WORDS = 256
"""Words with allowed tokens up to which these are looked up one by one: 7 to 15 µs, where the whole
vocabulary of 32,768 takes 28.
"""


def cut(words: Words, vocab_size: int) -> Words:
    """Cut a mask's words to the tokens that the logits have; clear the bits beyond.

    Args:
        words: a bit for each token of tokenizer or logits, whichever are more; written.
        vocab_size: the logits' width.
    """
    words = words[: -(-vocab_size // 32)]
    if vocab_size % 32:
        words[-1] &= np.uint32((1 << vocab_size % 32) - 1)
    return words


def has_token(words: Words, token_id: int) -> bool:
    """Check whether the mask allows a token."""
    return bool(words[token_id >> 5] >> (token_id & 31) & 1)


def without(words: Words, token_ids: list[int]) -> Words:
    """Remove some tokens from the mask; keep them where it allows no others."""
    rest = words.copy()
    for token_id in token_ids:
        rest[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    return rest if rest.any() else words


def unpacked(words: Words, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Unpack the words to [vocab_size] bool: whether each token is allowed."""
    bits = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def likeliest(words: Words, logits: npt.NDArray[np.float32]) -> int:
    """Find the likeliest of the allowed tokens; of equals the first.

    Args:
        logits: [vocab_size].
    """
    filled = words.nonzero()[0]
    if len(filled) > _FEW_WORDS:
        return int(np.where(unpacked(words, len(logits)), logits, np.float32(-np.inf)).argmax())
    bits = np.unpackbits(words[filled].view(np.uint8), bitorder="little").view(np.bool_)
    allowed = (32 * filled[:, None] + _BITS).reshape(-1)[bits]
    return int(allowed[logits[allowed].argmax()])
