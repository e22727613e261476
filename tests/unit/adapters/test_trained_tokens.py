"""trainable_token_indices: whose rows they are, in which order, and what is no such row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import read_tensors
from loraserve.adapters.ir import AdapterIR
from loraserve.errors import AdapterRejected
from loraserve.types import BaseSpec

Arrays = dict[str, np.ndarray[Any, Any]]
HEAD = "base_model.model.lm_head."
EMBEDDING = "base_model.model.model.embed_tokens."
DELTA = "token_adapter.trainable_tokens_delta"


def rows(count: int, width: int = 32, first: float = 0.0) -> np.ndarray[Any, Any]:
    return np.arange(first, first + count, dtype=np.float32)[:, None] * np.ones((1, width), np.float32)


@pytest.fixture
def compiled(
    make_base: Callable[..., BaseSpec],
    save: Callable[..., bytes],
    make_config: Callable[..., dict[str, Any]],
    make_tensors: Callable[..., Arrays],
) -> Callable[..., AdapterIR]:
    def run(more: Arrays, tokens: Any, *, is_tied: bool = False, **changes: Any) -> AdapterIR:
        targets = changes.setdefault("target_modules", ["q_proj"])
        lora = {(layer, m): 4 for layer in range(3) for m in targets if layer == 0 or m == "q_proj"}
        config = make_config(trainable_token_indices=tokens, **changes)
        return compile_adapter(
            config, read_tensors(bytearray(save(make_tensors(lora) | more))), make_base(is_head_tied=is_tied)
        )

    return run


def trained(ir: AdapterIR) -> dict[str, tuple[tuple[int, ...], list[float]]]:
    """Module → its tokens, and the first number of each row."""
    return {m.module: (m.token_ids, m.token_rows.array[:, 0].tolist()) for m in ir.modules if m.token_rows is not None}


def test_rows_are_sorted_by_token(compiled: Callable[..., AdapterIR]) -> None:
    ir = compiled({EMBEDDING + DELTA: rows(3)}, [9, 3, 7])
    assert trained(ir) == {"embed_tokens": ((3, 7, 9), [1.0, 2.0, 0.0])}
    assert [m.module for m in ir.modules if m.layer == 0] == ["q_proj", "embed_tokens"]


def test_head_follows_tied_embedding(compiled: Callable[..., AdapterIR]) -> None:
    expected = ((1, 2), [0.0, 1.0])
    embedding = {EMBEDDING + DELTA: rows(2)}
    both = {"lm_head": expected, "embed_tokens": expected}
    for tokens in ([1, 2], {"embed_tokens": [1, 2]}, {"lm_head": [1, 2], "model.embed_tokens": [1, 2]}):
        assert trained(compiled(embedding, tokens, is_tied=True)) == both
    ir = compiled(embedding, [1, 2], is_tied=True, target_modules=["q_proj", "lm_head"])
    assert next(m for m in ir.modules if m.module == "lm_head").rank == 4
    assert trained(ir) == both
    # as PEFT writes it with save_embedding_layers=True
    assert trained(compiled(embedding | {HEAD + DELTA: rows(2)}, [1, 2], is_tied=True)) == both


def test_head_and_embedding_may_train_different_tokens(compiled: Callable[..., AdapterIR]) -> None:
    more = {EMBEDDING + DELTA: rows(2), HEAD + DELTA: rows(2, first=5)}
    own = {"lm_head": ((1, 2), [6.0, 5.0]), "embed_tokens": ((1, 2), [0.0, 1.0])}
    for is_tied in (True, False):
        ir = compiled(more, {"lm_head": [2, 1], "embed_tokens": [1, 2]}, is_tied=is_tied)
        assert trained(ir) == own
    assert trained(compiled({HEAD + DELTA: rows(1)}, {"lm_head": [4]}, is_tied=True)) == {"lm_head": ((4,), [0.0])}


ONE = {EMBEDDING + DELTA: rows(2)}


@pytest.mark.parametrize(
    ("more", "tokens", "changes", "message"),
    [
        (ONE, None, {}, "trained tokens of embed_tokens, which trainable_token_indices doesn't name"),
        ({}, [1, 2], {}, "names tokens of embed_tokens, and the file holds no trainable_tokens_delta of it"),
        (ONE, {"embed_tokens": [1, 2], "lm_head": [1, 2]}, {}, "names tokens of lm_head, and the file holds no"),
        (ONE, [1, 2, 3], {}, "embed_tokens's trainable_tokens_delta is 2×32; trainable_token_indices names 3 tokens"),
        ({EMBEDDING + DELTA: rows(2, 31)}, [1, 2], {}, "is 2×31; trainable_token_indices names 2 tokens, and this"),
        (ONE, [1, 64], {}, "rows for 64, and the file holds no row of lm_head for token 64"),
        (
            ONE,
            [1, 64 + 1024],
            {},
            "names token 1,088 of embed_tokens; this base has 64 tokens (0 to 63). At most",
        ),
        (ONE, [1, 1], {}, "names a token of embed_tokens twice"),
        (ONE, {"embed_tokens": [1, 2], "model.embed_tokens": [1, 2]}, {}, "names embed_tokens twice"),
        (
            ONE | {HEAD + DELTA: rows(2)},
            {"wte": [1], "embed_tokens": [1, 2], "lm_head": [2, 1]},
            {},
            "names 'wte', which",
        ),
        (
            ONE,
            {"k_proj": [1], "embed_tokens": [1, 2]},
            {},
            "names 'k_proj'; only rows of the embedding and of the head are served",
        ),
        (
            ONE | {"base_model.model.model.layers.0.self_attn.k_proj." + DELTA: rows(2)},
            [1, 2],
            {},
            "trained rows of k_proj; only rows of the embedding and the head are tokens",
        ),
        (ONE, [1, 2], {"target_modules": ["q_proj", "embed_tokens"]}, "LoRA and trained tokens of embed_tokens"),
        (
            ONE | {EMBEDDING + "weight": np.ones((64, 32), np.float32)},
            [1, 2],
            {"modules_to_save": ["embed_tokens"]},
            "a weight and trained tokens of embed_tokens",
        ),
        (
            ONE | {HEAD + "weight": np.ones((64, 32), np.float32)},
            [1, 2],
            {"modules_to_save": ["lm_head"], "is_tied": True},
            "holds a weight of lm_head; PEFT can't compute with both",
        ),
        (
            ONE | {HEAD + DELTA: rows(2, first=1)},
            [1, 2],
            {"is_tied": True},
            "trained tokens of lm_head aren't those of embed_tokens",
        ),
        (
            ONE | {HEAD + DELTA: rows(2)},
            {"lm_head": [3, 4], "embed_tokens": [1, 2]},
            {"is_tied": True, "ensure_weight_tying": True},
            "names different tokens for lm_head and for embed_tokens; PEFT refuses this, too",
        ),
        (
            ONE | {EMBEDDING + "token_adapter.base_layer.weight": np.ones((66, 32), np.float32)},
            [1, 2],
            {},
            "rows for 64, and the file holds no row of lm_head for token 64",
        ),
    ],
)
def test_rows_ignored_by_peft_are_refused(
    more: Arrays, tokens: Any, changes: dict[str, Any], message: str, compiled: Callable[..., AdapterIR]
) -> None:
    with pytest.raises(AdapterRejected) as caught:
        compiled(more, tokens, **changes)
    assert len(caught.value.problems) == 1, caught.value.problems
    assert message in caught.value.problems[0]


def test_dora_on_tied_head_is_refused(compiled: Callable[..., AdapterIR], key: Callable[..., str]) -> None:
    magnitudes = {HEAD + "lora_magnitude_vector": np.ones(64, np.float32)}
    magnitudes |= {
        key(n, "q_proj", "A").replace("lora_A.weight", "lora_magnitude_vector"): rows(32)[:, 0] for n in range(3)
    }
    with pytest.raises(AdapterRejected, match="has DoRA on lm_head; this combination isn't served"):
        compiled(ONE | magnitudes, [1, 2], is_tied=True, use_dora=True, target_modules=["q_proj", "lm_head"])
