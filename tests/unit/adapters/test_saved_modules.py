"""Weights and biases that stand in the base's place: only where the config says, of the base's
shape, and never one that PEFT would not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import read_tensors
from loraserve.adapters.ir import AdapterIR
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterRejected, AdapterUnsupported
from loraserve.types import BaseSpec

Q = {(layer, "q_proj"): 4 for layer in range(3)}
Arrays = dict[str, np.ndarray[Any, Any]]
LAYER = "base_model.model.model.layers.{}."
HEAD, EMBEDDING = "base_model.model.lm_head.", "base_model.model.model.embed_tokens."
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "norm": "model.norm"}


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def biases(name: str, size: int, layers: int = 3) -> Arrays:
    return {LAYER.format(layer) + name: ones(size) for layer in range(layers)}


@pytest.fixture
def compiled(
    make_base: Callable[..., BaseSpec],
    save: Callable[..., bytes],
    make_config: Callable[..., dict[str, Any]],
    make_tensors: Callable[..., Arrays],
) -> Callable[..., AdapterIR]:
    """Of LoRA on q_proj with more tensors beside it, on a base with biases on q_proj and k_proj."""

    def run(more: Arrays, *, is_tied: bool = False, lora: Any = Q, **changes: Any) -> AdapterIR:
        base = make_base(biased_modules=("q_proj", "k_proj"), norm_paths=NORMS, is_head_tied=is_tied)
        config = make_config(**{"target_modules": ["q_proj"], **changes})
        return compile_adapter(config, read_tensors(bytearray(save(make_tensors(lora) | more))), base)

    return run


@pytest.fixture
def refused(compiled: Callable[..., AdapterIR]) -> Callable[..., AdapterRejected]:
    def run(more: Arrays, **changes: Any) -> AdapterRejected:
        with pytest.raises(AdapterRejected) as caught:
            compiled(more, **changes)
        assert len(caught.value.problems) == 1, caught.value.problems
        return caught.value

    return run


def test_bias_belongs_to_module_however_requested(compiled: Callable[..., AdapterIR]) -> None:
    q, k = biases("self_attn.q_proj.base_layer.bias", 32), biases("self_attn.k_proj.bias", 16)
    assert [m.module for m in compiled(q, bias="lora_only").modules if m.bias is not None] == ["q_proj"] * 3
    ir = compiled(q | k, bias="all")
    assert [(m.layer, m.module, m.rank) for m in ir.modules if m.bias is not None] == [
        (layer, module, rank) for layer in range(3) for module, rank in (("q_proj", 4), ("k_proj", 0))
    ]


@pytest.mark.parametrize(
    ("more", "bias", "kind", "message"),
    [
        ({}, "lora_only", AdapterFormatError, "no bias of q_proj in layers 0–2, and the config's bias is lora_only"),
        (
            biases("self_attn.q_proj.base_layer.bias", 32),
            "none",
            AdapterFormatError,
            "a bias of q_proj in layers 0–2, and the config's bias is none",
        ),
        (
            biases("self_attn.q_proj.base_layer.bias", 32),
            "all",
            AdapterFormatError,
            "no bias of k_proj in layers 0–2, and the config's bias is all",
        ),
        (
            biases("self_attn.q_proj.base_layer.bias", 32) | biases("self_attn.k_proj.bias", 16),
            "lora_only",
            AdapterFormatError,
            "a bias of k_proj in layers 0–2, and the config's bias is lora_only",
        ),
        (
            biases("self_attn.q_proj.base_layer.bias", 31),
            "lora_only",
            AdapterBaseMismatch,
            "q_proj.base_layer.bias is 31 in layers 0–2; expected 32 for this base",
        ),
        (
            biases("self_attn.q_proj.base_layer.bias", 32) | {LAYER.format(1) + "mlp.up_proj.bias": ones(48)},
            "lora_only",
            AdapterBaseMismatch,
            "holds up_proj.bias in layer 1; in this base, up_proj has no bias",
        ),
        # PEFT reads nothing under these names
        (
            biases("self_attn.q_proj.bias", 32),
            "lora_only",
            AdapterFormatError,
            "for a module with LoRA, PEFT reads only q_proj.base_layer.bias",
        ),
        (
            biases("self_attn.q_proj.base_layer.bias", 32) | biases("self_attn.k_proj.base_layer.bias", 16),
            "all",
            AdapterFormatError,
            "for a module without LoRA, PEFT reads only k_proj.bias",
        ),
    ],
)
def test_bias_unused_by_peft_is_refused(
    more: Arrays, bias: str, kind: type[AdapterRejected], message: str, refused: Callable[..., AdapterRejected]
) -> None:
    error = refused(more, bias=bias)
    assert isinstance(error, kind)
    assert message in error.problems[0]


def test_modules_to_save_match_name_suffixes_and_contents(compiled: Callable[..., AdapterIR]) -> None:
    norms = biases("input_layernorm.weight", 32) | biases("post_attention_layernorm.weight", 32)
    norms |= {"base_model.model.model.norm.weight": ones(32)}
    ir = compiled(norms, modules_to_save=["norm"])
    assert [(n.layer, n.norm) for n in ir.norms] == [
        (0, "attention_norm"),
        (0, "mlp_norm"),
        (0, "norm"),
        *((layer, norm) for layer in (1, 2) for norm in ("attention_norm", "mlp_norm")),
    ]
    mlp = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    whole = {LAYER.format(2) + f"mlp.{module}.weight": ones(*shape) for module, shape in mlp.items()}
    ir = compiled(whole, modules_to_save=["layers.2.mlp"])
    assert [(m.layer, m.module) for m in ir.modules if m.weight is not None] == [(2, module) for module in mlp]
    # no LoRA comes to what is inside
    assert (
        len(compiled(whole, modules_to_save=["layers.2.mlp"], target_modules=r".*q_proj|.*\.2\.mlp\..*").modules) == 6
    )


@pytest.mark.parametrize(
    ("more", "modules_to_save", "message"),
    [
        ({}, ["lm_head"], "modules_to_save names lm_head, and the file holds no weight of it"),
        ({}, ["model.norm"], "modules_to_save names model.norm, and the file holds no weight of it"),
        (biases("input_layernorm.weight", 32), [], "a weight of input_layernorm in layers 0–2, which the config's"),
        (
            biases("input_layernorm.weight", 31),
            ["input_layernorm"],
            "input_layernorm.weight is 31 in layers 0–2; expected 32 numbers",
        ),
        (
            {LAYER.format(0) + "self_attn.o_proj.weight": ones(32, 31)},
            ["layers.0.self_attn.o_proj"],
            "o_proj.weight is 32×31 in layer 0; expected 32×32 for this base",
        ),
        (
            {LAYER.format(0) + "self_attn.k_proj.weight": ones(16, 32)},
            ["layers.0.self_attn.k_proj"],
            "no bias of k_proj in layer 0, and the module is in modules_to_save",
        ),
        ({LAYER.format(7) + "input_layernorm.weight": ones(32)}, [], "has tensors in layer 7; this base has 3 layers"),
        ({"base_model.model.input_layernorm.weight": ones(32)}, [], "of 'input_layernorm', which this server doesn't"),
        ({LAYER.format(0) + "model.norm.weight": ones(32)}, [], "0.model.norm', which this server doesn't replace"),
        ({HEAD + "weight": ones(64, 31)}, ["lm_head"], "lm_head.weight is 64×31; expected 64×32 for this base"),
        (
            {HEAD + "weight": ones(70, 32)},
            ["lm_head"],
            "The adapter has tokens up to 69; this base has rows for 64, and the file holds no row of embed_tokens for "
            "token 64",
        ),
        ({EMBEDDING + "weight": ones(60, 32)}, ["embed_tokens"], "Shrunk vocabularies aren't served"),
        ({HEAD + "weight": ones(64, 32)}, ["embed_tokens", "lm_head"], "names embed_tokens, and the file holds no"),
        (
            {HEAD + "weight": ones(64, 32), HEAD + "modules_to_save.weight": 2 * ones(64, 32)},
            ["lm_head"],
            "lm_head.modules_to_save.weight isn't its lm_head.weight",
        ),
        (
            {HEAD + "weight": ones(64, 32), HEAD + "original_module.weight": ones(65, 32)},
            ["lm_head"],
            "different numbers of rows: lm_head has 64, the base weight of lm_head has 65. This base has 64",
        ),
        (
            {HEAD + "weight": ones(64 + 1025, 32)},
            ["lm_head"],
            "lm_head.weight has 1,089 rows; this base has 64 tokens. The base lacks 1,025 of the rows; at most 1,024",
        ),
    ],
)
def test_weight_must_match_config_and_base(
    more: Arrays, modules_to_save: list[str], message: str, refused: Callable[..., AdapterRejected]
) -> None:
    assert message in refused(more, modules_to_save=modules_to_save).problems[0]


def test_lora_on_resized_tables_requires_rows(
    compiled: Callable[..., AdapterIR], make_tensors: Callable[..., Arrays], key: Callable[..., str]
) -> None:
    outside = make_tensors({(0, "lm_head"): 4, (0, "embed_tokens"): 4})
    outside[key(0, "lm_head", "B")] = ones(66, 4)
    outside[key(0, "embed_tokens", "A")] = ones(4, 66)
    with pytest.raises(AdapterFormatError) as caught:
        compiled(outside, target_modules=["q_proj", "lm_head", "embed_tokens"])
    assert [p.partition(" for token ")[0].rpartition(" row of ")[2] for p in caught.value.problems] == [
        "lm_head",
        "embed_tokens",
    ]


WEIGHTS = {HEAD + "weight": ones(64, 32), EMBEDDING + "weight": ones(64, 32)}
OTHER = WEIGHTS | {HEAD + "weight": 2 * ones(64, 32)}


@pytest.mark.parametrize("more", [WEIGHTS, OTHER, {HEAD + "weight": ones(64, 32)}], ids=["same", "other", "head"])
def test_unnamed_tables_replace_base_tables_as_in_peft(more: Arrays, compiled: Callable[..., AdapterIR]) -> None:
    assert sum(m.weight is not None for m in compiled(more).modules) == len(more)


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        (
            OTHER,
            {},
            "modules_to_save names neither, and the file's lm_head.weight differs from its embed_tokens.weight",
        ),
        ({HEAD + "weight": ones(64, 32)}, {}, "a weight of lm_head only, which PEFT would use for both"),
        (
            OTHER,
            {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            "ensure_weight_tying is true, and the file's lm_head.weight differs from its embed_tokens.weight",
        ),
    ],
)
def test_tied_tables_must_be_equal(
    more: Arrays, changes: dict[str, Any], message: str, refused: Callable[..., AdapterRejected]
) -> None:
    error = refused(more, is_tied=True, **changes)
    assert isinstance(error, AdapterUnsupported)
    assert message in error.problems[0]


def test_missing_tied_table_is_named(refused: Callable[..., AdapterRejected]) -> None:
    tying: dict[str, Any] = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, "is_tied": True}
    error = refused({EMBEDDING + "weight": ones(64, 32)}, **tying)
    assert error.problems == ("modules_to_save names lm_head, and the file holds no weight of it.",)


def test_single_table_of_tied_base_may_be_trained(compiled: Callable[..., AdapterIR]) -> None:
    ir = compiled({EMBEDDING + "weight": ones(64, 32)}, is_tied=True, modules_to_save=["embed_tokens"])
    assert [m.module for m in ir.modules if m.weight is not None] == ["embed_tokens"]
    ir = compiled(OTHER, is_tied=True, modules_to_save=["embed_tokens", "lm_head"])
    assert {m.module for m in ir.modules if m.weight is not None} == {"embed_tokens", "lm_head"}


def test_lora_bias_is_on_all_or_no_modules(
    compiled: Callable[..., AdapterIR], refused: Callable[..., AdapterRejected]
) -> None:
    lora_bias = biases("self_attn.q_proj.lora_B.bias", 32)
    assert all(m.lora_bias is not None for m in compiled(lora_bias, lora_bias=True).modules)
    assert "the config's lora_bias is false" in refused(lora_bias).problems[0]
    two = biases("self_attn.q_proj.lora_B.bias", 32, layers=2)
    assert refused(two, lora_bias=True).problems == ("lora_bias is true, and q_proj has no lora_B.bias in layer 2.",)
    wrong = biases("self_attn.q_proj.lora_B.bias", 31)
    assert "q_proj.lora_B.bias is 31 in layers 0–2" in refused(wrong, lora_bias=True).problems[0]
    outside = {(0, "embed_tokens"): 4}
    assert (
        "on embed_tokens; PEFT has no such"
        in refused({}, lora_bias=True, lora=outside, target_modules=["embed_tokens"]).problems[0]
    )


def test_invocation_uses_base_tokens_and_excludes_embeddings(
    compiled: Callable[..., AdapterIR], refused: Callable[..., AdapterRejected]
) -> None:
    alora = {"alora_invocation_tokens": [63, 0], "task_type": "CAUSAL_LM"}
    assert compiled({}, **alora).invocation_token_ids == (63, 0)
    error = refused({}, **{**alora, "alora_invocation_tokens": [1, 64]})
    assert error.problems == ("alora_invocation_tokens has token 64; this base has 64 tokens (0 to 63).",)
    error = refused({}, lora={(0, "embed_tokens"): 4}, target_modules=["embed_tokens"], **alora)
    assert "aLoRA acts on linears only" in error.problems[0]
