import dataclasses
import gc
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from loraserve_kernels.cpu.lora.layout import (
    ALIGN_ELEMENTS,
    DTYPES,
    LAYER_MODULES,
    LoraModule,
    PackedAdapter,
    ReplacedNorm,
    ReplacedRows,
    pack_adapter,
    packed_num_bytes,
)
from loraserve_kernels.errors import TensorMismatch

from .conftest import NUM_LAYERS, SHAPES, make_adapter, make_modules

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
MIXED = {"q_proj": 3, "v_proj": 12, "gate_proj": 64, "down_proj": 1}


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_matrix_is_unpacked_as_packed(dtype: torch.dtype) -> None:
    modules = make_modules(MIXED)
    packed = pack_adapter(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=dtype)
    for m in modules:
        assert torch.equal(packed.lora_a(m.layer, m.module), m.lora_a.to(dtype))
        assert torch.equal(packed.lora_b(m.layer, m.module), m.lora_b.T.to(dtype))
        assert packed.scaling(m.layer, m.module).eq(m.scaling).all()


def test_lora_a_matrices_of_site_form_single_matrix() -> None:
    packed = make_adapter(MIXED)
    parts = [packed.lora_a(1, module) for module in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(packed.site_a(1, "qkv"), torch.cat(parts))
    assert packed.site_a(1, "qkv").shape == (15, 40)


def test_ranks_arent_padded() -> None:
    packed = make_adapter(MIXED)
    weights = sum(rank * sum(SHAPES[module]) for module, rank in MIXED.items()) * NUM_LAYERS
    gaps = packed.data.numel() - weights
    assert 0 <= gaps < 12 * NUM_LAYERS * ALIGN_ELEMENTS


def test_replaced_rows_take_own_width() -> None:
    rows = {"embed_tokens": 9, "down_proj": 5, "lm_head": 7}
    packed = make_adapter(dict.fromkeys(rows, 0), layers=[0], rows=rows)
    gaps = packed.data.numel() - (9 * 40 + 5 * 2100 + 7 * 40)
    assert 0 <= gaps < 3 * ALIGN_ELEMENTS


def test_gaps_are_zero() -> None:
    packed = make_adapter(MIXED)
    for layer in range(NUM_LAYERS):
        for module in MIXED:
            packed.lora_a(layer, module).zero_()
            packed.lora_b(layer, module).zero_()
    assert not packed.data.any()


def test_size_is_known_without_tensors() -> None:
    meta = [
        LoraModule(m.layer, m.module, m.lora_a.to("meta"), m.lora_b.to("meta"), m.scaling) for m in make_modules(MIXED)
    ]
    known = packed_num_bytes(meta, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.bfloat16)
    assert known == make_adapter(MIXED, dtype=torch.bfloat16).num_bytes


def test_missing_modules_have_rank_0_and_empty_matrices() -> None:
    packed = make_adapter({"o_proj": 4}, layers=[1])
    assert packed.lora_a(0, "o_proj").shape == (0, 72)
    assert packed.lora_b(1, "up_proj").shape == (0, 2100)
    assert packed.max_rank == 4


def test_module_not_fitting_base_is_named() -> None:
    module = LoraModule(1, "q_proj", torch.zeros(4, 41), torch.zeros(72, 4), 1.0)
    with pytest.raises(TensorMismatch, match=r"layer 1 q_proj: lora_a \(4, 41\).*this base takes \(r, 40\)"):
        pack_adapter([module], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)


def test_layer_missing_from_base_is_refused() -> None:
    with pytest.raises(TensorMismatch, match="LoRA on layer 2; this base has layers 0 to 1"):
        packed_num_bytes(
            make_modules({"q_proj": 4}, layers=[2]), num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32
        )


def test_a_module_given_twice_is_refused() -> None:
    twice = make_modules({"q_proj": 4}, layers=[0]) * 2
    with pytest.raises(TensorMismatch, match="twice"):
        pack_adapter(twice, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)


def test_module_missing_from_base_is_refused() -> None:
    shapes = {module: SHAPES[module] for module in LAYER_MODULES}
    module = LoraModule(0, "lm_head", torch.zeros(4, 40), torch.zeros(72, 4), 1.0)
    with pytest.raises(TensorMismatch, match="LoRA on lm_head; this base has q_proj"):
        pack_adapter([module], num_layers=NUM_LAYERS, module_shapes=shapes, dtype=torch.float32)


def test_the_head_is_in_no_layer_but_0() -> None:
    module = LoraModule(1, "lm_head", torch.zeros(4, 40), torch.zeros(2105, 4), 1.0)
    with pytest.raises(TensorMismatch, match="lm_head, which is outside the layers"):
        packed_num_bytes([module], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)


def test_delta_is_unpacked_as_packed_and_counted() -> None:
    modules = make_modules(MIXED, has_delta=("v_proj", "down_proj"))
    packed = pack_adapter(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.bfloat16)
    for m in modules:
        delta = packed.dora_delta(m.layer, m.module)
        assert (delta is None) == (m.dora_delta is None)
        assert delta is None or m.dora_delta is None or torch.equal(delta, m.dora_delta)
    known = packed_num_bytes(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.bfloat16)
    assert known == packed.num_bytes > make_adapter(MIXED, dtype=torch.bfloat16).num_bytes


def test_delta_of_wrong_width_is_refused() -> None:
    module = LoraModule(1, "q_proj", torch.zeros(4, 40), torch.zeros(72, 4), 1.0, torch.zeros(71))
    with pytest.raises(TensorMismatch, match=r"delta \(71,\); this base takes \(72,\)"):
        pack_adapter([module], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_shifts_and_rank_scalings_survive_packing(dtype: torch.dtype) -> None:
    ranks = MIXED | {"o_proj": 0, "lm_head": 0, "embed_tokens": 0}
    modules = make_modules(
        ranks,
        has_shift=("q_proj", "o_proj"),
        rows={"v_proj": 24, "o_proj": 3, "lm_head": 9, "embed_tokens": 1},
        is_scaled_by_rank=True,
    )
    packed = pack_adapter(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=dtype)
    for m in modules:
        assert torch.equal(packed.scaling(m.layer, m.module), m.scaling)
        shift, rows = packed.bias_delta(m.layer, m.module), packed.row_overrides(m.layer, m.module)
        assert (shift is None, rows is None) == (m.bias_delta is None, m.row_overrides is None)
        assert shift is None or torch.equal(shift, m.bias_delta)
        assert rows is None or (
            torch.equal(rows.ids, m.row_overrides.ids) and torch.equal(rows.weight, m.row_overrides.weight.to(dtype))
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_size_is_known_without_reading_weights(dtype: torch.dtype) -> None:
    modules = make_modules(
        MIXED | {"o_proj": 0, "lm_head": 0, "embed_tokens": 2},
        has_delta=("q_proj",),
        has_shift=("q_proj", "o_proj"),
        rows={"v_proj": 24, "lm_head": 9, "embed_tokens": 17},
        is_scaled_by_rank=True,
    )
    norms = [ReplacedNorm(1, "mlp_norm", torch.ones(40)), ReplacedNorm(0, "norm", torch.ones(40))]
    base: Any = {"num_layers": NUM_LAYERS, "module_shapes": SHAPES, "dtype": dtype}
    known = packed_num_bytes([as_meta(m) for m in modules], norms=[as_meta(n) for n in norms], **base)
    assert known == pack_adapter(modules, norms=norms, **base).num_bytes
    assert known == packed_num_bytes(modules, **base) + 2 * 40 * 4


def as_meta(thing: Any) -> Any:
    """The same without its numbers."""
    fields = ((f.name, getattr(thing, f.name)) for f in dataclasses.fields(thing))
    values = {
        name: value.to("meta")
        if isinstance(value, torch.Tensor)
        else as_meta(value)
        if dataclasses.is_dataclass(value)
        else value
        for name, value in fields
    }
    return type(thing)(**values)


def test_int8_rounds_ranks_and_rows_by_half_step() -> None:
    modules = make_modules({"q_proj": 3, "embed_tokens": 2}, layers=[0], rows={"q_proj": 5, "embed_tokens": 4})
    for m in modules:
        # magnitudes that one scale for all would lose
        m.lora_a.mul_(torch.logspace(-6, 3, len(m.lora_a))[:, None])
        m.row_overrides.weight.mul_(torch.logspace(-6, 3, len(m.row_overrides.ids))[:, None])
    packed = pack_adapter(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.int8)
    assert packed.data.dtype == torch.int8
    for m in modules:
        a, b, scaling = (
            part.double()
            for part in (packed.lora_a(0, m.module), packed.lora_b(0, m.module), packed.scaling(0, m.module))
        )
        for rank in range(len(a)):
            expected = m.scaling * torch.outer(m.lora_b[:, rank], m.lora_a[rank]).double()
            # a half step of 127 of either factor, and both
            assert (
                scaling[rank] * torch.outer(b[rank], a[rank]) - expected
            ).abs().max() <= expected.abs().max() * 0.0080
        rows = packed.row_overrides(0, m.module).pick(slice(None), torch.float64)
        most = m.row_overrides.weight.abs().amax(1, keepdim=True)
        assert ((rows - m.row_overrides.weight).abs() <= most * 0.00394).all()


def test_norms_are_float32_copies() -> None:
    weight = torch.randn(40, dtype=torch.float64).float()
    norms = [ReplacedNorm(1, "attention_norm", weight), ReplacedNorm(0, "norm", weight.bfloat16())]
    packed = pack_adapter([], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.bfloat16, norms=norms)
    assert packed.norms.keys() == {(1, "attention_norm"), (0, "norm")}
    assert packed.norms[0, "norm"].dtype == torch.float32
    expected = weight.clone()
    weight.zero_()
    assert torch.equal(packed.norms[1, "attention_norm"], expected)


@pytest.mark.parametrize(
    ("layer", "norm", "size"),
    [(2, "mlp_norm", 40), (1, "norm", 40), (0, "q_norm", 40), (0, "norm", 41)],
)
def test_norm_missing_from_base_is_refused(layer: int, norm: str, size: int) -> None:
    with pytest.raises(TensorMismatch, match=f"{norm}.*this base (has|takes)"):
        pack_adapter(
            [],
            num_layers=NUM_LAYERS,
            module_shapes=SHAPES,
            dtype=torch.float32,
            norms=[ReplacedNorm(layer, norm, torch.zeros(size))],
        )


def test_a_norm_given_twice_is_refused() -> None:
    twice = [ReplacedNorm(0, "norm", torch.zeros(40))] * 2
    with pytest.raises(TensorMismatch, match="twice"):
        pack_adapter([], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32, norms=twice)


@pytest.mark.parametrize(
    ("module", "ids", "shape", "message"),
    [
        ("q_proj", [3, 3], (2, 40), "must ascend"),
        ("q_proj", [5, 3], (2, 40), "must ascend"),
        ("q_proj", [3, 72], (2, 40), "rows 0 to 71"),
        ("q_proj", [-1, 3], (2, 40), "rows 0 to 71"),
        ("q_proj", [3], (2, 40), r"ids \(1,\) of rows \(2, 40\)"),
        ("q_proj", [], (0, 40), "n from 1 to 72"),
        ("embed_tokens", [3, 2105], (2, 40), "rows 0 to 2104"),
        ("embed_tokens", [3], (1, 2105), r"takes int32 \(n,\) and \(n, 40\)"),
    ],
)
def test_rows_not_fitting_base_are_refused(module: str, ids: list[int], shape: tuple[int, int], message: str) -> None:
    out_features, in_features = SHAPES[module]
    rows = ReplacedRows(torch.tensor(ids, dtype=torch.int32), torch.zeros(shape))
    m = LoraModule(0, module, torch.zeros(0, in_features), torch.zeros(out_features, 0), 1.0, row_overrides=rows)
    with pytest.raises(TensorMismatch, match=message):
        pack_adapter([m], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)


def test_mismatched_bias_deltas_and_rank_scalings_are_refused() -> None:
    for module, scaling, shift, message in (
        ("q_proj", 1.0, torch.zeros(40), r"bias_delta \(40,\); this base takes \(72,\)"),
        ("q_proj", torch.ones(3), None, r"scaling \(3,\); rank 2 takes \(2,\)"),
        ("embed_tokens", 1.0, torch.zeros(40), "an embedding has no bias"),
    ):
        out_features, in_features = SHAPES[module]
        m = LoraModule(0, module, torch.zeros(2, in_features), torch.zeros(out_features, 2), scaling, bias_delta=shift)
        with pytest.raises(TensorMismatch, match=message):
            pack_adapter([m], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)


def test_dtype_unreadable_by_kernels_is_refused() -> None:
    with pytest.raises(TensorMismatch, match=r"or int8, not torch\.float64"):
        pack_adapter([], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float64)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_large_adapters_release_all_memory_after_use() -> None:
    width, rank = 4096, 256
    module = LoraModule(0, "q_proj", torch.ones(rank, width), torch.ones(width, rank), 1.0)

    def pack() -> PackedAdapter:
        return pack_adapter([module], num_layers=1, module_shapes={"q_proj": (width, width)}, dtype=torch.bfloat16)

    pack()
    before = resident_bytes()
    packed = [pack() for _ in range(16)]
    num_bytes = sum(adapter.num_bytes for adapter in packed)
    assert num_bytes >= 64 << 20
    assert resident_bytes() - before == pytest.approx(num_bytes, rel=0.1)
    assert all(adapter.data.data_ptr() % mmap.PAGESIZE == 0 for adapter in packed)
    matrix = packed[3].lora_a(0, "q_proj")
    # of every other one: none of them waits for its neighbour
    del packed[::2]
    assert resident_bytes() - before == pytest.approx(num_bytes / 2, rel=0.2)
    del packed
    gc.collect()
    assert bool((matrix == 1).all())
    del matrix
    assert resident_bytes() - before < num_bytes / 8
