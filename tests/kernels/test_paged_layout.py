from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_pools import (
    EVEN,
    MIXED_RANKS,
    NUM_LAYERS,
    ODD,
    PAGE_NUM_BYTES,
    empty_pool,
    pages_of,
    random_modules,
    read_row,
)

from loraserve_kernels.common.modules import LAYER_MODULES, SITES, LoraModule, ReplacedRows, size_of
from loraserve_kernels.common.sizes import ModuleSize, num_pages_of, num_tiles_of
from loraserve_kernels.errors import PoolFull, TensorMismatch
from loraserve_kernels.gpu.paged import packing
from loraserve_kernels.gpu.paged.layout import (
    A_UNITS,
    B_UNITS,
    DELTA_UNIT,
    FIRST_SLICE,
    FIRST_TILE,
    HAS_DELTA,
    HAS_ENDING,
    HAS_SHIFT,
    KIND,
    MULTIPLIERS,
    NUM_REPLACED,
    NUM_TILES,
    RECORD,
    REPLACED_TILE,
    SHIFT_UNIT,
    STORED_DTYPES,
    tiles_of_sites,
)
from loraserve_kernels.gpu.paged.packing import make_pages
from loraserve_kernels.gpu.paged.pool import PagedPool


def slice_of(pool: PagedPool, slot: int, module: str) -> dict[str, int]:
    """What a plan will copy of the slot's module."""
    for site, names in enumerate(SITES.values()):
        if module in names:
            words = pool.sites[slot, site]
            at = FIRST_SLICE + 4 * names.index(module)
            return {
                "is_int8": int(words[KIND]),
                "num_tiles": int(words[at + NUM_TILES]),
                "first_tile": int(words[at + FIRST_TILE]),
                "has_ending": int(words[at + HAS_ENDING]),
                "num_replaced": int(words[NUM_REPLACED]),
                "replaced_tile": int(words[REPLACED_TILE]),
            }
    raise AssertionError(module)


