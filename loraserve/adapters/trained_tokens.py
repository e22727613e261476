"""PEFT's rule for trainable_token_indices.

It trains rows of the embedding, of the head, or of both where the base ties them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loraserve.adapters.config.peft_config import LoraSettings
from loraserve.adapters.format.tensor_names import BaseTensorNames, Contents, LinearTensors
from loraserve.adapters.ir import OUTSIDE_LAYERS, TensorView
from loraserve.adapters.problems import Problems
from loraserve.adapters.saved_modules import is_same, shape_words
from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterUnsupported
from loraserve.limits import LIMITS

_FIELD = "trainable_token_indices"


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Rows of one module. `ids` ascend, and `rows` are theirs: [len(ids), hidden_size]."""

    ids: tuple[int, ...]
    rows: TensorView


def trained_tokens(
    settings: LoraSettings, contents: Contents, names: BaseTensorNames, problems: Problems, num_extra_rows: int = 0
) -> dict[str, TokenRows]:
    """Collect the rows that the adapter has of each module.

    Add problems where file, config and base disagree.

    Args:
        num_extra_rows: rows that the adapter has beyond the base's.
    """
    meant = _resolve(settings, names, problems, num_extra_rows)
    is_tied = _is_tied(settings, meant, names, problems)
    result: dict[str, TokenRows] = {}
    for module in OUTSIDE_LAYERS:
        stored = contents.linears.get((0, module), LinearTensors())
        is_follower = is_tied and module == "lm_head"
        if module in meant and not is_follower:
            rows = _rows(module, meant[module], stored, names, problems)
            if rows is not None:
                result[module] = rows
        elif stored.token_rows is not None and not is_follower:
            problems.add(AdapterFormatError, f"The file holds trained tokens of {module}, which {_FIELD} doesn't name.")
    for (_, name), stored in contents.linears.items():
        if stored.token_rows is not None and name not in OUTSIDE_LAYERS:
            problems.add(
                AdapterUnsupported,
                f"The file holds trained rows of {name}; only rows of the embedding and the head are tokens.",
            )
    if is_tied:
        _follow(contents, names, result, settings, problems)
    return result


def _resolve(
    settings: LoraSettings, names: BaseTensorNames, problems: Problems, num_extra_rows: int
) -> dict[str, tuple[int, ...]]:
    """List the tokens that the config names for each module, in its order."""
    outside = [m for m in OUTSIDE_LAYERS if m in names.linears]
    meant: dict[str, tuple[int, ...]] = {}
    for key, ids in settings.trained_tokens.items():
        # PEFT takes every module whose name ends so
        modules = ["embed_tokens"] if key is None else [m for m in outside if names.of((0, m)).endswith(key)]
        others = [] if key is None else [p for p in names.places() if p[1] not in outside and names.of(p).endswith(key)]
        if others:
            problems.add(
                AdapterUnsupported,
                f"{_FIELD} names {shown(key)}; only rows of the embedding and of the head are served.",
            )
        elif not modules:
            problems.add(AdapterBaseMismatch, f"{_FIELD} names {shown(key)}, which this base doesn't have.")
        for module in modules:
            if module in meant:
                problems.add(AdapterFormatError, f"{_FIELD} names {module} twice.")
            meant[module] = ids
    for module, ids in meant.items():
        vocab = names.base.vocab_size
        beyond = [token_id for token_id in ids if token_id >= vocab + num_extra_rows]
        if beyond:
            problems.add(
                AdapterBaseMismatch,
                f"{_FIELD} names token {beyond[0]:,} of {module}; this base has {vocab:,} tokens (0 to "
                f"{vocab - 1:,}). At most {LIMITS.max_extra_rows:,} rows that the base lacks are served. Add fewer "
                "tokens, or use the base's unused rows without resize_token_embeddings.",
            )
        if len(set(ids)) != len(ids):
            problems.add(AdapterUnsupported, f"{_FIELD} names a token of {module} twice; name each token once.")
    return meant


def _is_tied(
    settings: LoraSettings, meant: dict[str, tuple[int, ...]], names: BaseTensorNames, problems: Problems
) -> bool:
    """Check whether PEFT lets the head follow the embedding."""
    if not names.base.is_head_tied or "embed_tokens" not in meant:
        return False
    if "lm_head" not in meant or meant["lm_head"] == meant["embed_tokens"]:
        return True
    if settings.ensure_weight_tying:
        problems.add(
            AdapterUnsupported,
            f"ensure_weight_tying is true, and {_FIELD} names different tokens for lm_head and for "
            "embed_tokens; PEFT refuses this, too.",
        )
    return False


def _rows(
    module: str, ids: tuple[int, ...], stored: LinearTensors, names: BaseTensorNames, problems: Problems
) -> TokenRows | None:
    rows = stored.token_rows
    if rows is None:
        problems.add(
            AdapterFormatError,
            f"{_FIELD} names tokens of {module}, and the file holds no trainable_tokens_delta of it.",
        )
        return None
    if stored.has_lora:
        problems.add(AdapterUnsupported, f"The file holds LoRA and trained tokens of {module}; PEFT refuses this, too.")
        return None
    if stored.weight is not None:
        problems.add(
            AdapterUnsupported, f"The file holds a weight and trained tokens of {module}; PEFT can't compute with both."
        )
        return None
    shape = (len(ids), names.base.hidden_size)
    if rows.shape != shape:
        problems.add(
            AdapterBaseMismatch if rows.shape[0] == shape[0] else AdapterFormatError,
            f"{module}'s trainable_tokens_delta is {shape_words(rows)}; {_FIELD} names {shape[0]:,} tokens, "
            f"and this base's hidden size is {shape[1]}.",
        )
        return None
    order = np.argsort(np.array(ids), kind="stable")
    if np.all(order[1:] > order[:-1]):
        return TokenRows(ids, rows)
    return TokenRows(tuple(sorted(ids)), TensorView(rows.dtype, rows.shape, rows.array[order]))


def _follow(
    contents: Contents, names: BaseTensorNames, rows: dict[str, TokenRows], settings: LoraSettings, problems: Problems
) -> None:
    """Let the head's rows be the embedding's, LoRA on it or not."""
    head = contents.linears.get((0, "lm_head"), LinearTensors())
    embedding = contents.linears.get((0, "embed_tokens"), LinearTensors())
    if head.weight is not None:
        problems.add(
            AdapterUnsupported,
            f"This base's head is tied to its embedding, whose tokens {_FIELD} names, "
            "and the file holds a weight of lm_head; PEFT can't compute "
            "with both.",
        )
    if head.magnitude is not None:
        problems.add(
            AdapterUnsupported,
            f"This base's head is tied to its embedding, whose tokens {_FIELD} names, "
            "and the file has DoRA on lm_head; this combination isn't served.",
        )
    if head.token_rows is not None and not is_same(head.token_rows, embedding.token_rows):
        problems.add(
            AdapterFormatError,
            "The file's trained tokens of lm_head aren't those of embed_tokens, to which this base ties it.",
        )
    if "embed_tokens" in rows:
        rows["lm_head"] = rows["embed_tokens"]
