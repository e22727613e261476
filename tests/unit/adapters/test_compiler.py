"""The tensors decide and the config must agree; whatever is wrong is told at once,
in words that help.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import read_tensors
from loraserve.adapters.ir import OUTSIDE_LAYERS, AdapterIR
from loraserve.adapters.validation import check_finite
from loraserve.errors import (
    AdapterBaseMismatch,
    AdapterFormatError,
    AdapterNotFinite,
    AdapterRejected,
    AdapterUnsupported,
)
from loraserve.types import BaseSpec

QV = {(layer, module): 4 for layer in range(3) for module in ("q_proj", "v_proj")}
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def compiled(
    base: BaseSpec, save: Callable[..., bytes], make_config: Callable[..., dict[str, Any]]
) -> Callable[..., AdapterIR]:
    def run(arrays: Arrays, *, on: BaseSpec = base, **changes: Any) -> AdapterIR:
        return compile_adapter(make_config(**changes), read_tensors(bytearray(save(arrays))), on)

    return run


@pytest.fixture
def refused(compiled: Callable[..., AdapterIR]) -> Callable[..., AdapterRejected]:
    def run(arrays: Arrays, **changes: Any) -> AdapterRejected:
        with pytest.raises(AdapterRejected) as caught:
            compiled(arrays, **changes)
        return caught.value

    return run


def test_modules_are_ordered_by_layer_with_file_values(
    compiled: Callable[..., AdapterIR], make_tensors: Callable[..., Arrays], key: Callable[..., str]
) -> None:
    arrays = make_tensors(dict(reversed(QV.items())))
    ir = compiled(arrays)
    assert [(m.layer, m.module) for m in ir.modules] == list(QV)
    assert ir.target_modules == ("q_proj", "v_proj")
    assert (ir.rank, ir.layers, ir.dtype) == (4, (0, 1, 2), "F32")
    assert ir.num_bytes == sum(a.nbytes for a in arrays.values())
    for m in ir.modules:
        assert np.array_equal(m.lora_a.array, arrays[key(m.layer, m.module, "A")])
        assert np.array_equal(m.lora_b.array, arrays[key(m.layer, m.module, "B")])
        assert m.scaling == 2.0


def test_rslora_divides_by_square_root_of_rank(
    compiled: Callable[..., AdapterIR], make_tensors: Callable[..., Arrays]
) -> None:
    assert compiled(make_tensors(QV), use_rslora=True).modules[0].scaling == 8 / math.sqrt(4)


def test_patterns_set_rank_and_alpha_of_modules(
    compiled: Callable[..., AdapterIR], make_tensors: Callable[..., Arrays]
) -> None:
    ranks = QV | {(1, "q_proj"): 8, (0, "v_proj"): 2, (1, "v_proj"): 2, (2, "v_proj"): 2}
    ir = compiled(
        make_tensors(ranks),
        rank_pattern={"layers.1.self_attn.q_proj": 8, "v_proj": 2},
        alpha_pattern={"^model.layers.1.self_attn.q_proj": 32, "q_proj": 16},
    )
    got = {(m.layer, m.module): (m.rank, m.scaling) for m in ir.modules}
    assert got[0, "q_proj"] == (4, 4.0)
    assert got[1, "q_proj"] == (8, 4.0)
    assert got[1, "v_proj"] == (2, 4.0)


def test_layer_and_exclusion_fields_must_match_tensors(
    compiled: Callable[..., AdapterIR], refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays]
) -> None:
    one = make_tensors({(1, "q_proj"): 4, (1, "v_proj"): 4})
    assert len(compiled(one, layers_to_transform=[1]).modules) == 2
    assert len(compiled(one, layers_to_transform=1, layers_pattern=["layers"]).modules) == 2
    assert (
        len(compiled(make_tensors({(1, "q_proj"): 4}), layers_to_transform=1, exclude_modules=["v_proj"]).modules) == 1
    )
    error = refused(one)
    assert error.problems == (
        "The config targets q_proj in layers 0, 2, and the file holds no tensors for it.",
        "The config targets v_proj in layers 0, 2, and the file holds no tensors for it.",
    )
    assert isinstance(error, AdapterFormatError)
    assert "layer 1, which the config doesn't target" in refused(one, layers_to_transform=[0]).problems[-1]
    assert "doesn't target" in refused(one, layers_to_transform=[1], layers_pattern="h").problems[0]


def test_all_linear_means_all_seven(
    compiled: Callable[..., AdapterIR], make_tensors: Callable[..., Arrays], base: BaseSpec
) -> None:
    arrays = make_tensors({(layer, m): 4 for layer in range(3) for m in base.modules if m not in OUTSIDE_LAYERS})
    assert len(compiled(arrays, target_modules="all-linear").modules) == 21


def test_a_regex_must_match_whole_names(
    compiled: Callable[..., AdapterIR], refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays]
) -> None:
    assert len(compiled(make_tensors(QV), target_modules=r"model\..*[qv]_proj").modules) == 6
    for part in (r"layers\..*[qv]_proj", r"model\..*[qv]"):
        assert "which the config doesn't target" in refused(make_tensors(QV), target_modules=part).problems[0]


def test_wrong_hidden_size_is_named_in_error(
    refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays], make_base: Callable[..., BaseSpec]
) -> None:
    base = make_base(hidden_size=16, modules={"q_proj": (16, 16), "v_proj": (8, 16)})
    error = refused(make_tensors(QV), on=base)
    assert isinstance(error, AdapterBaseMismatch)
    assert error.problems[0] == (
        "The adapter was trained for hidden size 32 (q_proj.lora_A is 4×32 in layers 0–2); this base has 16."
    )
    assert len(error.problems) == 4


def test_unknown_layer_or_module_is_named(
    refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays]
) -> None:
    arrays = make_tensors(QV)
    arrays |= {name.replace("layers.0", "layers.7"): a for name, a in make_tensors({(0, "q_proj"): 4}).items()}
    arrays |= {name.replace("q_proj", "qkv_proj"): a for name, a in make_tensors({(0, "q_proj"): 4}).items()}
    error = refused(arrays)
    assert "The adapter has tensors in layer 7; this base has 3 layers (0 to 2)." in error.problems
    assert any("'self_attn.qkv_proj' in layer 0; this base has self_attn.q_proj" in p for p in error.problems)


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.mine.weight",
            AdapterFormatError,
            "adapter's name",
        ),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
            AdapterFormatError,
            "use_dora is false",
        ),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_embedding_A", AdapterFormatError, "for an embedding"),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
            AdapterUnsupported,
            "PEFT saves it for the head and the embedding only",
        ),
        (
            "base_model.model.model.embed_tokens.lora_A.weight",
            AdapterFormatError,
            "lora_embedding_A and lora_embedding_B",
        ),
        ("base_model.model.lm_head.lora_embedding_B", AdapterFormatError, "PEFT saves lora_A and lora_B of lm_head"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", AdapterFormatError, "lora_bias is false"),
        ("base_model.model.model.embed_tokens.lora_B.bias", AdapterFormatError, "no lora_bias"),
        (
            "base_model.model.model.layers.0.self_attn.q_norm.weight",
            AdapterUnsupported,
            "model.layers.0.self_attn.q_norm', which this server doesn't replace",
        ),
        ("base_model.model.score.weight", AdapterFormatError, "modules_to_save doesn't name"),
        ("base_model.model.model.layers.0.mlp.experts.3.w1.lora_A.weight", AdapterUnsupported, "mixture's experts"),
        ("base_model.model.model.layers.0.self_attn.k_proj.weight", AdapterFormatError, "modules_to_save doesn't name"),
        ("base_model.model.model.layers.0.self_attn.q_proj.weight", AdapterFormatError, "trains only one of the two"),
        (
            "base_model.model.model.norm.lora_A.weight",
            AdapterBaseMismatch,
            "may change lm_head, model.embed_tokens, model.layers.",
        ),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", AdapterFormatError, "doesn't begin with"),
        ("base_model.model.model.layers.00.self_attn.k_proj.lora_A.weight", AdapterBaseMismatch, "<layer>"),
        ("base_model.model.model.layers.x.self_attn.k_proj.lora_A.weight", AdapterBaseMismatch, "<layer>"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight", AdapterFormatError, "isn't"),
    ],
)
def test_tensor_unknown_to_lora_is_refused_by_name(
    name: str,
    kind: type[AdapterRejected],
    reason: str,
    refused: Callable[..., AdapterRejected],
    make_tensors: Callable[..., Arrays],
) -> None:
    error = refused(make_tensors(QV) | {name: np.ones((4, 32), np.float32)})
    assert isinstance(error, kind)
    assert len(error.problems) == 1
    assert reason in error.problems[0]


def test_a_missing_half_is_named(
    refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays], key: Callable[..., str]
) -> None:
    arrays = make_tensors(QV)
    del arrays[key(1, "q_proj", "B")]
    assert refused(arrays).problems == ("q_proj has lora_A and no lora_B in layer 1.",)


def test_disagreeing_ranks_are_refused(
    refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays], key: Callable[..., str]
) -> None:
    assert (
        refused(make_tensors(QV), r=8).problems[0]
        == "q_proj has rank 4 in layers 0–2; the config says 8 (r, rank_pattern)."
    )
    arrays = make_tensors(QV)
    arrays[key(1, "q_proj", "B")] = np.ones((32, 3), np.float32)
    assert refused(arrays).problems == (
        "q_proj.lora_A has rank 4 and q_proj.lora_B has rank 3 in layer 1; they must be equal.",
    )


def test_vector_as_factor_is_refused(
    refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays], key: Callable[..., str]
) -> None:
    assert "isn't a matrix" in refused(make_tensors(QV) | {key(0, "q_proj", "A"): np.ones(32, np.float32)}).problems[0]


def test_scaling_over_bound_is_refused(
    refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays]
) -> None:
    assert "scaling 25000" in refused(make_tensors(QV), lora_alpha=100_000).problems[0]


OUTSIDE = {(0, "lm_head"): 4, (0, "embed_tokens"): 4}


def test_head_and_embedding_are_modules_of_no_layer(
    compiled: Callable[..., AdapterIR], make_tensors: Callable[..., Arrays]
) -> None:
    ir = compiled(
        make_tensors(OUTSIDE | {(0, "embed_tokens"): 3}),
        target_modules=["lm_head", "embed_tokens"],
        rank_pattern={"model.embed_tokens": 3},
        alpha_pattern={"lm_head": 2},
    )
    assert [(m.module, m.rank, m.scaling) for m in ir.modules] == [("lm_head", 4, 0.5), ("embed_tokens", 3, 8 / 3)]
    assert ir.layers == ()


def test_head_is_targeted_by_name_alone(
    compiled: Callable[..., AdapterIR], refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays]
) -> None:
    head = make_tensors({(0, "lm_head"): 4})
    error = refused(make_tensors(QV), target_modules=["q_proj", "v_proj", "lm_head"])
    assert error.problems == ("The config targets lm_head, and the file holds no tensors for it.",)
    assert "holds tensors for lm_head, which" in refused(head | make_tensors(QV)).problems[0]
    assert "for lm_head" in refused(head, target_modules="all-linear").problems[-1]
    # PEFT takes a full name whatever layers_to_transform says, and a suffix for layers alone
    assert compiled(head, target_modules=["lm_head"], layers_to_transform=[1]).target_modules == ("lm_head",)
    embedding = make_tensors({(0, "embed_tokens"): 4})
    assert "for embed_tokens" in refused(embedding, target_modules=["embed_tokens"], layers_to_transform=1).problems[0]


def test_dora_has_a_magnitude_for_each_module(
    compiled: Callable[..., AdapterIR],
    refused: Callable[..., AdapterRejected],
    make_tensors: Callable[..., Arrays],
    key: Callable[..., str],
) -> None:
    arrays = make_tensors(QV)
    magnitudes = {
        key(layer, module, "A").replace("lora_A.weight", "lora_magnitude_vector"): np.ones(
            32 if module == "q_proj" else 16, np.float32
        )
        for layer, module in QV
    }
    ir = compiled(arrays | magnitudes, use_dora=True)
    assert [m.magnitude.shape for m in ir.modules if m.magnitude is not None] == [(32,), (16,)] * 3
    first = next(iter(magnitudes))
    error = refused({n: a for n, a in (arrays | magnitudes).items() if n != first}, use_dora=True)
    assert error.problems == ("use_dora is true, and q_proj has no lora_magnitude_vector in layer 0.",)
    error = refused(arrays | magnitudes | {first: np.ones(16, np.float32)}, use_dora=True)
    assert error.problems == ("q_proj.lora_magnitude_vector is 16 in layer 0; expected 32 numbers for this base.",)
    error = refused(arrays | magnitudes | {first + ".weight": magnitudes[first]}, use_dora=True)
    assert error.problems == ("q_proj has two magnitudes in layer 0.",)


def test_saved_embedding_must_match_base_size(
    compiled: Callable[..., AdapterIR], refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays]
) -> None:
    arrays, name = make_tensors(OUTSIDE), "base_model.model.model.embed_tokens.base_layer.weight"
    targets = {"target_modules": ["lm_head", "embed_tokens"]}
    ir = compiled(arrays | {name: np.ones((64, 32), np.float32)}, **targets)
    assert list(ir.saved_base) == ["embed_tokens"]
    error = refused(arrays | {name: np.ones((66, 32), np.float32)}, **targets)
    assert error.problems == (
        "The embedding and the head have different numbers of rows: lm_head's LoRA has 64, the base weight of "
        "embed_tokens has 66, embed_tokens's LoRA has 64. This base has 64: resize both with resize_token_embeddings. "
        'Save the adapter with modules_to_save=["embed_tokens", "lm_head"], or with '
        "save_pretrained(save_embedding_layers=True).",
    )


def test_tied_lora_update_must_agree_on_each_side(
    compiled: Callable[..., AdapterIR],
    refused: Callable[..., AdapterRejected],
    make_tensors: Callable[..., Arrays],
    make_base: Callable[..., BaseSpec],
    key: Callable[..., str],
) -> None:
    arrays = make_tensors(OUTSIDE)
    tying: dict[str, Any] = {
        "target_modules": ["model.embed_tokens"],
        "ensure_weight_tying": True,
        "on": make_base(is_head_tied=True),
    }
    assert refused(make_tensors({(0, "embed_tokens"): 4}), **tying).problems == (
        "The config targets lm_head, and the file holds no tensors for it.",
    )
    assert "aren't the embedding's, transposed" in refused(arrays, **tying).problems[0]
    arrays[key(0, "lm_head", "A")] = arrays[key(0, "embed_tokens", "B")].T.copy()
    arrays[key(0, "lm_head", "B")] = arrays[key(0, "embed_tokens", "A")].T.copy()
    assert compiled(arrays, **tying).target_modules == ("lm_head", "embed_tokens")
    # PEFT would drop the head's there
    assert "this base's head isn't tied" in refused(arrays, **{**tying, "on": make_base()}).problems[0]


def test_problems_of_all_kinds_are_reported_at_once(
    refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays]
) -> None:
    arrays = make_tensors(QV) | {"x.lora_A.weight": np.ones((1, 1), np.float32)}
    error = refused(arrays, fan_in_fan_out=True, use_qalora=True, r=0)
    assert len(error.problems) == 4
    assert isinstance(error, AdapterFormatError)


def test_a_thousand_problems_make_a_short_report(refused: Callable[..., AdapterRejected]) -> None:
    error = refused({f"stray_{i}.lora_A.weight": np.ones((1, 1), np.float32) for i in range(1000)})
    assert len(error.problems) == 65
    assert len(str(error)) < 1200


def test_mixed_dtypes_are_kept_and_summed_as_float32(
    compiled: Callable[..., AdapterIR], make_tensors: Callable[..., Arrays]
) -> None:
    arrays = make_tensors(QV)
    half = {name: a.astype(np.float16) if "q_proj" in name else a for name, a in arrays.items()}
    ir = compiled(half)
    assert ir.dtype == "F32"
    assert {m.lora_a.dtype for m in ir.modules} == {"F16", "F32"}


def test_matching_classification_head_is_kept(
    compiled: Callable[..., AdapterIR], refused: Callable[..., AdapterRejected], make_tensors: Callable[..., Arrays]
) -> None:
    def head(*shape: int, fill: float = 1.0) -> Arrays:
        return make_tensors(QV) | {"base_model.model.score.weight": np.full(shape, fill, np.float32)}

    ir = compiled(head(3, 32), modules_to_save=["classifier", "score"])
    assert ir.head is not None
    assert (ir.head.shape, ir.target_modules[-1]) == ((3, 32), "score")
    for shape, kind, reason in (
        ((3, 31), AdapterBaseMismatch, "expected a row of 32 numbers"),
        ((32,), AdapterBaseMismatch, "expected a row of 32 numbers"),
        ((129, 32), AdapterUnsupported, "at most 128"),
    ):
        error = refused(head(*shape), modules_to_save=["score"])
        assert isinstance(error, kind)
        assert reason in error.problems[0]
    with pytest.raises(AdapterNotFinite, match=r"score\.weight"):
        check_finite(compiled(head(3, 32, fill=float("nan")), modules_to_save=["score"]))
