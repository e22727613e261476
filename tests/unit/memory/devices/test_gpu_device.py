"""A GPU's pool of pages as a place for adapters: sizes, limits of three kinds, scattered tiles,
and int8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from simulated_gpu import SimulatedCopies, read_module

from loraserve.errors import AdapterUnavailable, ConfigError
from loraserve.memory.arena import Arena, Owner
from loraserve.memory.devices.base import Footprint
from loraserve.memory.devices.copies import DirectCopies
from loraserve.memory.devices.gpu import GpuDevice, adapter_dtype
from loraserve.memory.memory_plan import max_adapter_tiles, plan_gpu_arena
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.types import BaseSpec
from loraserve_kernels.common.modules import LAYER_MODULES, LoraModule, ReplacedNorm, ReplacedRows
from loraserve_kernels.common.sizes import ModuleSize, num_pages_of, num_tiles_of
from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.paged.layout import RECORD
from loraserve_kernels.gpu.paged.pool import PagedPool

LLAMA_8B = {
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "v_proj": (1024, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096),
    "up_proj": (14336, 4096),
    "down_proj": (4096, 14336),
}


def make_device(make: Any, **pool: int) -> GpuDevice:
    return GpuDevice(make.base, make.pool(**pool), DirectCopies())


def device_of(base: BaseSpec, dtype: torch.dtype, num_bytes: int = 200_000, device: str = "cpu") -> GpuDevice:
    """A device in an arena of that many bytes, tables included."""
    plan = plan_gpu_arena(base, num_bytes, 256, 1)
    arena = Arena(plan.num_pages, plan.page_num_bytes, is_indexed=True)
    data = torch.empty(plan.num_pages * plan.page_num_bytes, dtype=torch.uint8, device=device)
    return GpuDevice.in_arena(base, data, arena.client(Owner.ADAPTERS), plan, num_bytes, dtype)


def fill(make: Any, pool: DeviceCache, names: str, rank: int = 1) -> None:
    for seed, name in enumerate(names):
        pool.admit(
            make.digest(name), make.loaded(pool.device.pack(make.modules(rank, seed=seed), torch.float32)), float(seed)
        )


def test_placed_adapter_keeps_weights_in_pool(make: Any) -> None:
    device = make_device(make)
    modules = make.modules(20, seed=3)
    packed = device.pack(modules, torch.float32)
    placed = device.place(packed)
    assert device.is_ready(placed)
    assert placed.footprint == Footprint(20 * make.page_bytes, 2, 1)
    for m in modules:
        a, b, multipliers = read_module(device.pool, 0, m.layer, 20, 32, 32)
        assert torch.equal(a, m.lora_a.bfloat16())
        assert torch.equal(b, m.lora_b.T.bfloat16())
        assert torch.equal(multipliers, torch.full((20,), 2.0))


def test_adapter_slot_is_reusable_after_removal(make: Any) -> None:
    device = make_device(make, num_pages=4, max_tiles=1, max_slots=2)
    packed = device.pack(make.modules(4), torch.float32)
    for _ in range(3):
        placed = device.place(packed)
        assert device.check([placed]) == []
        assert not device.can_lay_out(Footprint(0, 1, 1))
        assert device.can_lay_out(Footprint(0, 1, 1), [placed])
        assert device.remove(placed) is None
        assert device.can_lay_out(Footprint(0, 1, 1))
        assert device.check([]) == []


@pytest.mark.parametrize("tight", ["num_pages", "max_tiles", "max_slots"])
def test_eviction_goes_on_until_every_limit_is_kept(make: Any, tight: str) -> None:
    # room for four adapters of one page, tile and slot each, by one of the limits
    pool = DeviceCache(make_device(make, **{tight: 5 if tight == "max_slots" else 4}))
    fill(make, pool, "abcd")
    pin = pool.pin(make.digest("a"), 9.0)
    # one page, two tiles (the modules), one slot; or two pages
    modules = make.modules(1, names=("q_proj", "v_proj"), layers=(0,))
    if tight == "num_pages":
        modules = make.modules(2)
    packed = pool.device.pack(modules, torch.float32)
    evicted = [e.digest for e in pool.admit(make.digest("x"), make.loaded(packed), 9.0)]
    assert evicted == [make.digest(name) for name in ("b" if tight == "max_slots" else "bc")]
    assert pool.check() == []
    pin.release()


def test_scattered_tiles_cost_further_evictions_and_no_failure(make: Any) -> None:
    pool = DeviceCache(make_device(make, max_tiles=4))
    fill(make, pool, "abcd")
    # least recently used: a and c, whose tiles aren't neighbours; then b, between them
    for name in "bd":
        pool.touch(make.digest(name), 5.0)
    packed = pool.device.pack(make.modules(17), torch.float32)
    assert pool.can_admit(pool.device.footprint_of(packed))
    evicted = [e.digest for e in pool.admit(make.digest("x"), make.loaded(packed), 9.0)]
    assert evicted == [make.digest(name) for name in "acb"]
    assert pool.check() == []


def test_tiles_scattered_between_pinned_adapters_are_no_place(make: Any) -> None:
    pool = DeviceCache(make_device(make, max_tiles=3))
    fill(make, pool, "abc")
    pin = pool.pin(make.digest("b"), 5.0)
    packed = pool.device.pack(make.modules(17), torch.float32)
    footprint = pool.device.footprint_of(packed)
    assert footprint.fits(pool.free + pool.evictable)
    assert not pool.can_admit(footprint)
    assert pool.can_ever_admit(footprint)
    pin.release()
    assert pool.can_admit(footprint)
    pool.protect([make.digest("b")])
    assert not pool.can_admit(footprint)
    pool.protect(())
    pool.set_operator_pin(make.digest("b"), True)
    assert not pool.can_ever_admit(footprint)
    pool.set_operator_pin(make.digest("b"), False)
    pool.admit(make.digest("x"), make.loaded(packed), 9.0)
    assert pool.check() == []


def test_adapter_in_transit_is_neither_resident_nor_idle(make: Any) -> None:
    pool = make.pool(num_pages=4)
    copies = SimulatedCopies(pool)
    adapters = DeviceCache(GpuDevice(make.base, pool, copies))
    fill(make, adapters, "a", rank=3)
    assert adapters.used == Footprint(3 * make.page_bytes, 1, 1)
    assert adapters.take_landed() == []
    assert not adapters.has_landed(make.digest("a"))
    assert not adapters.can_admit(Footprint(2 * make.page_bytes, 1, 1))
    assert adapters.check() == []
    copies.run_all()
    assert adapters.take_landed() == [make.digest("a")]
    assert adapters.has_landed(make.digest("a"))
    adapters.protect(())
    assert adapters.can_admit(Footprint(2 * make.page_bytes, 1, 1))
    assert adapters.check() == []


def test_int8_halves_pages_and_scales_each_rank(make: Any) -> None:
    device = GpuDevice(make.base, make.pool(), DirectCopies(), torch.int8)
    modules = make.modules(8)
    placed = device.place(device.pack(modules, torch.float32))
    assert placed.footprint.num_bytes == 4 * make.page_bytes
    assert placed.footprint == device.footprint(modules, torch.float32)
    *_, multipliers = read_module(device.pool, 0, 1, 8, 32, 32)
    scales = modules[1].lora_a.abs().amax(1) / 127 * modules[1].lora_b.abs().amax(0) / 127
    assert torch.allclose(multipliers, 2.0 * scales)


def test_non_finite_scale_product_is_refused_by_name(make: Any) -> None:
    device = GpuDevice(make.base, make.pool(), DirectCopies(), torch.int8)
    modules = make.modules(20, names=("q_proj", "v_proj"))
    modules[3].lora_a[18] = 1e30
    modules[3].lora_b[:, 18] = 1e30
    with pytest.raises(AdapterUnavailable, match="Layer 1 v_proj has weights so large"):
        device.pack(modules, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_adapter_parts_without_rank_are_counted_and_freed(make: Any, dtype: torch.dtype) -> None:
    base = msgspec.structs.replace(make.base, modules={**make.base.modules, "lm_head": (64, 32)})
    pool = PagedPool(
        num_pages=40,
        page_num_bytes=256,
        num_layers=2,
        max_tiles=8,
        max_slots=4,
        module_shapes=base.modules,
        dtype=torch.bfloat16,
        device="cpu",
    )
    device = GpuDevice(base, pool, DirectCopies(), dtype)
    rows = ReplacedRows(torch.arange(3, 53, dtype=torch.int32), torch.randn(50, 32))
    modules = [
        *(replace(m, bias_delta=torch.randn(32)) for m in make.modules(3)),
        LoraModule(1, "v_proj", torch.zeros(0, 32), torch.zeros(16, 0), torch.zeros(0), dora_delta=torch.randn(16)),
        LoraModule(0, "lm_head", torch.zeros(0, 32), torch.zeros(64, 0), 1.0, row_overrides=rows),
    ]
    placed = [device.place(device.pack(modules, torch.bfloat16))]
    assert placed[0].footprint == device.footprint(modules, torch.bfloat16)
    # a tile for each module, and two for fifty rows of two layers' records
    assert placed[0].footprint.num_tiles == 5
    assert device.check(placed) == []
    device.remove(placed.pop())
    assert device.check(placed) == []


def test_replaced_norms_are_refused_by_name(make: Any) -> None:
    device, norms = make_device(make), [ReplacedNorm(1, "mlp_norm", torch.ones(32))]
    for refuse in (device.footprint, device.pack):
        with pytest.raises(TensorMismatch, match="layer 1 mlp_norm: the adapter has a trained weight for this norm"):
            refuse(make.modules(1), torch.float32, norms)


def test_replaced_row_beyond_int8_is_refused_by_name(make: Any) -> None:
    base = msgspec.structs.replace(make.base, dtype="float16", modules={**make.base.modules, "lm_head": (64, 32)})
    device = device_of(base, torch.int8)
    rows = ReplacedRows(torch.arange(40, dtype=torch.int32), torch.ones(40, 32))
    rows.weight[37, 3] = float("inf")
    head = LoraModule(0, "lm_head", torch.zeros(0, 32), torch.zeros(64, 0), 1.0, row_overrides=rows)
    with pytest.raises(AdapterUnavailable, match="Layer 0 lm_head has weights so large"):
        device.pack([*make.modules(1), head], torch.float32)


def test_weight_beyond_pool_range_is_refused_by_name(make: Any) -> None:
    modules = make.modules(2)
    modules[1].lora_b[3, 1] = 3.4e38
    with pytest.raises(AdapterUnavailable, match=r"Layer 1 q_proj\.lora_B has a weight of size 3\.4e\+38.*bf16"):
        make_device(make).pack(modules, torch.float32)


def test_replaced_row_beyond_pool_range_is_refused(make: Any) -> None:
    base = msgspec.structs.replace(make.base, dtype="float16", modules={"lm_head": (64, 32)})
    device = device_of(base, torch.float16)
    rows = ReplacedRows(torch.tensor([3, 9], dtype=torch.int32), torch.ones(2, 32))
    head = LoraModule(0, "lm_head", torch.zeros(0, 32), torch.zeros(64, 0), 1.0, row_overrides=rows)
    assert device.pack([head], torch.float32)
    rows.weight[1, 3] = 7e4
    with pytest.raises(AdapterUnavailable, match=r"Layer 0 lm_head\.weight has a weight of size 7e\+04"):
        device.pack([head], torch.float32)


def test_adapters_are_held_in_activation_dtype_or_int8() -> None:
    assert adapter_dtype("auto", torch.float16) is torch.float16
    assert adapter_dtype("int8", torch.float16) is torch.int8
    assert adapter_dtype("bf16", torch.bfloat16) is torch.bfloat16
    with pytest.raises(ConfigError, match="in fp16 where activations are bf16"):
        adapter_dtype("fp16", torch.bfloat16)
    with pytest.raises(ConfigError, match="auto, bf16, fp16, int8"):
        adapter_dtype("fp8", torch.bfloat16)


@pytest.mark.parametrize("gib", [1, 8, 60, 120])
@pytest.mark.parametrize("rank", [4, 16, 64, 512])
def test_full_depth_adapters_exhaust_bytes_before_tiles(make: Any, gib: int, rank: int) -> None:
    base = msgspec.structs.replace(make.base, num_layers=32, modules=LLAMA_8B)
    plan, max_tiles = plan_gpu_arena(base, gib << 30, 2 << 20, 64), max_adapter_tiles(base, gib << 30)
    sizes = [ModuleSize(layer, module, rank) for layer in range(32) for module in LAYER_MODULES]
    num_pages = num_pages_of(
        sizes,
        num_layers=32,
        module_shapes=LLAMA_8B,
        page_num_bytes=plan.page_num_bytes,
        dtype=torch.bfloat16,
    )
    # half of them free leave room for runs
    assert 2 * (plan.num_pages // num_pages) * num_tiles_of(sizes, num_layers=32) <= max_tiles
    spent = (plan.num_pages + plan.num_dedicated_pages) * plan.page_num_bytes + max_tiles * 32 * RECORD * 4
    assert 0.98 * gib * 2**30 < spent <= gib << 30


def test_device_takes_arena_pages_and_activation_dtype(make: Any) -> None:
    device = device_of(make.base, torch.bfloat16)
    assert device.pool.data.nbytes + device.pool.records.nbytes <= 200_000
    plan_bytes = device.arena_client.arena.num_pages * device.pool.page_num_bytes
    assert device.limits.num_bytes < device.pool.data.nbytes == plan_bytes
    in_int8 = device_of(msgspec.structs.replace(make.base, dtype="float16"), torch.int8)
    assert in_int8.pool.dtype is torch.float16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_copies_land_without_blocking(make: Any) -> None:
    device = device_of(make.base, torch.bfloat16, 1 << 20, "cuda")
    modules = make.modules(20)
    packed = device.pack(modules, torch.float32)
    assert packed.pages.pages.is_pinned()
    torch.cuda._sleep(100_000_000)
    device.step_launched()
    placed = device.place(packed)
    assert not device.is_ready(placed)
    torch.cuda.synchronize()
    assert device.is_ready(placed)
    a, b, _ = read_module(device.pool, 0, 1, 20, 32, 32)
    assert torch.equal(a.cpu(), modules[1].lora_a.bfloat16())
    assert torch.equal(b.cpu(), modules[1].lora_b.T.bfloat16())
