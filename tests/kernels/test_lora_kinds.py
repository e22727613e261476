"""What an adapter may change besides adding B A: numbers of each rank, δ, shifts, rows of its own;
with or without ranks, in every dtype.
"""

import numpy as np
import pytest
import torch

from loraserve_kernels import ops
from loraserve_kernels.cpu.lora import apply as cpu_lora
from loraserve_kernels.cpu.lora.layout import (
    DTYPES,
    LAYER_SITES,
    MODULES,
    SITES,
    LoraModule,
    PackedAdapter,
    ReplacedRows,
    pack_adapter,
)

from .conftest import NUM_LAYERS, SHAPES, make_adapter, make_modules
from .lora_steps import PATHS, Apply, assert_equals_reference, expected_by, launched, make_io, make_step

needs_numba = pytest.mark.skipif(not cpu_lora.HAS_NUMBA, reason="needs numba")
ALL_ROWS = dict.fromkeys(MODULES, 10_000)
SOME_ROWS = dict.fromkeys(MODULES, 70) | {"q_proj": 67, "k_proj": 1, "v_proj": 24, "o_proj": 5}


def of_all_kinds(rank: int, dtype: torch.dtype = torch.float32, rows: dict[str, int] = SOME_ROWS) -> PackedAdapter:
    return make_adapter(rank, dtype=dtype, has_delta=MODULES, has_shift=MODULES, rows=rows, is_scaled_by_rank=True)


def random_bias(site: str) -> torch.Tensor | None:
    return None if site == "embed" else torch.randn(sum(SHAPES[m][0] for m in SITES[site])) * 3


@pytest.mark.parametrize("apply", PATHS)
@pytest.mark.parametrize("site", SITES)
def test_adapters_of_all_kinds_and_dtypes_share_step(apply: Apply, site: str) -> None:
    changed = [of_all_kinds(rank, dtype) for rank, dtype in zip((5, 0, 3, 9), DTYPES, strict=True)]
    adapters = [changed[0], None, changed[1], make_adapter(4), changed[2], changed[3]]
    assert_equals_reference(apply, make_step(adapters, [1, 2, 35, 1, 2, 3]), site, 1, bias=random_bias(site))


@pytest.mark.parametrize("apply", PATHS)
@pytest.mark.parametrize("site", SITES)
def test_an_adapters_only_change_is_found(apply: Apply, site: str) -> None:
    module, layer = SITES[site][-1], 1 if site in LAYER_SITES else 0
    only = [
        make_adapter({module: 0}, has_delta=[module], layers=[layer]),
        make_adapter({module: 0}, rows={module: 2}, layers=[layer], dtype=torch.int8),
        make_adapter({module: 0}, has_shift=[module], layers=[layer], dtype=torch.float16),
    ]
    for adapter in only[:2] if site == "embed" else only:
        x, y = make_io(3, site)
        if site == "embed":
            x[0] = adapter.row_ids[0] if len(adapter.row_ids) else x[0]
        before, plan = y.clone(), make_step([adapter, None], [2, 1])
        expected = y.double()
        expected_by(x, expected, plan, site, layer)
        apply(x, y, plan, site, layer)
        assert torch.allclose(y.double(), expected, atol=1e-6)
        assert not torch.equal(y, before)


