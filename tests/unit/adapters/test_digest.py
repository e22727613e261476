"""An adapter's identity: the same exactly when the arithmetic is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loraserve.adapters.digest import adapter_digest
from loraserve.adapters.format.peft_format import read_tensors

PLACES = {(0, "q_proj"): 4, (0, "v_proj"): 4}


@pytest.fixture
def digest(
    make_tensors: Callable[..., Any], save: Callable[..., bytes], make_config: Callable[..., dict[str, Any]]
) -> Callable[..., str]:
    def run(tensors: Any = None, **changes: Any) -> str:
        arrays = make_tensors(PLACES) if tensors is None else tensors
        return adapter_digest(make_config(**changes), read_tensors(save(arrays)))

    return run


def test_digest_is_stable(digest: Callable[..., str]) -> None:
    # this value is stored in databases: a change of it is a migration
    assert digest({"a": np.zeros((1, 2), np.float32)}, alpha_pattern={"q_proj": 2.5}) == (
        "5b667b752132166e4969a60c8a88ae138238d6632246e0387ce330ea1f15962b"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_dropout": 0.5},
        {"target_modules": ["v_proj", "q_proj"]},
        {"lora_alpha": 8.0},
        {"use_rslora": None},
        {"rank_pattern": {}},
        {"peft_version": "9.9"},
        {"trainable_token_indices": None, "alora_invocation_tokens": []},
        {"bias": "none", "modules_to_save": None, "peft_type": "LORA"},
    ],
)
def test_digest_ignores_fields_without_effect_on_answers(digest: Callable[..., str], changes: dict[str, Any]) -> None:
    assert digest(**changes) == digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 8}},
        {"rank_pattern": {"q_proj": 4}},
        {"r": 5},
        {"trainable_token_indices": [1, 2]},
        {"alora_invocation_tokens": [1, 2]},
    ],
)
def test_digest_depends_on_every_number_of_config(digest: Callable[..., str], changes: dict[str, Any]) -> None:
    assert digest(**changes) != digest()


def test_digest_depends_on_trained_tokens_and_purpose(digest: Callable[..., str]) -> None:
    changes: list[dict[str, Any]] = [
        {"trainable_token_indices": [1, 2]},
        {"trainable_token_indices": [2, 1]},
        {"trainable_token_indices": [12]},
        {"trainable_token_indices": {"lm_head": [1, 2]}},
        {"alora_invocation_tokens": [1, 2]},
        {"alora_invocation_tokens": [1]},
        {"alora_invocation_tokens": [1], "trainable_token_indices": [2]},
    ]
    assert len({digest(**change) for change in changes}) == len(changes)
    same = {"lm_head": [1], "embed_tokens": [2]}
    assert digest(trainable_token_indices=same) == digest(trainable_token_indices=dict(reversed(same.items())))


def test_the_order_of_a_pattern_counts(digest: Callable[..., str]) -> None:
    assert digest(alpha_pattern={"q_proj": 1, "v_proj": 2}) != digest(alpha_pattern={"v_proj": 2, "q_proj": 1})


def test_digest_covers_tensors_regardless_of_order(
    digest: Callable[..., str], make_tensors: Callable[..., Any]
) -> None:
    arrays = make_tensors(PLACES)
    name = next(iter(arrays))
    seen = {digest(arrays)}
    assert digest(dict(reversed(arrays.items()))) in seen
    flipped = arrays[name].copy()
    flipped.view(np.uint32)[0, 0] ^= 1
    for changed in (
        arrays | {name: flipped},
        arrays | {name: arrays[name].T.copy()},
        arrays | {name: arrays[name].view(np.float16)},
        {k.replace("layers.0", "layers.1"): v for k, v in arrays.items()},
    ):
        assert digest(changed) not in seen
        seen.add(digest(changed))


def test_trained_tokens_enter_digest_of_every_kind(digest: Callable[..., str]) -> None:
    kind = {"peft_type": "ADALORA", "init_r": 4, "target_r": 4}
    digests = {digest(**kind, trainable_token_indices=indices) for indices in (None, [1], [3])}
    assert len(digests) == 3
