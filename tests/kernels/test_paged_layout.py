import numpy as np
import pytest
import torch
from paged_pools import (
    EVEN,
    MIXED_RANKS,
    NUM_LAYERS,
    ODD,
    PAGE_NUM_ELEMENTS,
    empty_pool,
    pages_of,
    random_modules,
    read_block,
)

from loraserve_kernels.errors import PoolFull, ShapeMismatch
from loraserve_kernels.layout import MODULE_INDEX, LoraModule
from loraserve_kernels.paged_layout import POOL_DTYPES, RANK_BLOCK, PagedPool, make_pages, num_pages_of


def read_back(pool: PagedPool, slot: int, m: LoraModule) -> torch.Tensor:
    """scaling · B A of one module, through the pool's tables."""
    out_features, in_features = m.lora_b.shape[0], m.lora_a.shape[1]
    update = np.zeros((out_features, in_features))
    first_tile = int(pool.first_tiles[slot, MODULE_INDEX[m.module]])
    for block in range(2 * first_tile, 2 * (first_tile + int(pool.num_tiles[slot, MODULE_INDEX[m.module]]))):
        multipliers = pool.multipliers[m.layer, block * RANK_BLOCK : (block + 1) * RANK_BLOCK].numpy()
        present = multipliers != 0
        if not present.any():
            continue
        a = read_block(pool, int(pool.a_units[m.layer, block]), in_features)
        b = read_block(pool, int(pool.b_units[m.layer, block]), out_features)
        for matrix, width in ((a, in_features), (b, out_features)):
            assert not matrix[:, width:].any()
            assert not matrix[~present].any()
        update += (multipliers[:, None] * b[:, :out_features]).T @ a[:, :in_features]
    return torch.from_numpy(update)


@pytest.mark.parametrize("dtype", POOL_DTYPES)
@pytest.mark.parametrize("shapes", [ODD, EVEN], ids=["odd", "even"])
def test_the_tables_lead_to_every_rank_and_padding_is_zero(
    shapes: dict[str, tuple[int, int]], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    pool = empty_pool(shapes, dtype)
    loaded = {}
    for ranks in MIXED_RANKS:
        modules = random_modules(ranks, shapes, dtype)
        loaded[pool.load(pages_of(modules, shapes, dtype))] = modules
    for slot, modules in loaded.items():
        for m in modules:
            expected = m.scaling * m.lora_b.double() @ m.lora_a.double()
            assert (read_back(pool, slot, m) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_ranks_may_differ_by_layer_and_layers_may_be_missing() -> None:
    torch.manual_seed(0)
    pool = empty_pool(ODD, torch.float16)
    deep, shallow = (random_modules({"q_proj": r}, ODD, torch.float16, [layer])[0] for layer, r in ((0, 40), (1, 3)))
    slot = pool.load(pages_of([deep, shallow], ODD, torch.float16))
    for m in (deep, shallow):
        assert torch.allclose(read_back(pool, slot, m), m.scaling * m.lora_b.double() @ m.lora_a.double(), atol=1e-6)
    lonely = pool.load(pages_of([shallow], ODD, torch.float16))
    assert not read_back(pool, lonely, deep).any()


@pytest.mark.parametrize("shapes", [ODD, EVEN], ids=["odd", "even"])
def test_pages_are_counted_before_they_are_made(shapes: dict[str, tuple[int, int]]) -> None:
    for ranks in MIXED_RANKS:
        modules = random_modules(ranks, shapes, torch.float16)
        counted = num_pages_of(
            ((m.layer, m.module, m.lora_a.shape[0]) for m in reversed(modules)),
            num_layers=NUM_LAYERS,
            module_shapes=shapes,
            page_num_elements=PAGE_NUM_ELEMENTS,
        )
        assert counted == pages_of(modules, shapes, torch.float16).pages.shape[0]


def test_pages_waste_less_than_a_block_each() -> None:
    modules = random_modules(64, EVEN, torch.float16)
    pages = pages_of(modules, EVEN, torch.float16)
    num_weights = sum(m.lora_a.numel() + m.lora_b.numel() for m in modules)
    assert num_weights * 2 >= 0.75 * pages.num_bytes


def test_an_unloaded_adapters_room_serves_the_next() -> None:
    pool = empty_pool(ODD, torch.float16, max_slots=3)
    free = pool.num_free_pages
    for ranks in (64, 8, 1, 40, 64, 12):
        modules = random_modules(ranks, ODD, torch.float16)
        slot = pool.load(pages_of(modules, ODD, torch.float16))
        expected = modules[3].scaling * modules[3].lora_b.double() @ modules[3].lora_a.double()
        assert torch.allclose(read_back(pool, slot, modules[3]), expected, atol=1e-5)
        pool.unload(slot)
        assert pool.num_free_pages == free
    with pytest.raises(KeyError):
        pool.unload(slot)


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    adapter = pages_of(random_modules(8, ODD, torch.float16), ODD, torch.float16)
    few_pages = empty_pool(ODD, torch.float16, num_pages=adapter.pages.shape[0] + 1)
    few_slots = empty_pool(ODD, torch.float16, max_slots=2)
    for pool in (few_pages, few_slots):
        slot = pool.load(adapter)
        before, free = pool.data.clone(), pool.num_free_pages
        with pytest.raises(PoolFull):
            pool.load(adapter)
        assert torch.equal(pool.data.view(torch.int16), before.view(torch.int16))
        assert pool.num_free_pages == free
        pool.unload(slot)
        pool.load(adapter)


def test_what_doesnt_fit_the_base_or_the_pool_is_refused() -> None:
    def make(
        modules: list[LoraModule], page_num_elements: int = PAGE_NUM_ELEMENTS, dtype: torch.dtype = torch.float16
    ) -> None:
        make_pages(modules, num_layers=NUM_LAYERS, module_shapes=ODD, page_num_elements=page_num_elements, dtype=dtype)

    good = random_modules({"q_proj": 4}, ODD, torch.float16)
    with pytest.raises(ShapeMismatch, match="layer 7"):
        make([LoraModule(7, "q_proj", good[0].lora_a, good[0].lora_b, 1.0)])
    with pytest.raises(ShapeMismatch, match="lm_head"):
        make([LoraModule(0, "lm_head", good[0].lora_a, good[0].lora_b, 1.0)])
    with pytest.raises(ShapeMismatch, match="twice"):
        make([good[0], good[0]])
    with pytest.raises(ShapeMismatch, match="rank 513"):
        make(random_modules({"k_proj": 513}, ODD, torch.float16))
    with pytest.raises(ShapeMismatch, match=r"this base takes \(r, 200\)"):
        make([LoraModule(0, "q_proj", good[0].lora_a[:, 1:], good[0].lora_b, 1.0)])
    with pytest.raises(ShapeMismatch, match="make pages larger"):
        make(good, page_num_elements=512)
    with pytest.raises(ShapeMismatch, match="float32"):
        make(good, dtype=torch.float32)
    with pytest.raises(ShapeMismatch, match="another page size, dtype or base"):
        empty_pool(ODD, torch.bfloat16).load(pages_of(good, ODD, torch.float16))
    with pytest.raises(ShapeMismatch, match="another page size, dtype or base"):
        empty_pool(EVEN, torch.float16).load(pages_of(good, ODD, torch.float16))
