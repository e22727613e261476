"""What decides how a ``tokenizer.json`` turns texts into token ids, small enough to be sent.

An adapter knows the ids of the tokenizer that it was trained with; the server has the base's
alone. So a push sends the identity of the adapter's own, and the server compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

MAX_FILE_BYTES = 64 << 20
"""Bytes of the largest ``tokenizer.json`` that is read: the largest known have 35 MB."""
MAX_BYTES = 1024
"""Bytes of the largest identity."""
_COSMETIC = {"trim_offsets": (True, False), "use_regex": (True,)}
"""Settings of a pre-tokenizer that change no token with these values; not every version of the
library writes them.
"""


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """Hashes of the parts of a tokenizer that decide a text's tokens.

    Padding, truncation and what else is for batches isn't among them.

    Attributes:
        num_tokens: tokens, added ones included.
        tokens: of the tokens with their ids.
        merges: of the merges, in order.
        normalizer, pre_tokenizer: of the settings.
        post_processor: of the tokens that are put around a text.
    """

    num_tokens: int
    tokens: str
    merges: str
    normalizer: str
    pre_tokenizer: str
    post_processor: str

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> Self:
        """Return the identity of a tokenizer.json's object.

        Raises:
            AttributeError, LookupError, TypeError: it isn't one.
        """
        ids = token_ids(definition)
        return cls(
            num_tokens=len(ids),
            tokens=_hash(sorted(ids.items())),
            merges=_hash(merges(definition)),
            normalizer=_hash(_without_cosmetics(definition.get("normalizer"))),
            pre_tokenizer=_hash(_without_cosmetics(definition.get("pre_tokenizer"))),
            post_processor=_hash(_added_around(definition.get("post_processor"))),
        )

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the identity of the file; None where there is none that can be read.

        It may take a second: call it on a thread.
        """
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                return None
            return cls.of_file(path.read_bytes())
        except OSError:
            return None

    @classmethod
    def of_file(cls, data: bytes) -> Self | None:
        """Return the identity of a tokenizer.json's bytes; None where they are none."""
        try:
            return cls.of(json.loads(data))
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
            return None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the identity that `text` once returned; None for another text."""
        try:
            value = json.loads(text)
            given = {field.name: value[field.name] for field in fields(cls)}
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        hashes = [item for name, item in given.items() if name != "num_tokens"]
        is_one = type(given["num_tokens"]) is int and all(isinstance(item, str) for item in hashes)
        return cls(**given) if is_one else None

    def text(self) -> str:
        """Return it as JSON, of `MAX_BYTES` at most."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def difference(self, base: TokenizerIdentity) -> str | None:
        """Return how this tokenizer differs from the base's, as in "it …"; None: it doesn't."""
        if self.num_tokens != base.num_tokens:
            return f"has {self.num_tokens:,} tokens, the base's {base.num_tokens:,}"
        if self.tokens != base.tokens:
            return "gives tokens other ids"
        if self.merges != base.merges:
            return "merges tokens by other rules"
        if self.normalizer != base.normalizer or self.pre_tokenizer != base.pre_tokenizer:
            return "cuts texts by other rules (normalizer, pre-tokenizer)"
        if self.post_processor != base.post_processor:
            return "puts other tokens around a text (post-processor)"
        return None


def token_ids(definition: Mapping[str, Any]) -> dict[str, int]:
    """Return each token's id; a list of (token, score) numbers its tokens."""
    vocab = definition["model"].get("vocab") or {}
    ids = dict(vocab) if isinstance(vocab, dict) else {pair[0]: number for number, pair in enumerate(vocab)}
    for token in definition.get("added_tokens") or ():
        ids[token["content"]] = token["id"]
    return ids


def merges(definition: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the merges as pairs, whichever way they are written."""
    found = definition["model"].get("merges") or []
    return [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in found]


def _without_cosmetics(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_cosmetics(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_cosmetics(item)
        for name, item in value.items()
        if not (name in _COSMETIC and item in _COSMETIC[name])
    }


def _added_around(processor: Any) -> Any:
    """Return the parts of a post-processor that add tokens; None where none does."""
    if not isinstance(processor, dict) or processor.get("type") == "ByteLevel":
        return None
    if processor.get("type") == "Sequence":
        return [part for part in map(_added_around, processor.get("processors") or ()) if part is not None] or None
    return _without_cosmetics(processor)


def _hash(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
