import pytest
import torch

from loraserve_kernels.errors import ShapeMismatch
from loraserve_kernels.layout import (
    ALIGN_ELEMENTS,
    LAYER_MODULES,
    LoraModule,
    pack_adapter,
    packed_num_bytes,
)

from .conftest import NUM_LAYERS, SHAPES, make_adapter, make_modules

MIXED = {"q_proj": 3, "v_proj": 12, "gate_proj": 64, "down_proj": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_matrix_comes_back_as_it_was_packed(dtype: torch.dtype) -> None:
    modules = make_modules(MIXED)
    packed = pack_adapter(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=dtype)
    for m in modules:
        assert torch.equal(packed.lora_a(m.layer, m.module), m.lora_a.to(dtype))
        assert torch.equal(packed.lora_b(m.layer, m.module), m.lora_b.T.to(dtype))
        assert packed.scaling(m.layer, m.module).eq(m.scaling).all()


def test_a_sites_a_matrices_are_one_matrix() -> None:
    packed = make_adapter(MIXED)
    parts = [packed.lora_a(1, module) for module in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(packed.site_a(1, "qkv"), torch.cat(parts))
    assert packed.site_a(1, "qkv").shape == (15, 40)


def test_ranks_arent_padded() -> None:
    packed = make_adapter(MIXED)
    weights = sum(rank * sum(SHAPES[module]) for module, rank in MIXED.items()) * NUM_LAYERS
    gaps = packed.data.numel() - weights
    assert 0 <= gaps < 12 * NUM_LAYERS * ALIGN_ELEMENTS


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


def test_a_module_that_doesnt_fit_the_base_is_named() -> None:
    module = LoraModule(1, "q_proj", torch.zeros(4, 41), torch.zeros(72, 4), 1.0)
    with pytest.raises(ShapeMismatch, match=r"layer 1 q_proj: lora_a \(4, 41\).*this base takes \(r, 40\)"):
        pack_adapter([module], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)


def test_a_layer_that_the_base_lacks_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="LoRA on layer 2; this base has layers 0 to 1"):
        packed_num_bytes(
            make_modules({"q_proj": 4}, layers=[2]), num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32
        )


def test_a_module_given_twice_is_refused() -> None:
    twice = make_modules({"q_proj": 4}, layers=[0]) * 2
    with pytest.raises(ShapeMismatch, match="twice"):
        pack_adapter(twice, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)


def test_a_module_that_the_base_lacks_is_refused() -> None:
    shapes = {module: SHAPES[module] for module in LAYER_MODULES}
    module = LoraModule(0, "lm_head", torch.zeros(4, 40), torch.zeros(72, 4), 1.0)
    with pytest.raises(ShapeMismatch, match="LoRA on lm_head; this base has q_proj"):
        pack_adapter([module], num_layers=NUM_LAYERS, module_shapes=shapes, dtype=torch.float32)


def test_the_head_is_in_no_layer_but_0() -> None:
    module = LoraModule(1, "lm_head", torch.zeros(4, 40), torch.zeros(2105, 4), 1.0)
    with pytest.raises(ShapeMismatch, match="lm_head, which is in no layer"):
        packed_num_bytes([module], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)


def test_a_delta_comes_back_as_it_was_packed_and_counts() -> None:
    modules = make_modules(MIXED, has_delta=("v_proj", "down_proj"))
    packed = pack_adapter(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.bfloat16)
    for m in modules:
        delta = packed.delta(m.layer, m.module)
        assert (delta is None) == (m.delta is None)
        assert delta is None or m.delta is None or torch.equal(delta, m.delta)
    known = packed_num_bytes(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.bfloat16)
    assert known == packed.num_bytes > make_adapter(MIXED, dtype=torch.bfloat16).num_bytes


def test_a_delta_of_another_width_is_refused() -> None:
    module = LoraModule(1, "q_proj", torch.zeros(4, 40), torch.zeros(72, 4), 1.0, torch.zeros(71))
    with pytest.raises(ShapeMismatch, match=r"delta \(71,\); this base takes \(72,\)"):
        pack_adapter([module], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)
