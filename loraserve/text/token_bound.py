"""Lower bound on a text's number of tokens, proven from its bytes.

A text that can't fit a context is never tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SPACE_MARK = "▁"
_ASCII_KEEPERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Prepend"})
"""Normalizers that only add characters, or change only ones beyond ASCII and the one before
them.
"""
_KEEPING_BEHAVIORS = frozenset({"Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext"})
"""Behaviors of a split that keep what it splits at: the others remove it."""


def _byte_level_alphabet() -> dict[str, int]:
    """Build the table from a byte-level vocabulary's characters to the bytes that they stand for.

    The characters are printable; this is GPT-2's table, inverted.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(sorted(set(range(256)) - set(printable))):
        alphabet[chr(256 + offset)] = byte
    return alphabet


BYTE_OF_CHAR = _byte_level_alphabet()


class TokenBound:
    """A lower bound on the number of tokens of any text.

    It is for tokenizers of which it is proven; 0 for the others. Each byte value has a weight: one
    over the length of the longest token that holds it. So the bytes of any token weigh 1 together
    at most, and a text has at least as many tokens as its bytes weigh. This needs that every byte
    of a text ends in some token, as itself. It holds for

    - byte-level BPE (GPT-2, Llama 3, Qwen): each byte is in the vocabulary, and nothing before the
      model drops any;
    - BPE with byte fallback (Llama 2, Mistral, Gemma), for ASCII: spaces become marks, and what
      isn't in the vocabulary becomes one token a byte.

    Where characters are normalized (NFC, NFKC …), ASCII before another ASCII character stays as it
    is, and only that is weighed. Where an added token eats the spaces around it, spaces weigh
    nothing. Lower-casing, stripping, splits that remove, unigram and word-piece models have no
    bound.

    Args:
        definition: the object of ``tokenizer.json``.
    """

    def __init__(self, definition: Mapping[str, Any]) -> None:
        self._is_normalized = definition.get("normalizer") is not None
        self._weights = _weights(definition)
        self.is_proven = self._weights is not None

    def least_tokens(self, text: str) -> int:
        """Compute the least number of tokens of `text`, without those put around it.

        0 where nothing is known.
        """
        if self._weights is None or not text:
            return 0
        import numpy as np

        data = np.frombuffer(text.encode(), np.uint8)
        if self._is_normalized:
            is_ascii = data < 128
            # the last character has none behind it that could join it
            data = data[is_ascii & np.append(is_ascii[1:], True)]
        # sums of a few thousand halves and thirds: the slack is far above what rounding makes of
        # them
        return int(np.bincount(data, minlength=256) @ self._weights * (1 - 1e-9))


def _weights(definition: Mapping[str, Any]) -> npt.NDArray[np.float64] | None:
    """Compute the 256 weights; None: nothing is proven of this tokenizer."""
    model = definition.get("model") or {}
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    normalizers, splits = (
        _parts(definition.get("normalizer"), "normalizers"),
        _parts(definition.get("pre_tokenizer"), "pretokenizers"),
    )
    added = definition.get("added_tokens") or []
    if not _keeps_text(definition.get("post_processor")):
        return None
    if normalizers and any(token.get("normalized") and not token["content"].isascii() for token in added):
        # it is looked for in its normalized form, which may hold other ASCII
        return None
    if [part.get("type") for part in splits].count("ByteLevel") == 1:
        tokens = _byte_level_tokens(vocabulary, normalizers, splits)
        first_weightless = 256
    else:
        tokens = _fallback_tokens(model, vocabulary, normalizers, splits)
        first_weightless = 128
    if tokens is None:
        return None
    tokens += [token["content"].encode() for token in added]
    # processes that render templates load this module, and no tokenizer
    import numpy as np

    weights = np.ones(256)
    # the longest first: most bytes are done after a few thousand of them
    unseen = set(range(256))
    for token in sorted(tokens, key=len, reverse=True):
        if found := unseen.intersection(token):
            weights[list(found)] = 1.0 / len(token)
            unseen -= found
            if not unseen:
                break
    weights[first_weightless:] = 0.0
    if normalizers:
        weights[128:] = 0.0
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        weights[[byte for byte in range(128) if chr(byte).isspace()]] = 0.0
        weights[128:] = 0.0
    return weights


def _byte_level_tokens(
    vocabulary: Mapping[str, int], normalizers: list[Mapping[str, Any]], splits: list[Mapping[str, Any]]
) -> list[bytes] | None:
    if not all(part.get("type") in _ASCII_KEEPERS for part in normalizers):
        return None
    if not all(part.get("type") == "ByteLevel" or _keeps_everything(part) for part in splits):
        return None
    if not all(char in vocabulary for char in BYTE_OF_CHAR):
        return None
    # What isn't spelled in the alphabet can't come of the model: its input is.
    return [
        bytes(BYTE_OF_CHAR[char] for char in token)
        for token in vocabulary
        if all(char in BYTE_OF_CHAR for char in token)
    ]


def _fallback_tokens(
    model: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    normalizers: list[Mapping[str, Any]],
    splits: list[Mapping[str, Any]],
) -> list[bytes] | None:
    if not model.get("byte_fallback") or not all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return None
    if not all(part.get("type") in _ASCII_KEEPERS or _marks_spaces(part) for part in normalizers):
        return None
    if not all(part.get("type") == "Metaspace" or _keeps_everything(part) for part in splits):
        return None
    return [token.replace(_SPACE_MARK, " ").encode() for token in vocabulary]


def _parts(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [inner for each in part.get(name, ()) for inner in _parts(each, name)]
    return [part]


def _keeps_everything(part: Mapping[str, Any]) -> bool:
    if part.get("type") == "Digits":
        return True
    return part.get("type") in ("Split", "Punctuation") and part.get("behavior") in _KEEPING_BEHAVIORS


def _keeps_text(part: Mapping[str, Any] | None) -> bool:
    """Check whether a post-processor only adds tokens."""
    for each in _parts(part, "processors"):
        kind = each.get("type")
        if kind == "TemplateProcessing":
            if not any("Sequence" in piece for piece in each.get("single", ())):
                return False
        elif kind not in ("ByteLevel", "RobertaProcessing", "BertProcessing"):
            return False
    return True


def _marks_spaces(part: Mapping[str, Any]) -> bool:
    return (
        part.get("type") == "Replace" and part.get("pattern") == {"String": " "} and part.get("content") == _SPACE_MARK
    )