def read_back(pool: PagedPool, slot: int, m: LoraModule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """B diag(scaling) A of one module, and its δ, through the pool's tables."""
    out_features, in_features = m.lora_b.shape[0], m.lora_a.shape[1]
    update, found = np.zeros((out_features, in_features)), slice_of(pool, slot, m.module)
    dtype = torch.int8 if found["is_int8"] else pool.dtype
    for tile in range(found["first_tile"], found["first_tile"] + found["num_tiles"]):
        record = pool.records[tile, m.layer]
        for r, multiplier in enumerate(record.view(torch.float32)[MULTIPLIERS:].tolist()):
            if multiplier:
                a = read_row(pool, int(record[A_UNITS + r]), in_features, dtype)
                b = read_row(pool, int(record[B_UNITS + r]), out_features, dtype)
                assert not a[in_features:].any()
                assert not b[out_features:].any()
                update += multiplier * np.outer(b[:out_features], a[:in_features])
    return torch.from_numpy(update), read_ending(pool, slot, m, HAS_DELTA, DELTA_UNIT)


def read_ending(pool: PagedPool, slot: int, m: LoraModule, has: int, unit: int) -> torch.Tensor | None:
    """The module's δ or its shift, through the pool's tables."""
    found, out_features = slice_of(pool, slot, m.module), m.lora_b.shape[0]
    record = pool.records[found["first_tile"], m.layer]
    if not found["has_ending"] or not record[has]:
        return None
    return torch.from_numpy(read_row(pool, int(record[unit]), out_features, torch.float32)[:out_features])


def read_replaced(pool: PagedPool, slot: int, m: LoraModule) -> ReplacedRows | None:
    """The module's replaced rows, through the pool's tables."""
    found = slice_of(pool, slot, m.module)
    if not found["num_replaced"]:
        return None
    records = pool.records.view(-1, RECORD)[found["replaced_tile"] * NUM_LAYERS :]
    width = m.lora_b.shape[0] if m.module == "embed_tokens" else m.lora_a.shape[1]
    dtype, ids, rows = torch.int8 if found["is_int8"] else pool.dtype, [], []
    for i in range(-(-found["num_replaced"] // 16)):
        for r, multiplier in enumerate(records[i].view(torch.float32)[MULTIPLIERS:].tolist()):
            if multiplier:
                ids.append(int(records[i, B_UNITS + r]))
                row = read_row(pool, int(records[i, A_UNITS + r]), width, dtype)
                assert not row[width:].any()
                rows.append(multiplier * torch.from_numpy(row[:width]))
    return ReplacedRows(torch.tensor(ids, dtype=torch.int32), torch.stack(rows))


@pytest.mark.parametrize("stored", STORED_DTYPES)
@pytest.mark.parametrize("shapes", [ODD, EVEN], ids=["odd", "even"])
def test_tables_locate_ranks_and_deltas_with_zero_padding(
    shapes: dict[str, tuple[int, int]], stored: torch.dtype
) -> None:
    torch.manual_seed(0)
    pool = empty_pool(shapes, torch.float16 if stored == torch.int8 else stored)
    loaded = {}
    for ranks in MIXED_RANKS:
        modules = random_modules(ranks, shapes, stored, has_delta=("v_proj", "up_proj", "lm_head", "embed_tokens"))
        loaded[pool.load(pages_of(modules, shapes, stored))] = modules
    for slot, modules in loaded.items():
        for m in modules:
            expected = m.scaling * m.lora_b.double() @ m.lora_a.double()
            update, delta = read_back(pool, slot, m)
            assert (update - expected).abs().max() <= 1e-5 * expected.abs().max()
            assert (delta is None) == (m.dora_delta is None)
            assert delta is None or m.dora_delta is None or torch.equal(delta, m.dora_delta)


def test_int8_and_16_bit_adapters_share_a_pool() -> None:
    torch.manual_seed(0)
    pool = empty_pool(ODD, torch.bfloat16)
    for stored in (torch.bfloat16, torch.int8, torch.bfloat16):
        m = random_modules({"down_proj": 5}, ODD, stored, [1])[0]
        slot = pool.load(pages_of([m], ODD, stored))
        expected = m.scaling * m.lora_b.double() @ m.lora_a.double()
        assert (read_back(pool, slot, m)[0] - expected).abs().max() <= 1e-5 * expected.abs().max()
    with pytest.raises(TensorMismatch, match="another page size, dtype or base"):
        pool.load(pages_of([m], ODD, torch.float16))


def test_ranks_vary_by_layer_and_may_be_missing() -> None:
    torch.manual_seed(0)
    pool = empty_pool(ODD, torch.float16)
    deep = random_modules({"q_proj": 40}, ODD, torch.float16, [0])[0]
    shallow = random_modules({"q_proj": 3}, ODD, torch.float16, [1], has_delta=["q_proj"])[0]
    slot = pool.load(pages_of([deep, shallow], ODD, torch.float16))
    for m in (deep, shallow):
        update, delta = read_back(pool, slot, m)
        assert torch.allclose(update, m.scaling * m.lora_b.double() @ m.lora_a.double(), atol=1e-6)
        assert (delta is None) == (m is deep)
    lonely = pool.load(pages_of([shallow], ODD, torch.float16))
    update, delta = read_back(pool, lonely, deep)
    assert not update.any()
    assert delta is None


@pytest.mark.parametrize("stored", STORED_DTYPES)
def test_terms_besides_ranks_lie_in_pages_too(stored: torch.dtype) -> None:
    torch.manual_seed(0)
    pool = empty_pool(ODD, torch.float16 if stored == torch.int8 else stored)
    num_rows = {"lm_head": 70, "embed_tokens": 33}
    kept = pool.load(pages_of(random_modules(0, ODD, stored, num_rows=num_rows), ODD, stored))
    modules = [
        replace(m, scaling=torch.randn(m.lora_a.shape[0]))
        for m in random_modules({"q_proj": 20, "v_proj": 0, "lm_head": 3, "embed_tokens": 0}, ODD, stored,
                                has_shift=("q_proj", "v_proj"), num_rows=num_rows)
    ]  # fmt: skip
    pool.unload(kept)
    slot = pool.load(pages_of(modules, ODD, stored))
    for m in modules:
        assert isinstance(m.scaling, torch.Tensor)
        expected = (m.lora_b * m.scaling).double() @ m.lora_a.double()
        update, delta = read_back(pool, slot, m)
        assert (update - expected).abs().max() <= 1e-5 * max(1e-9, expected.abs().max())
        shift, rows = read_ending(pool, slot, m, HAS_SHIFT, SHIFT_UNIT), read_replaced(pool, slot, m)
        assert delta is None
        assert (shift is None) == (m.bias_delta is None)
        assert shift is None or m.bias_delta is None or torch.equal(shift, m.bias_delta)
        assert (rows is None) == (m.row_overrides is None)
        if rows is not None and m.row_overrides is not None:
            assert torch.equal(rows.ids, m.row_overrides.ids)
            assert (rows.weight - m.row_overrides.weight).abs().max() <= 1e-5 * m.row_overrides.weight.abs().max()


def test_rows_are_quantized_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    modules = random_modules({"lm_head": 0}, ODD, torch.float16, num_rows={"lm_head": 70})
    whole = pages_of(modules, ODD, torch.int8)
    monkeypatch.setattr(packing, "_ROWS_AT_ONCE", 7)
    parts = pages_of(modules, ODD, torch.int8)
    assert torch.equal(whole.pages, parts.pages)
    assert torch.equal(whole.records, parts.records)


def test_base_with_tied_head_accepts_layer_adapters() -> None:
    torch.manual_seed(0)
    shapes = {module: ODD[module] for module in LAYER_MODULES}
    pool = empty_pool(shapes, torch.float16)
    m = random_modules({"o_proj": 4}, shapes, torch.float16, [1])[0]
    slot = pool.load(pages_of([m], shapes, torch.float16))
    assert torch.allclose(read_back(pool, slot, m)[0], m.scaling * m.lora_b.double() @ m.lora_a.double(), atol=1e-6)


@pytest.mark.parametrize("shapes", [ODD, EVEN], ids=["odd", "even"])
def test_pages_are_counted_before_allocation(shapes: dict[str, tuple[int, int]]) -> None:
    for ranks in [*MIXED_RANKS, 0]:
        for stored in (torch.float16, torch.int8):
            modules = random_modules(
                ranks, shapes, stored,
                has_delta=("q_proj", "lm_head"), has_shift=("v_proj",), num_rows={"lm_head": 50, "embed_tokens": 7},
            )  # fmt: skip
            sizes = [size_of(m) for m in reversed(modules)]
            counted = num_pages_of(
                sizes,
                num_layers=NUM_LAYERS,
                module_shapes=shapes,
                page_num_bytes=PAGE_NUM_BYTES,
                dtype=stored,
            )
            pages = pages_of(modules, shapes, stored)
            assert counted == pages.num_pages
            assert num_tiles_of(sizes, num_layers=NUM_LAYERS) == pages.num_tiles
            tiles = [
                tile for _, first, n in tiles_of_sites(pages.sites, NUM_LAYERS) for tile in range(first, first + n)
            ]
            assert sorted(tiles) == list(range(pages.num_tiles))


def test_pages_waste_little() -> None:
    modules = random_modules(12, EVEN, torch.float16)
    pages = pages_of(modules, EVEN, torch.float16)
    num_weights = sum(m.lora_a.numel() + m.lora_b.numel() for m in modules)
    assert num_weights * 2 >= 0.9 * pages.num_bytes


def test_consecutive_pages_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = empty_pool(ODD, torch.float16)
    adapter = pages_of(random_modules(8, ODD, torch.float16), ODD, torch.float16)
    copies = []
    copy = torch.Tensor.copy_

    def counted(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copies.append((source.is_contiguous(), non_blocking))
        return copy(self, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    pool.load(adapter, non_blocking=True)
    # the pages and the records, none of them waited for
    assert copies == [(True, True)] * 2


def test_capacity_is_known_before_allocation() -> None:
    pool = empty_pool(ODD, torch.float16, num_pages=4, max_slots=3)
    one = pages_of(random_modules({"k_proj": 8}, ODD, torch.float16), ODD, torch.float16)
    first, second = pool.load(one), pool.load(one)
    assert not pool.can_load(1, 1)
    assert pool.can_load(3, 1, leaving=[first])
    assert not pool.can_load(4, 1, leaving=[first])
    assert pool.can_load(4, 1, leaving=[first, second])
    assert pool.can_load(0, 299, leaving=[second])
    assert not pool.can_load(0, 300, leaving=[second])
    pool.unload(first)
    assert pool.can_load(3, 1)


def test_an_unloaded_adapters_room_serves_the_next() -> None:
    pool = empty_pool(ODD, torch.float16, max_slots=3)
    free = pool.num_free_pages
    for ranks in (64, 8, 1, 40, 64, 12):
        modules = random_modules(ranks, ODD, torch.float16)
        slot = pool.load(pages_of(modules, ODD, torch.float16))
        expected = modules[3].scaling * modules[3].lora_b.double() @ modules[3].lora_a.double()
        assert torch.allclose(read_back(pool, slot, modules[3])[0], expected, atol=1e-5)
        pool.unload(slot)
        assert pool.num_free_pages == free
    with pytest.raises(KeyError):
        pool.unload(slot)


def test_full_pool_refuses_without_change() -> None:
    adapter = pages_of(random_modules(8, ODD, torch.float16), ODD, torch.float16)
    few_pages = empty_pool(ODD, torch.float16, num_pages=adapter.num_pages + 1)
    few_slots = empty_pool(ODD, torch.float16, max_slots=2)
    for pool in (few_pages, few_slots):
        slot = pool.load(adapter)
        before, free = pool.data.clone(), pool.num_free_pages
        with pytest.raises(PoolFull):
            pool.load(adapter)
        assert torch.equal(pool.data, before)
        assert pool.num_free_pages == free
        pool.unload(slot)
        pool.load(adapter)


def test_adapter_exceeding_base_or_pool_is_refused() -> None:
    def make(
        modules: list[LoraModule],
        page_num_bytes: int = PAGE_NUM_BYTES,
        dtype: torch.dtype = torch.float16,
        shapes: dict[str, tuple[int, int]] = ODD,
    ) -> None:
        make_pages(modules, num_layers=NUM_LAYERS, module_shapes=shapes, page_num_bytes=page_num_bytes, dtype=dtype)

    good = random_modules({"q_proj": 4}, ODD, torch.float16)
    with pytest.raises(TensorMismatch, match="layer 7"):
        make([LoraModule(7, "q_proj", good[0].lora_a, good[0].lora_b, 1.0)])
    with pytest.raises(TensorMismatch, match="this base has q_proj"):
        make(random_modules({"lm_head": 1}, ODD, torch.float16), shapes={m: ODD[m] for m in LAYER_MODULES})
    with pytest.raises(TensorMismatch, match="lm_head, which is outside the layers"):
        make([LoraModule(1, "lm_head", good[0].lora_a, good[0].lora_b, 1.0)])
    with pytest.raises(TensorMismatch, match=r"delta \(71,\)"):
        make([LoraModule(0, "q_proj", good[0].lora_a, good[0].lora_b, 1.0, torch.zeros(71))])
    with pytest.raises(TensorMismatch, match="twice"):
        make([good[0], good[0]])
    with pytest.raises(
        TensorMismatch, match=r"layer 0 k_proj replaces 2 rows .* replace rows of lm_head and embed_tokens"
    ):
        make(random_modules({"k_proj": 1}, ODD, torch.float16, [0], num_rows={"k_proj": 2}))
    sizes = [ModuleSize(1, "o_proj", 0, num_rows=9)]
    with pytest.raises(TensorMismatch, match="layer 1 o_proj replaces 9 rows"):
        num_pages_of(sizes, num_layers=2, module_shapes=ODD, page_num_bytes=PAGE_NUM_BYTES, dtype=torch.int8)
    head = random_modules({"lm_head": 1}, ODD, torch.float16, num_rows={"lm_head": 2})[0]
    with pytest.raises(TensorMismatch, match="they must ascend"):
        make([replace(head, row_overrides=ReplacedRows(torch.tensor([7, 3], dtype=torch.int32), torch.zeros(2, 200)))])
    with pytest.raises(TensorMismatch, match="rank 513"):
        make(random_modules({"k_proj": 513}, ODD, torch.float16))
    with pytest.raises(TensorMismatch, match=r"this base takes \(r, 200\)"):
        make([LoraModule(0, "q_proj", good[0].lora_a[:, 1:], good[0].lora_b, 1.0)])
    with pytest.raises(TensorMismatch, match="use larger pages"):
        make(good, page_num_bytes=384)
    with pytest.raises(TensorMismatch, match="multiple of 32"):
        make(good, page_num_bytes=4100)
    with pytest.raises(TensorMismatch, match="float32"):
        make(good, dtype=torch.float32)
    with pytest.raises(TensorMismatch, match="int8 adapters lie in a pool of either"):
        empty_pool(ODD, torch.int8)
    with pytest.raises(TensorMismatch, match="another page size, dtype or base"):
        empty_pool(ODD, torch.bfloat16).load(pages_of(good, ODD, torch.float16))
    with pytest.raises(TensorMismatch, match="another page size, dtype or base"):
        empty_pool(EVEN, torch.float16).load(pages_of(good, ODD, torch.float16))
