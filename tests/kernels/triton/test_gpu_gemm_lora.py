import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from paged_pools import EVEN, ODD, Fleet, Ranks, random_modules

from loraserve_kernels.errors import ShapeMismatch
from loraserve_kernels.gpu.gemm import gemm as gpu_gemm
from loraserve_kernels.gpu.gemm.gemm import weight_only_linear, weight_only_linear_lora
from loraserve_kernels.gpu.lora.apply import apply_lora

from .gemm_steps import LoraStep, make_lora_step

pytestmark = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they take several row tiles each."""
    torch.manual_seed(0)
    monkeypatch.setattr(gpu_gemm, "_LORA_PROGRAMS", 12)


RANKS: list[Ranks] = [1, 8, {"q_proj": 5, "v_proj": 64, "up_proj": 20, "down_proj": 33}, 16]


def make_fleet(dtype: torch.dtype = torch.float16) -> Fleet:
    """Adapters in 16 bits and in int8, the second and the fourth with a δ or a shift for some modules."""
    return Fleet(
        RANKS, EVEN, dtype, stored=(dtype, torch.int8),
        has_delta={"q_proj", "v_proj", "o_proj", "down_proj"}, has_shift={"q_proj", "o_proj", "up_proj"},
    )  # fmt: skip


def rows_of(fleet: Fleet, num_rows: int) -> list[int]:
    """Base rows between others; each adapter on several rows that don't follow each other."""
    slots = [0, *fleet.slots]
    return [slots[(7 * i + i // 5) % 5] for i in range(num_rows)]


@pytest.mark.parametrize(
    ("site", "num_rows", "format", "dtype", "block_m", "has_bias"),
    [
        ("qkv", 11, "int4", torch.float16, 16, True),
        ("o", 40, "int8", torch.float16, 16, False),
        ("gate_up", 5, "plain", torch.float16, 16, False),
        ("down", 11, "nf4", torch.float16, 16, True),
        ("down", 64, "fp8", torch.float16, 32, True),
        ("qkv", 7, "int8", torch.bfloat16, 16, False),
        ("down", 9, "int8-64", torch.float16, 16, True),
    ],
)
def test_one_launch_equals_the_reference(
    site: str, num_rows: int, format: str, dtype: torch.dtype, block_m: int, has_bias: bool
) -> None:
    fleet = make_fleet(dtype)
    step = make_lora_step(fleet, rows_of(fleet, num_rows), site, format, block_m=block_m, has_bias=has_bias)
    assert step.is_right()
    assert step.is_fused


@pytest.mark.parametrize(("site", "format"), [("qkv", "int4"), ("down", "int8")])
def test_one_launch_equals_the_two_steps(site: str, format: str) -> None:
    fleet = make_fleet()
    step = make_lora_step(fleet, rows_of(fleet, 13), site, format, has_bias=True)
    one, two = step.run(), step.two_steps()
    # each rounds to float16 once more than the other's sum needs
    assert (one - two).abs().max() <= 2 * torch.finfo(torch.float16).eps * two.abs().max()
    assert torch.equal(one[step.is_base].view(torch.int16), two[step.is_base].view(torch.int16))


def test_a_rows_bits_depend_on_that_row_alone() -> None:
    fleet = make_fleet()
    slots = rows_of(fleet, 16)
    together = make_lora_step(fleet, slots, "o", "int4")
    y = together.run()
    for rows in ([3], [9, 0], [1, 2, 4, 6]):
        alone = make_lora_step(fleet, [slots[row] for row in rows], "o", "int4")
        alone.x, alone.weight = together.x[rows], together.weight
        assert torch.equal(alone.run().view(torch.int16), y[rows].view(torch.int16))


def test_the_number_of_parts_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet()
    step = make_lora_step(fleet, rows_of(fleet, 16), "o", "int8")
    y = step.run()
    monkeypatch.setattr(gpu_gemm, "_LORA_PROGRAMS", 4)
    assert torch.equal(step.run(), y)
    assert not gpu_gemm._counters(y.device).any()


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_one_adapters_nan_stays_in_its_rows() -> None:
    fleet = make_fleet()
    bad = random_modules(8, EVEN, torch.float16)
    for module in bad:
        module.lora_b.fill_(float("nan"))
    poisoned = fleet.add(bad, torch.float16)
    a, b, *_ = fleet.slots
    y = make_lora_step(fleet, [a, poisoned, 0, b], "o", "int4").run()
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()


def test_rows_beyond_the_plans_are_the_bases() -> None:
    fleet = make_fleet()
    step = make_lora_step(fleet, rows_of(fleet, 9), "o", "int8")
    step.plan.fill(np.array(step.row_slots[:6], dtype=np.int32))
    y = step.run()
    assert torch.equal(y[6:], weight_only_linear(step.x, step.weight)[6:])
    assert torch.equal(y[:6], make_like(step, 6).run())


def make_like(step: LoraStep, num_rows: int) -> LoraStep:
    other = make_lora_step(step.fleet, step.row_slots[:num_rows], step.site, "int8")
    other.x, other.weight = step.x[:num_rows], step.weight
    return other


@pytest.mark.parametrize(("shapes", "site", "num_rows"), [("odd", "qkv", 5), ("even", "qkv", 40), ("even", "o", 70)])
def test_other_shapes_take_the_two_steps(shapes: str, site: str, num_rows: int) -> None:
    fleet = Fleet([8, 12], {"odd": ODD, "even": EVEN}[shapes], torch.float16)
    slots = [0, *fleet.slots]
    step = make_lora_step(fleet, [slots[i % 3] for i in range(num_rows)], site, "int8")
    assert step.is_right(roundings=3)
    assert not step.is_fused


def test_the_head_whose_rows_an_adapter_may_replace_takes_the_two_steps() -> None:
    fleet = Fleet([8, 12], EVEN, torch.float16, num_rows={"lm_head": 40})
    step = make_lora_step(fleet, [fleet.slots[1], 0, fleet.slots[0]], "lm_head", "plain")
    y = weight_only_linear_lora(step.x, step.weight, None, step.plan, "lm_head", 0)
    two = weight_only_linear(step.x, step.weight, None)
    apply_lora(step.x, two, step.plan, "lm_head", 0)
    assert torch.equal(y, two)


def test_tensors_that_dont_fit_the_plan_are_refused() -> None:
    fleet = make_fleet()
    step = make_lora_step(fleet, rows_of(fleet, 5), "o", "int8")
    with pytest.raises(ShapeMismatch, match="site qkv of this plan has 384"):
        weight_only_linear_lora(step.x, step.weight, None, step.plan, "qkv", 0)
    with pytest.raises(ShapeMismatch, match="at least 5 rows"):
        weight_only_linear_lora(step.x[:4], step.weight, None, step.plan, "o", 0)
    with pytest.raises(ShapeMismatch, match="the embedding is no linear"):
        weight_only_linear_lora(step.x, step.weight, None, step.plan, "embed", 0)
    with pytest.raises(ShapeMismatch, match="layers 0 to 1"):
        weight_only_linear_lora(step.x, step.weight, None, step.plan, "o", 2)