@pytest.mark.parametrize("site", SITES)
def test_the_reference_is_the_formula(site: str) -> None:
    rows = dict.fromkeys(MODULES, 7)
    layer, modules = (
        1 if site in LAYER_SITES else 0,
        make_modules(3, has_delta=MODULES, has_shift=MODULES, rows=rows, is_scaled_by_rank=True),
    )
    packed = pack_adapter(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)
    by_name = {m.module: m for m in modules if m.layer == layer}
    x, _ = make_io(4, site)
    if site == "embed":
        x[1:3] = packed.row_overrides(0, "embed_tokens").ids[:2]
    inputs = torch.nn.functional.one_hot(x, 2105).double() if site == "embed" else x.double()
    outputs, expected = [], []
    bias = random_bias(site)
    for name in SITES[site]:
        m, weight = by_name[name], torch.randn(SHAPES[name], dtype=torch.float64)
        outputs.append(inputs @ weight.T)
        changed = weight.T.clone() if site == "embed" else weight.clone()
        changed[m.row_overrides.ids.long()] = m.row_overrides.weight.double()
        changed = changed.T if site == "embed" else changed
        update = m.lora_b.double() @ torch.diag(m.scaling.double()) @ m.lora_a.double()
        expected.append((1 + m.dora_delta.double()) * (inputs @ (changed + update).T))
    y, result = torch.cat(outputs, 1), torch.cat(expected, 1)
    if bias is not None:
        y, result = y + bias, result + bias + torch.cat([by_name[name].bias_delta for name in SITES[site]])
    expected_by(x if site == "embed" else x.double(), y, make_step([packed], [4]), site, layer, bias)
    assert torch.allclose(y, result, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("apply", PATHS)
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_replacing_all_rows_removes_base_output(apply: Apply, site: str, dtype: torch.dtype) -> None:
    adapter, bias = make_adapter(0, rows=ALL_ROWS, dtype=dtype), random_bias(site)
    x, y = make_io(37, site)
    y[1:36] = float("nan")
    before = y.clone()
    apply(x, y, make_step([None, adapter, None], [1, 35, 1]), site, 0, bias)
    weights = [adapter.row_overrides(0, module).pick(slice(None), torch.float32) for module in SITES[site]]
    expected = weights[0][x] if site == "embed" else x @ torch.cat(weights).T + bias
    assert torch.allclose(y[1:36], expected[1:36], atol=1e-5, rtol=0 if site == "embed" else 1e-5)
    assert torch.equal(y[[0, 36]], before[[0, 36]])


@pytest.mark.parametrize("apply", PATHS)
@pytest.mark.parametrize("ids", [[0], [7, 9, 2104], [5, 6, 7], [0, 3, 4, 700, 2103]])
def test_tokens_with_replaced_rows_are_found_exactly(apply: Apply, ids: list[int]) -> None:
    table = torch.randn(len(ids), 40)
    module = LoraModule(
        0,
        "embed_tokens",
        torch.zeros(0, 2105),
        torch.zeros(40, 0),
        1.0,
        row_overrides=ReplacedRows(torch.tensor(ids).int(), table),
    )
    packed = pack_adapter([module], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)
    x = torch.tensor(sorted({0, 1, 2104, *ids, *(i + 1 for i in ids if i < 2104), *(i - 1 for i in ids if i)}))
    y = torch.randn(len(x), 40)
    expected = y.clone()
    for row, token_id in enumerate(x.tolist()):
        if token_id in ids:
            expected[row] = table[ids.index(token_id)]
    apply(x, y, make_step([packed], [len(x)]), "embed", 0)
    assert torch.equal(y, expected)


@needs_numba
@pytest.mark.parametrize("site", SITES)
def test_scratch_and_gaps_arent_read(site: str) -> None:
    adapters = [of_all_kinds(5), of_all_kinds(0)]
    layer, bias = 1 if site in LAYER_SITES else 0, random_bias(site)
    x, y = make_io(40, site)
    expected = y.clone()
    launched(x, expected, make_step([*adapters], [36, 4]), site, layer, bias)
    for adapter in adapters:
        poison_gaps(adapter)
    plan = make_step([*adapters], [36, 4])
    launched(x, y.clone(), plan, site, layer, bias)
    plan.launches[site].scratch.fill(float("nan"))
    plan.launches[site].tiles.fill(float("nan"))
    launched(x, y, plan, site, layer, bias)
    assert torch.equal(y, expected)


def poison_gaps(adapter: PackedAdapter) -> None:
    """What is no weight becomes NaN."""
    data, floats = torch.full_like(adapter.data, float("nan")), torch.full_like(adapter.floats, float("nan"))
    for buffer, poisoned in ((adapter.data, data), (adapter.floats, floats)):
        for layer in range(NUM_LAYERS):
            for module in MODULES:
                rows = adapter.row_overrides(layer, module)
                views = (
                    [adapter.lora_a(layer, module), adapter.lora_b(layer, module)]
                    if buffer is adapter.data
                    else [
                        adapter.scaling(layer, module),
                        adapter.dora_delta(layer, module),
                        adapter.bias_delta(layer, module),
                    ]
                )
                views += [rows.weight] if rows is not None and buffer is adapter.data else []
                for view in views:
                    if view is not None:
                        start = view.storage_offset()
                        poisoned[start : start + view.numel()] = view.flatten()
        buffer.copy_(poisoned)


@needs_numba
@pytest.mark.parametrize("site", ["gate_up", "embed"])
def test_bits_do_not_depend_on_thread_count(site: str) -> None:
    adapters, bias = [of_all_kinds(5, rows=ALL_ROWS), of_all_kinds(0, torch.int8)], random_bias(site)
    x, y = make_io(70, site)
    results, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            out = y.clone()
            launched(x, out, make_step([*adapters], [40, 30]), site, 0, bias)
            results.append(out)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_numba
def test_adapters_without_rows_have_no_tiles() -> None:
    plan = make_step([make_adapter(4)], [3])
    x, y = make_io(3, "o")
    ops.apply_lora(x, y, plan, "o", 0)
    assert plan.launches["o"].tiles.size == 0


@needs_numba
def test_each_thread_of_launch_has_own_tile() -> None:
    from loraserve_kernels.cpu.lora import kernel as lora_kernel

    x, y = make_io(3, "o")
    plan, before = make_step([make_adapter(0, rows=SOME_ROWS)], [3]), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(2):
            launched(x, y, plan, "o", 0)
    finally:
        torch.set_num_threads(before)
    prepared = plan.launches["o"]
    launch = prepared.launches[0]
    # little work is one thread's; each launch counts anew
    assert (launch.num_threads, launch.args[lora_kernel.ENTERED]) == (1, 1)
    prepared.tiles.fill(float("nan"))
    launch.args[[lora_kernel.CLAIMED, lora_kernel.FINISHED]] = 0
    launch.kernel.call(launch.address)
    # that was the second to enter
    assert np.isnan(prepared.tiles[0]).all()
    assert not np.isnan(prepared.tiles[1]).all()
