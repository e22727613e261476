import pytest
import torch
from pairwise import pairwise_and_campaign

from loraserve_kernels import ops
from loraserve_kernels.common.plan import make_plan
from loraserve_kernels.cpu.lora import apply as cpu_lora
from loraserve_kernels.cpu.lora.layout import DTYPES, LAYER_SITES, MODULES, SITES
from loraserve_kernels.errors import TensorMismatch

from .conftest import SHAPES, make_adapter
from .lora_steps import PATHS, Apply, assert_equals_reference, launched, make_io, make_step

MODULES_OF_MIXED_RANK = {
    "q_proj": 1,
    "v_proj": 12,
    "gate_proj": 64,
    "up_proj": 8,
    "down_proj": 5,
    "lm_head": 3,
    "embed_tokens": 20,
}


@pytest.mark.parametrize("apply", PATHS)
@pytest.mark.parametrize(("dtype", "site", "num_tokens"), pairwise_and_campaign(DTYPES, list(SITES), [1, 63, 200]))
def test_mixed_ranks_equal_the_reference(apply: Apply, dtype: torch.dtype, site: str, num_tokens: int) -> None:
    ranks = [1, 64, MODULES_OF_MIXED_RANK, 8, 12]
    adapters = [make_adapter(rank, dtype=dtype) for rank in ranks]
    if num_tokens == 1:
        plan = make_step([adapters[2]], [1])
    else:
        # one row, two rows, an odd number of rows; base rows between and at the end
        rows = [1, 2, 5, 3, 1, 1, num_tokens - 13]
        plan = make_step([adapters[0], None, adapters[1], adapters[2], adapters[3], None, adapters[4]], rows)
    assert_equals_reference(apply, plan, site, 1)


@pytest.mark.parametrize("apply", PATHS)
@pytest.mark.parametrize("site", SITES)
def test_adapters_of_mixed_dtypes_share_a_step(apply: Apply, site: str) -> None:
    adapters = [make_adapter(rank, dtype=dtype) for rank, dtype in zip((8, 3, 12, 5), DTYPES, strict=True)]
    assert_equals_reference(apply, make_step([*adapters, None, adapters[0]], [2, 3, 1, 2, 2, 4]), site, 1)


