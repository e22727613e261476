"""Compare the tokenizers of two bases: token ids of one must mean the same to the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loraserve.errors import TokenizerMismatch
from loraserve.tokenizer_identity import merges, token_ids

_PARTS = {"normalizer": "normalizer", "pre_tokenizer": "pre-tokenizer"}
"""Parts of ``tokenizer.json`` that decide, together with the tokens, how a text is cut."""


def check_same_tokenizer(base_dir: Path, draft_dir: Path) -> None:
    """Refuse a draft base whose tokenizer isn't the base's.

    Both must have the same tokens, with the same ids, and cut texts into them by the same rules.
    What is put around a text (templates, padding) may differ.

    Raises:
        TokenizerMismatch: they aren't the same, or one can't be read.
    """
    base, draft = _read(base_dir, "The base"), _read(draft_dir, "The draft base")
    try:
        mine, other = token_ids(base), token_ids(draft)
    except (AttributeError, LookupError, TypeError) as error:
        raise _mismatch(f"the tokens of one can't be read ({type(error).__name__})") from None
    if mine != other:
        raise _mismatch(_first_difference(mine, other))
    if _model(base).get("type") != _model(draft).get("type"):
        raise _mismatch(f"the base's is of type {_model(base).get('type')}, the draft's {_model(draft).get('type')}")
    if merges(base) != merges(draft):
        raise _mismatch("their merges differ")
    for part, name in _PARTS.items():
        if base.get(part) != draft.get(part):
            raise _mismatch(f"they have another {name}")


def _mismatch(difference: str) -> TokenizerMismatch:
    return TokenizerMismatch(
        f"The draft base's tokenizer isn't the base's: {difference}.",
        hint="Take a draft base of the same family, or leave --draft-model out.",
    )


def _read(directory: Path, which: str) -> dict[str, Any]:
    path = directory / "tokenizer.json"
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerMismatch(
            f"{which}'s tokenizer can't be compared: {path} can't be read ({type(error).__name__}).",
            hint="Both directories need their tokenizer.json.",
        ) from None
    if not isinstance(read, dict) or not isinstance(read.get("model"), dict):
        raise TokenizerMismatch(f"{which}'s tokenizer can't be compared: {path} holds no model.")
    return read


def _model(definition: Mapping[str, Any]) -> Mapping[str, Any]:
    model: Mapping[str, Any] = definition["model"]
    return model


def _first_difference(mine: Mapping[str, int], other: Mapping[str, int]) -> str:
    for token, token_id in sorted(mine.items(), key=lambda item: item[1]):
        if other.get(token) != token_id:
            found = f"has the id {other[token]}" if token in other else "doesn't exist"
            return f"the token {token!r} has the id {token_id} in the base's and {found} in the draft's"
    extra = min(other.keys() - mine.keys(), key=other.__getitem__)
    return f"the token {extra!r} of the draft's, with the id {other[extra]}, doesn't exist in the base's"
