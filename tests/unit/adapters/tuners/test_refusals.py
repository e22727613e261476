"""What PEFT's other kinds can't be served with is refused by name, before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft.tuners.lokr.layer import factorization as peft_factorization

from loraserve.adapters.format.peft_format import PeftAdapter
from loraserve.adapters.ir import AdapterIR, TensorView
from loraserve.adapters.tuners.lokr import factorization
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterRejected, AdapterUnsupported
from loraserve.limits import LIMITS
from loraserve.types import BaseSpec

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")
]

CONFIGS: dict[str, peft.PeftConfig] = {
    "LOHA": peft.LoHaConfig(r=3, alpha=5, target_modules=["q_proj", "up_proj"]),
    "LOKR": peft.LoKrConfig(r=2, alpha=5, target_modules=["q_proj", "up_proj"]),
    "IA3": peft.IA3Config(target_modules=["q_proj", "up_proj"], feedforward_modules=[]),
    "VERA": peft.VeraConfig(r=6, target_modules=["q_proj", "up_proj"]),
    "ADALORA": peft.AdaLoraConfig(init_r=3, target_modules=["q_proj", "up_proj"], total_step=10),
}
LAYER = "base_model.model.model.layers.1."
FIRST = {
    "LOHA": "hada_w1_a",
    "LOKR": "lokr_w1",
    "IA3": "ia3_l",
    "VERA": "vera_lambda_b",
    "ADALORA": "lora_E",
}


@pytest.fixture
def saved(tmp_path: Path, save_adapter: Callable[..., PeftAdapter]) -> Callable[[str], PeftAdapter]:
    return lambda kind: save_adapter(tmp_path, CONFIGS[kind])


Compile = Callable[..., AdapterIR]


def changed(adapter: PeftAdapter, **tensors: TensorView | None) -> PeftAdapter:
    """The adapter with these tensors of layer 1's q_proj in the place of its own,
    or without them.
    """
    kept = dict(adapter.tensors)
    for part, tensor in tensors.items():
        name = f"{LAYER}self_attn.q_proj.{part}"
        kept.pop(name, None)
        if tensor is not None:
            kept[name] = tensor
    return dataclasses.replace(adapter, tensors=kept)


def zeros(*shape: int) -> TensorView:
    return TensorView("F32", shape, np.zeros(shape, np.float32))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_missing_tensor_is_refused(
    kind: str, saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    with pytest.raises(AdapterFormatError) as caught:
        compile_kind(changed(saved(kind), **{FIRST[kind]: None}), make_base())
    assert any("q_proj" in problem for problem in caught.value.problems)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_tensor_of_no_use_is_refused(
    kind: str, saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    with pytest.raises(AdapterRejected, match=r"hada_t1|lora_magic"):
        compile_kind(changed(saved(kind), hada_t1=zeros(2, 2), lora_magic=zeros(2, 2)), make_base())


@pytest.mark.parametrize("kind", CONFIGS)
def test_untargeted_modules_are_refused(
    kind: str, saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    adapter = saved(kind)
    fewer = dataclasses.replace(adapter, config={**adapter.config, "target_modules": ["q_proj"]})
    with pytest.raises(AdapterFormatError, match="up_proj in layers 0–2, which the config doesn't target"):
        compile_kind(fewer, make_base())


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_target_without_tensors_is_refused(
    kind: str, saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    adapter = saved(kind)
    more = dataclasses.replace(adapter, config={**adapter.config, "target_modules": ["q_proj", "up_proj", "o_proj"]})
    with pytest.raises(AdapterFormatError, match="targets o_proj in layers 0–2, and the file holds no tensors for it"):
        compile_kind(more, make_base())


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapter_of_different_base_is_refused(
    kind: str, saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    with pytest.raises(AdapterBaseMismatch):
        compile_kind(saved(kind), make_base(modules=dict(make_base().modules) | {"up_proj": (80, 32)}))
    with pytest.raises(AdapterBaseMismatch, match="in layer 2; this base has 2 layers"):
        compile_kind(saved(kind), make_base(num_layers=2))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("LOHA", {"modules_to_save": ["lm_head"]}),
        ("VERA", {"bias": "vera_only"}),
        ("LOHA", {"r": 4}),
        ("LOHA", {"rank_pattern": {"q_proj": 2}}),
        ("LOKR", {"r": 3}),
        ("LOKR", {"decompose_factor": 2}),
        ("LOKR", {"decompose_both": True}),
        ("VERA", {"r": 7}),
        ("ADALORA", {"init_r": 4}),
        ("ADALORA", {"rank_pattern": {"model.layers.1.self_attn.q_proj.lora_E": [True, False, True]}}),
    ],
    ids=str,
)
def test_config_contradicting_tensors_is_refused(
    kind: str,
    fields: dict[str, Any],
    saved: Callable[..., Any],
    compile_kind: Compile,
    make_base: Callable[..., BaseSpec],
) -> None:
    adapter = saved(kind)
    base = make_base(biased_modules=("q_proj", "up_proj"))
    with pytest.raises(AdapterRejected):
        compile_kind(dataclasses.replace(adapter, config={**adapter.config, **fields}), base)


@pytest.mark.parametrize(
    ("kind", "bad", "said"),
    [
        ("LOHA", {"r": "many"}, "r is 'many'"),
        ("LOHA", {"alpha": None}, "alpha is None"),
        ("LOHA", {"alpha": 1e9}, "alpha is 1000000000.0"),
        ("LOKR", {"decompose_factor": 2.5}, "decompose_factor isn't a whole number"),
        ("LOKR", {"decompose_both": "yes"}, "decompose_both isn't true or false"),
        ("IA3", {"feedforward_modules": 3}, "feedforward_modules is 3"),
        ("ADALORA", {"init_r": 0}, "init_r is 0"),
        ("ADALORA", {"lora_alpha": "high"}, "lora_alpha is 'high'"),
        (
            "ADALORA",
            {"rank_pattern": {"model.layers.0.self_attn.q_proj.lora_E": 3}},
            "expected a list of true and false",
        ),
    ],
    ids=str,
)
def test_a_malformed_field_is_refused_by_name(
    kind: str,
    bad: dict[str, Any],
    said: str,
    saved: Callable[..., Any],
    compile_kind: Compile,
    make_base: Callable[..., BaseSpec],
) -> None:
    adapter = saved(kind)
    with pytest.raises(AdapterFormatError) as caught:
        compile_kind(dataclasses.replace(adapter, config={**adapter.config, **bad}), make_base())
    assert any(said in problem for problem in caught.value.problems)


def test_every_problem_is_told_at_once(
    saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    adapter = changed(saved("LOHA"), hada_w1_a=None, hada_w2_b=zeros(3, 31))
    config = {**adapter.config, "alpha": "x", "tomorrow": 1, "target_modules": ["q_proj", "k_proj"]}
    with pytest.raises(AdapterFormatError) as caught:
        compile_kind(dataclasses.replace(adapter, config=config), make_base())
    for said in ("alpha is", "tomorrow", "no hada_w1_a in layer 1"):
        assert any(said in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("LOHA", r"rank 9 in layers 0–2 \(r² for r = 3\)"), ("LOKR", "4 of w1 times 2 of w2"), ("VERA", "rank 6")],
)
def test_rank_over_limit_is_refused_with_rank(
    kind: str, said: str, saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    with pytest.raises(AdapterUnsupported, match=said):
        compile_kind(saved(kind), make_base(), dataclasses.replace(LIMITS, max_rank=5))


@pytest.mark.parametrize("kind", ["LOHA", "LOKR", "VERA"])
def test_factors_over_limit_are_refused_before_allocation(
    kind: str,
    saved: Callable[..., Any],
    compile_kind: Compile,
    make_base: Callable[..., BaseSpec],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter, base = saved(kind), make_base()
    needed = sum(4 * m.rank * sum(base.modules[m.module]) for m in compile_kind(adapter, base).modules)
    assert compile_kind(adapter, base, dataclasses.replace(LIMITS, max_factors_bytes=needed))
    with pytest.raises(AdapterUnsupported, match=f"would take {needed:,} bytes as LoRA"):
        compile_kind(adapter, base, dataclasses.replace(LIMITS, max_factors_bytes=needed - 1))
    # a module that no room is left for isn't computed
    made: list[int] = []

    def as_view(array: np.ndarray[Any, Any]) -> TensorView:
        made.append(array.nbytes)
        return zeros(1, 1)

    monkeypatch.setattr("loraserve.adapters.tuners.compilation.as_view", as_view)
    with pytest.raises(AdapterUnsupported):
        compile_kind(adapter, base, dataclasses.replace(LIMITS, max_factors_bytes=needed // 2))
    assert sum(made) <= needed // 2


def test_vera_without_projections_is_refused_with_hint(
    tmp_path: Path, save_adapter: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    adapter = save_adapter(tmp_path, peft.VeraConfig(r=6, target_modules=["q_proj"], save_projection=False))
    with pytest.raises(
        AdapterUnsupported, match=r"save_projection is false: .* Save the adapter with save_projection=True"
    ):
        compile_kind(adapter, make_base())
    with pytest.raises(AdapterUnsupported, match=r"the file has no base_model\.vera_A and base_model\.vera_B"):
        compile_kind(dataclasses.replace(adapter, config={**adapter.config, "save_projection": True}), make_base())


def test_vera_projections_unread_by_peft_are_refused(
    saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    adapter = saved("VERA")
    with pytest.raises(AdapterUnsupported, match="save_projection is false"):
        compile_kind(dataclasses.replace(adapter, config={**adapter.config, "save_projection": False}), make_base())


def test_factor_stored_whole_and_as_product_is_refused(
    saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    both = changed(saved("LOKR"), lokr_w1_a=zeros(4, 2), lokr_w1_b=zeros(2, 4))
    with pytest.raises(AdapterFormatError, match=r"q_proj has lokr_w1_a, lokr_w1_b in layer 1; .* it has lokr_w1 on"):
        compile_kind(both, make_base())


def test_vera_projections_of_different_size_are_refused(
    saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    adapter = saved("VERA")
    tensors = {**adapter.tensors, "base_model.vera_A": zeros(6, 33)}
    with pytest.raises(AdapterBaseMismatch, match=r"vera_A and vera_B are 6×33 and 48×6; .* expected 6×32 and 48×6"):
        compile_kind(dataclasses.replace(adapter, tensors=tensors), make_base())


def test_adapter_without_remaining_rank_is_refused(
    saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    adapter = saved("ADALORA")
    names = {name.rpartition(".")[0] for name in adapter.tensors}
    tensors: dict[str, TensorView] = {}
    for name in names:
        tensors |= {f"{name}.lora_A": zeros(0, 32), f"{name}.lora_E": zeros(0, 1)}
        tensors[f"{name}.lora_B"] = zeros(48 if "up_proj" in name else 32, 0)
    pattern = {f"{name.removeprefix('base_model.model.')}.lora_E": [False] * 3 for name in names}
    empty = dataclasses.replace(adapter, config={**adapter.config, "rank_pattern": pattern}, tensors=tensors)
    with pytest.raises(AdapterFormatError, match="Every module has rank 0 after training"):
        compile_kind(empty, make_base())


def test_module_without_rank_takes_bounded_memory(
    saved: Callable[..., Any], compile_kind: Compile, make_base: Callable[..., BaseSpec]
) -> None:
    # no byte of the file holds it: only its shape says how wide it is
    wide = TensorView("F32", (0, 1 << 40), np.zeros((0, 1), np.float32))
    adapter = changed(saved("ADALORA"), lora_A=wide, lora_E=zeros(0, 1), lora_B=zeros(32, 0))
    with pytest.raises(AdapterFormatError, match="takes more than 1,073,741,824 bytes as LoRA"):
        compile_kind(adapter, make_base())


@pytest.mark.parametrize("factor", [-1, -7, 0, 1, 4, 5, 8, 10_000])
def test_sides_are_split_as_in_peft(factor: int) -> None:
    for size in (1, 2, 7, 12, 36, 97, 128, 896, 1000, 4864):
        assert factorization(size, factor) == peft_factorization(size, factor), size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_factors_are_computed_in_float32(
    dtype: torch.dtype,
    tmp_path: Path,
    save_adapter: Callable[..., Any],
    load_adapter: Callable[..., Any],
    compile_kind: Compile,
    make_base: Callable[..., BaseSpec],
    delta: Callable[..., torch.Tensor],
) -> None:
    adapter = save_adapter(tmp_path, CONFIGS["LOHA"], dtype)
    ir = compile_kind(adapter, make_base())
    assert ir.dtype == "F32"
    layer = load_adapter(tmp_path)["model.layers.0.self_attn.q_proj"]
    update = layer.get_delta_weight("default").detach()
    torch.testing.assert_close(delta(ir.modules[0]), update, rtol=1e-5, atol=1e-6 * float(update.abs().max()))