@pytest.mark.parametrize("apply", PATHS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("site", SITES)
def test_delta_scales_own_modules_except_bias(apply: Apply, site: str, has_bias: bool) -> None:
    some = ("q_proj", "v_proj", "up_proj", "lm_head", "embed_tokens")
    adapters = [
        make_adapter(8, has_delta=MODULES),
        make_adapter(3, has_delta=some, dtype=torch.bfloat16),
        make_adapter(5),
        make_adapter(dict.fromkeys(some, 2), has_delta=some),
    ]
    bias = torch.randn(sum(SHAPES[m][0] for m in SITES[site])) * 3 if has_bias and site != "embed" else None
    plan = make_step([adapters[0], None, adapters[1], adapters[2], adapters[3]], [2, 1, 35, 1, 3])
    assert_equals_reference(apply, plan, site, 1, bias=bias)


@pytest.mark.parametrize("apply", PATHS)
@pytest.mark.parametrize("site", SITES)
def test_an_adapters_only_delta_is_found(apply: Apply, site: str) -> None:
    adapter = make_adapter({SITES[site][0]: 4}, has_delta=MODULES, layers=[1 if site in LAYER_SITES else 0])
    assert_equals_reference(apply, make_step([adapter, None], [2, 1]), site, 1)


@pytest.mark.parametrize("apply", PATHS)
def test_rank_512_equals_the_reference(apply: Apply) -> None:
    assert_equals_reference(apply, make_step([make_adapter({"k_proj": 512, "q_proj": 3}), None], [3, 1]), "qkv", 0)


@pytest.mark.parametrize("apply", PATHS)
@pytest.mark.parametrize("site", SITES)
def test_base_rows_keep_every_bit(apply: Apply, site: str) -> None:
    adapter = make_adapter(8, has_delta=MODULES, has_shift=MODULES, rows=dict.fromkeys(MODULES, 3))
    plan = make_step([None, adapter, None], [2, 4, 3])
    x, y = make_io(9, site)
    # a base row's input must not even be read
    if site != "embed":
        x[:2] = x[6:] = float("nan")
    before = y.clone()
    apply(x, y, plan, site, 0)
    assert torch.equal(y[:2], before[:2])
    assert torch.equal(y[6:], before[6:])
    assert not torch.equal(y[2:6], before[2:6])


@pytest.mark.parametrize("apply", PATHS)
def test_module_missing_from_adapter_keeps_columns(apply: Apply) -> None:
    plan = make_step([make_adapter({"q_proj": 4, "v_proj": 4})], [3])
    x, y = make_io(3, "qkv")
    before = y.clone()
    apply(x, y, plan, "qkv", 0)
    assert torch.equal(y[:, 72:96], before[:, 72:96])
    assert not torch.equal(y[:, :72], before[:, :72])
    assert not torch.equal(y[:, 96:], before[:, 96:])


@pytest.mark.parametrize("apply", PATHS)
def test_layer_missing_from_adapter_changes_no_output(apply: Apply) -> None:
    plan = make_step([make_adapter(4, layers=[1])], [3])
    x, y = make_io(3, "down")
    before = y.clone()
    apply(x, y, plan, "down", 0)
    assert torch.equal(y, before)


@pytest.mark.parametrize("apply", PATHS)
def test_nan_of_adapter_stays_in_own_rows(apply: Apply) -> None:
    good, bad = make_adapter(8), make_adapter(8)
    bad.data.fill_(float("nan"))
    plan = make_step([good, bad, good], [2, 1, 2])
    x, y = make_io(5, "o")
    apply(x, y, plan, "o", 0)
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("apply", PATHS)
def test_rows_of_wider_tensors_are_processed_in_place(apply: Apply) -> None:
    plan = make_step([make_adapter(8)], [4])
    x, y = make_io(4, "o")
    wide_x, wide_y = torch.full((4, 100), float("nan")), torch.full((4, 90), float("nan"))
    wide_x[:, 20:92], wide_y[:, 10:50] = x, y
    apply(x, y, plan, "o", 1)
    apply(wide_x[:, 20:92], wide_y[:, 10:50], plan, "o", 1)
    assert torch.allclose(wide_y[:, 10:50], y, atol=1e-5)
    assert wide_y[:, :10].isnan().all()
    assert wide_y[:, 50:].isnan().all()


@pytest.mark.skipif(not cpu_lora.HAS_NUMBA, reason="needs numba")
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_bits_are_independent_of_batch(site: str, dtype: torch.dtype) -> None:
    adapter = make_adapter(
        MODULES_OF_MIXED_RANK,
        dtype=dtype,
        has_delta=("v_proj", "up_proj", "lm_head", "embed_tokens"),
        has_shift=("q_proj", "o_proj", "up_proj"),
        rows=dict.fromkeys(MODULES, 70) | {"q_proj": 5, "k_proj": 1, "v_proj": 24, "o_proj": 40, "down_proj": 40},
    )
    other, layer = make_adapter(64, dtype=dtype), 1 if site in LAYER_SITES else 0
    x, y = make_io(70, site)
    if site == "embed":
        # tokens with rows of their own
        x[30:] = torch.arange(40)
    together = y.clone()
    launched(x, together, make_step([other, adapter, None, other], [3, 60, 2, 5]), site, layer)
    for row in (3, 4, 34, 35, 62):
        alone = y[row : row + 1].clone()
        launched(x[row : row + 1], alone, make_step([adapter], [1]), site, layer)
        assert torch.equal(alone[0], together[row])


@pytest.mark.skipif(not cpu_lora.HAS_NUMBA, reason="needs numba")
def test_row_bits_are_independent_of_thread_count() -> None:
    plan = make_step([make_adapter(64), make_adapter(12)], [40, 30])
    x, y = make_io(70, "gate_up")
    results, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            out = y.clone()
            # threads are counted when a plan is first launched
            ops.apply_lora(
                x, out, make_plan([(s.adapter, s.row_start, s.row_end) for s in plan.segments], 70), "gate_up", 0
            )
            results.append(out)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.skipif(not cpu_lora.HAS_NUMBA, reason="needs numba")
def test_expand_waits_for_the_other_threads_shrink() -> None:
    # one long shrink task: a second thread that didn't wait would expand what the other layer left
    # behind
    adapter = make_adapter({"down_proj": 16})
    x, y = make_io(32, "down")
    expected, before = [], torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for layer in range(2):
            expected.append(y.clone())
            ops.apply_lora(x, expected[layer], make_step([adapter], [32]), "down", layer)
        torch.set_num_threads(2)
        plan = make_step([adapter], [32])
        for i in range(200):
            out = y.clone()
            ops.apply_lora(x, out, plan, "down", i % 2)
            assert torch.equal(out, expected[i % 2])
    finally:
        torch.set_num_threads(before)


def test_tensors_not_fitting_plan_are_refused() -> None:
    plan = make_step([make_adapter(8)], [4])
    x, y = make_io(4, "qkv")
    with pytest.raises(TensorMismatch, match="site qkv of this plan takes"):
        ops.apply_lora(x[:3], y[:3], plan, "qkv", 0)
    with pytest.raises(TensorMismatch, match="site o of this plan takes"):
        ops.apply_lora(x, y, plan, "o", 0)
    with pytest.raises(TensorMismatch, match="must be float32"):
        ops.apply_lora(x.double(), y, plan, "qkv", 0)
    with pytest.raises(TensorMismatch, match="layers 0 to 1"):
        ops.apply_lora(x, y, plan, "qkv", 2)
    with pytest.raises(TensorMismatch, match=r"bias is torch\.float32 \(7,\)"):
        ops.apply_lora(x, y, plan, "qkv", 1, torch.zeros(7))
    with pytest.raises(TensorMismatch, match="call apply_embedding_lora"):
        ops.apply_lora(x, y, plan, "embed", 0)
    ids, embedded = make_io(4, "embed")
    with pytest.raises(TensorMismatch, match=r"takes \(4,\) and \(4, 40\)"):
        ops.apply_embedding_lora(ids[:3], embedded, plan)
    with pytest.raises(TensorMismatch, match="int64 and float32"):
        ops.apply_embedding_lora(ids.int(), embedded, plan)
