import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from paged_pools import EVEN, MIXED_RANKS, ODD, Fleet, random_modules
from pairwise import pairwise_and_campaign

from loraserve_kernels.cpu.lora.layout import SITES
from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.lora import apply as gpu_lora

from .stepping import make_step

pytestmark = pytest.mark.interpreted

SHAPES = {"odd": ODD, "even": EVEN}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mixed_rows(fleet: Fleet) -> list[int]:
    """Base rows between others, one adapter over more than one tile of 16 rows,
    one with a single row.
    """
    a, b, c, d, e = fleet.slots
    return [0, d, a, 0, c, d, b, a, e, *[c] * 16, 0]


LAUNCHES = [
    ("odd", torch.float16, 16),
    ("odd", torch.bfloat16, 32),
    ("even", torch.float16, 32),
    ("even", torch.bfloat16, 16),
]


@pytest.mark.parametrize(
    ("site", "shapes", "dtype", "block_m"),
    pairwise_and_campaign(
        list(SITES),
        ["odd", "even"],
        [torch.float16, torch.bfloat16],
        [16, 32],
        allowed=[(site, *launch) for site in SITES for launch in LAUNCHES],
    ),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_mixed_ranks_dtypes_and_base_rows_equal_reference(
    site: str, shapes: str, dtype: torch.dtype, block_m: int
) -> None:
    stored = [dtype, torch.int8, torch.int8, dtype, torch.int8]
    fleet = Fleet(MIXED_RANKS, SHAPES[shapes], dtype, stored=stored)
    y_dtype = torch.float32 if site in ("lm_head", "embed") and block_m == 16 else dtype
    assert make_step(fleet, mixed_rows(fleet), site, y_dtype=y_dtype, block_m=block_m).is_right()


@pytest.mark.parametrize(
    ("dtype", "has_bias"), [(torch.float16, False), (torch.bfloat16, True)], ids=["fp16", "bf16 with bias"]
)
@pytest.mark.parametrize("site", SITES)
def test_delta_scales_own_modules_except_bias(dtype: torch.dtype, site: str, has_bias: bool) -> None:
    with_delta = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head", "embed_tokens")
    fleet = Fleet([8, 12, 5, 17], ODD, dtype, stored=[dtype, dtype, dtype, torch.int8], has_delta=with_delta)
    a, b, c, d = fleet.slots
    y_dtype = torch.float32 if site == "embed" else dtype
    bias = has_bias and site != "embed"
    assert make_step(fleet, [b, 0, a, d, b, c], site, y_dtype=y_dtype, has_bias=bias).is_right()


def test_layer_without_delta_keeps_scale() -> None:
    fleet = Fleet([], ODD, torch.float16)
    scaled = random_modules({"q_proj": 4}, ODD, torch.float16, [0], has_delta=["q_proj"])
    slot = fleet.add([*scaled, *random_modules({"q_proj": 4}, ODD, torch.float16, [1])], torch.float16)
    for layer in (0, 1):
        assert make_step(fleet, [slot, 0], "qkv").is_right(layer)


def test_sampled_rows_meet_the_heads_adapters() -> None:
    fleet = Fleet([3, 24], ODD, torch.float16, stored=[torch.float16, torch.int8])
    a, b = fleet.slots
    row_slots, sampled = [a, 0, b, a, a, b, 0], [1, 2, 4, 5]
    step = make_step(fleet, [row_slots[row] for row in sampled], "lm_head", y_dtype=torch.float32)
    step.plan.fill(np.array(row_slots, dtype=np.int32), np.array(sampled, dtype=np.int32))
    assert step.is_right()


@pytest.mark.parametrize("num_tokens", [1, 63])
def test_any_number_of_rows_equals_the_reference(num_tokens: int) -> None:
    fleet = Fleet([3, 24], ODD, torch.float16)
    slots = [0, *fleet.slots]
    rows = [slots[(5 * i + 1) % 3] for i in range(num_tokens)]
    assert make_step(fleet, rows, "o").is_right()


def test_rank_512_beside_rank_1_equals_the_reference() -> None:
    fleet = Fleet([{"k_proj": 512, "q_proj": 3}, {"v_proj": 1}], EVEN, torch.float16)
    a, b = fleet.slots
    assert make_step(fleet, [b, a, 0, a], "qkv").is_right()


def test_module_missing_in_adapter_keeps_columns() -> None:
    fleet = Fleet([{"q_proj": 4, "v_proj": 4}], ODD, torch.float16)
    step = make_step(fleet, [fleet.slots[0]] * 3, "qkv")
    step.y[:, 72:95] = step.before[:, 72:95] = float("nan")
    step.y[0, 72] = step.before[0, 72] = -0.0
    y = step.run()
    assert torch.equal(y[:, 72:95].contiguous().view(torch.int16), step.before[:, 72:95].contiguous().view(torch.int16))
    assert y[:, :72].isfinite().all()
    assert y[:, 95:].isfinite().all()


def test_layers_with_different_or_no_ranks_share_plan() -> None:
    fleet = Fleet([8], ODD, torch.float16)
    deep = random_modules({"q_proj": 40, "k_proj": 2}, ODD, torch.float16, [0])
    shallow = random_modules({"q_proj": 3}, ODD, torch.float16, [1])
    slot = fleet.add([*deep, *shallow], torch.float16)
    rows = [slot, 0, fleet.slots[0], slot]
    for layer in (0, 1):
        assert make_step(fleet, rows, "qkv").is_right(layer)


def test_same_plan_serves_consecutive_steps() -> None:
    fleet = Fleet([40, 8], EVEN, torch.float16)
    a, b = fleet.slots
    first = make_step(fleet, [a, b, a, 0, b], "down")
    assert first.is_right()
    second = make_step(fleet, [b, 0, a], "down")
    # the scratch of the first step still holds its sums
    first.plan.fill(torch.tensor(second.row_slots, dtype=torch.int32).numpy())
    second.plan = first.plan
    assert second.is_right()


@pytest.mark.parametrize("site", ["qkv", "down", "embed"])
def test_row_bits_do_not_depend_on_batch(site: str) -> None:
    stored = [torch.float16, torch.int8, torch.float16]
    fleet = Fleet([40, 8, 12], EVEN, torch.float16, stored=stored, has_delta=["v_proj", "down_proj", "embed_tokens"])
    a, b, c = fleet.slots
    rows = [b, a, 0, *[a] * 18, c, b]
    together = make_step(fleet, rows, site)
    together.run()
    for row in (0, 1, 7, 20, 21):
        alone = make_step(fleet, [rows[row]], site)
        alone.x[0], alone.y[0] = together.x[row], together.before[row]
        assert torch.equal(alone.run()[0], together.y[row])


def test_nan_of_adapter_stays_in_own_rows() -> None:
    fleet = Fleet([8], ODD, torch.float16)
    bad = random_modules(8, ODD, torch.float16)
    for m in bad:
        m.lora_a.fill_(float("nan"))
    good, poisoned = fleet.slots[0], fleet.add(bad, torch.float16)
    y = make_step(fleet, [good, poisoned, good, 0], "qkv").run()
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()


def test_an_unloaded_adapters_slot_serves_the_next() -> None:
    fleet = Fleet([8, 24], ODD, torch.float16)
    fleet.pool.unload(fleet.slots[0])
    del fleet.packed[fleet.slots[0]]
    slot = fleet.add(random_modules(5, ODD, torch.float16), torch.float16)
    assert make_step(fleet, [slot, fleet.slots[0], 0], "gate_up").is_right()


def test_tensors_mismatching_plan_are_refused() -> None:
    fleet = Fleet([8], ODD, torch.float16)
    step = make_step(fleet, [fleet.slots[0]] * 3, "o")
    x, y, plan = step.x, step.y, step.plan
    for bad_x, bad_y in ((x[:2], y[:2]), (x[:, 1:], y), (x, y[:, 1:]), (x[:, :1].expand(3, 72), y)):
        with pytest.raises(TensorMismatch):
            gpu_lora.apply_lora(bad_x, bad_y, plan, "o", 0)
    for bad_x, bad_y in ((x.bfloat16(), y.bfloat16()), (x.float(), y), (x, y.bfloat16()), (x, y.double())):
        with pytest.raises(TensorMismatch, match=r"torch\.float16"):
            gpu_lora.apply_lora(bad_x, bad_y, plan, "o", 0)
    with pytest.raises(TensorMismatch, match="layers 0 to 1"):
        gpu_lora.apply_lora(x, y, plan, "o", 2)
    with pytest.raises(TensorMismatch, match="site mlp"):
        gpu_lora.apply_lora(x, y, plan, "mlp", 0)
    with pytest.raises(TensorMismatch, match="call apply_embedding_lora"):
        gpu_lora.apply_lora(x, y, plan, "embed", 0)
    with pytest.raises(TensorMismatch, match=r"bias is torch\.float16 \(199,\)"):
        gpu_lora.apply_lora(x, y, plan, "o", 0, y[0, :199])
    ids = torch.zeros(3, dtype=torch.int64)
    for bad_ids in (ids[:2], ids.float(), ids[:, None]):
        with pytest.raises(TensorMismatch, match="token_ids"):
            gpu_lora.apply_embedding_lora(bad_ids, y, plan)
    assert torch.equal(y, step.before)
