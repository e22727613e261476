import pytest
import torch

pytest.importorskip("triton")

from paged_pools import EVEN, MIXED_RANKS, ODD, Fleet, random_modules

from loraserve_kernels import gpu_lora
from loraserve_kernels.errors import ShapeMismatch
from loraserve_kernels.layout import SITES

from .stepping import make_step

pytestmark = pytest.mark.interpreted

SHAPES = {"odd": ODD, "even": EVEN}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mixed_rows(fleet: Fleet) -> list[int]:
    """Base rows between others, one adapter over more than one tile of 16 rows, one with a single row."""
    a, b, c, d, e = fleet.slots
    return [0, d, a, 0, c, d, b, a, e, *[c] * 16, 0]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(
    ("pool_dtype", "dtype", "block_m"),
    [
        (torch.float16, torch.float16, 16),
        (torch.float16, torch.float16, 32),
        (torch.bfloat16, torch.bfloat16, 16),
        (torch.int8, torch.float16, 16),
        (torch.int8, torch.bfloat16, 32),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_mixed_ranks_and_base_rows_equal_the_reference(
    site: str, shapes: str, pool_dtype: torch.dtype, dtype: torch.dtype, block_m: int
) -> None:
    fleet = Fleet(MIXED_RANKS, SHAPES[shapes], pool_dtype)
    assert make_step(fleet, mixed_rows(fleet), site, dtype, block_m=block_m).is_right()


@pytest.mark.parametrize("num_tokens", [1, 63])
def test_any_number_of_rows_equals_the_reference(num_tokens: int) -> None:
    fleet = Fleet([3, 24], ODD, torch.float16)
    slots = [0, *fleet.slots]
    rows = [slots[(5 * i + 1) % 3] for i in range(num_tokens)]
    assert make_step(fleet, rows, "o", torch.float16).is_right()


def test_rank_512_beside_rank_1_equals_the_reference() -> None:
    fleet = Fleet([{"k_proj": 512, "q_proj": 3}, {"v_proj": 1}], EVEN, torch.float16)
    a, b = fleet.slots
    assert make_step(fleet, [b, a, 0, a], "qkv", torch.float16).is_right()


def test_a_module_that_the_adapter_lacks_keeps_its_columns() -> None:
    fleet = Fleet([{"q_proj": 4, "v_proj": 4}], ODD, torch.float16)
    step = make_step(fleet, [fleet.slots[0]] * 3, "qkv", torch.float16)
    step.y[:, 72:95] = step.before[:, 72:95] = float("nan")
    step.y[0, 72] = step.before[0, 72] = -0.0
    y = step.run()
    assert torch.equal(y[:, 72:95].contiguous().view(torch.int16), step.before[:, 72:95].contiguous().view(torch.int16))
    assert y[:, :72].isfinite().all()
    assert y[:, 95:].isfinite().all()


def test_layers_with_other_ranks_or_none_share_a_plan() -> None:
    fleet = Fleet([8], ODD, torch.float16)
    deep = random_modules({"q_proj": 40, "k_proj": 2}, ODD, torch.float16, [0])
    shallow = random_modules({"q_proj": 3}, ODD, torch.float16, [1])
    slot = fleet.add([*deep, *shallow], torch.float16)
    rows = [slot, 0, fleet.slots[0], slot]
    for layer in (0, 1):
        assert make_step(fleet, rows, "qkv", torch.float16).is_right(layer)


def test_one_plan_serves_steps_one_after_the_other() -> None:
    fleet = Fleet([40, 8], EVEN, torch.float16)
    a, b = fleet.slots
    first = make_step(fleet, [a, b, a, 0, b], "down", torch.float16)
    assert first.is_right()
    second = make_step(fleet, [b, 0, a], "down", torch.float16)
    # the scratch of the first step still holds its sums
    first.plan.fill(torch.tensor(second.row_slots, dtype=torch.int32).numpy())
    second.plan = first.plan
    assert second.is_right()


@pytest.mark.parametrize("site", ["qkv", "down"])
def test_a_rows_bits_dont_depend_on_its_batch(site: str) -> None:
    fleet = Fleet([40, 8, 12], EVEN, torch.float16)
    a, b, c = fleet.slots
    rows = [b, a, 0, *[a] * 18, c, b]
    together = make_step(fleet, rows, site, torch.float16)
    together.run()
    for row in (0, 1, 7, 20, 21):
        alone = make_step(fleet, [rows[row]], site, torch.float16)
        alone.x[0], alone.y[0] = together.x[row], together.before[row]
        assert torch.equal(alone.run()[0], together.y[row])


def test_one_adapters_nan_stays_in_its_rows() -> None:
    fleet = Fleet([8], ODD, torch.float16)
    bad = random_modules(8, ODD, torch.float16)
    for m in bad:
        m.lora_a.fill_(float("nan"))
    good, poisoned = fleet.slots[0], fleet.add(bad, torch.float16)
    y = make_step(fleet, [good, poisoned, good, 0], "qkv", torch.float16).run()
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()


def test_an_unloaded_adapters_slot_serves_the_next() -> None:
    fleet = Fleet([8, 24], ODD, torch.float16)
    fleet.pool.unload(fleet.slots[0])
    del fleet.packed[fleet.slots[0]]
    slot = fleet.add(random_modules(5, ODD, torch.float16), torch.float16)
    assert make_step(fleet, [slot, fleet.slots[0], 0], "gate_up", torch.float16).is_right()


def test_tensors_that_dont_fit_the_plan_are_refused() -> None:
    fleet = Fleet([8], ODD, torch.float16)
    step = make_step(fleet, [fleet.slots[0]] * 3, "o", torch.float16)
    x, y, plan = step.x, step.y, step.plan
    for bad_x, bad_y in ((x[:2], y[:2]), (x[:, 1:], y), (x, y[:, 1:]), (x[:, :1].expand(3, 72), y)):
        with pytest.raises(ShapeMismatch):
            gpu_lora.apply_lora(bad_x, bad_y, plan, "o", 0)
    with pytest.raises(ShapeMismatch, match=r"pool of torch\.float16"):
        gpu_lora.apply_lora(x.bfloat16(), y.bfloat16(), plan, "o", 0)
    with pytest.raises(ShapeMismatch, match="layers 0 to 1"):
        gpu_lora.apply_lora(x, y, plan, "o", 2)
    with pytest.raises(ShapeMismatch, match="site lm_head"):
        gpu_lora.apply_lora(x, y, plan, "lm_head", 0)
    assert torch.equal(y, step.before)
