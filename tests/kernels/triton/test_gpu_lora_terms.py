"""What an adapter may have beside ranks: numbers of each rank, δ and shifts without ranks, rows in
the place of the base's.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from paged_pools import EVEN, ODD, Fleet, random_modules

from loraserve_kernels.common.modules import SITES, LoraModule, ReplacedRows

from .stepping import make_step

pytestmark = pytest.mark.interpreted

TERMS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("dtype", "has_bias"), [(torch.float16, False), (torch.bfloat16, True)], ids=["fp16", "bf16 with bias"]
)
@pytest.mark.parametrize("site", ["qkv", "gate_up", "down", "lm_head"])
def test_shift_is_added_last_with_or_without_ranks(dtype: torch.dtype, site: str, has_bias: bool) -> None:
    fleet = Fleet([8, 17], ODD, dtype, stored=[dtype, torch.int8], has_shift=TERMS, has_delta=("v_proj", "down_proj"))
    # neither has ranks; the second has nothing else in the first layer
    alone = random_modules(0, ODD, dtype, has_shift=TERMS, has_delta=("q_proj", "down_proj"))
    fleet.add(alone, dtype)
    fleet.add([*random_modules(0, ODD, dtype, [0]), *random_modules(0, ODD, dtype, [1], has_shift=ODD)], torch.int8)
    a, b, c, d = fleet.slots
    for layer in (0, 1):
        assert make_step(fleet, [b, 0, a, c, d, b, c], site, has_bias=has_bias).is_right(layer)


def test_delta_without_ranks_scales_own_rows_alone() -> None:
    fleet = Fleet([4], EVEN, torch.float16)
    slot = fleet.add(random_modules(0, EVEN, torch.float16, has_delta=EVEN), torch.int8)
    for site in SITES:
        y_dtype = torch.float32 if site == "embed" else None
        assert make_step(fleet, [slot, 0, fleet.slots[0], slot], site, y_dtype=y_dtype).is_right()


@pytest.mark.parametrize("stored", [torch.float16, torch.int8], ids=["fp16", "int8"])
def test_each_rank_has_own_number(stored: torch.dtype) -> None:
    fleet = Fleet([4], ODD, torch.float16)
    modules = [
        replace(m, scaling=torch.randn(m.lora_a.shape[0])) for m in random_modules(20, ODD, stored, has_delta=ODD)
    ]
    slot = fleet.add(modules, stored)
    for site in ("qkv", "embed"):
        assert make_step(fleet, [slot, 0, slot], site, y_dtype=torch.float32).is_right()


@pytest.mark.parametrize(("block_m", "y_dtype", "has_bias"), [(16, torch.float32, False), (32, None, True)])
@pytest.mark.parametrize("shapes", [ODD, EVEN], ids=["odd", "even"])
def test_head_rows_of_adapter_replace_base_rows(
    shapes: dict[str, tuple[int, int]], block_m: int, y_dtype: torch.dtype | None, has_bias: bool
) -> None:
    dtype = torch.bfloat16 if has_bias else torch.float16
    stored = [dtype, torch.int8, torch.int8, dtype]
    fleet = Fleet(
        [8, 3, 5, 0], shapes, dtype, stored=stored,
        has_delta=["lm_head"], has_shift=["lm_head"], num_rows={"lm_head": 70},
    )  # fmt: skip
    # every row, and nothing else
    whole = fleet.add(random_modules({"lm_head": 0}, shapes, dtype, num_rows={"lm_head": shapes["lm_head"][0]}), dtype)
    a, b, c, d, _ = fleet.slots
    rows = [d, 0, b, a, whole, c, *[b] * 17, 0, d, whole]
    assert make_step(fleet, rows, "lm_head", y_dtype=y_dtype, block_m=block_m, has_bias=has_bias).is_right()


@pytest.mark.parametrize(("block_m", "y_dtype"), [(16, torch.float32), (32, None)])
@pytest.mark.parametrize("shapes", [ODD, EVEN], ids=["odd", "even"])
def test_an_adapters_tokens_take_the_bases_place(
    shapes: dict[str, tuple[int, int]], block_m: int, y_dtype: torch.dtype | None
) -> None:
    fleet = Fleet(
        [8, 3, 5, 0], shapes, torch.float16, stored=[torch.float16, torch.int8, torch.int8, torch.float16],
        has_delta=["embed_tokens"], num_rows={"embed_tokens": 70},
    )  # fmt: skip
    vocab_size = shapes["embed_tokens"][1]
    everything = random_modules({"embed_tokens": 0}, shapes, torch.float16, num_rows={"embed_tokens": vocab_size})
    whole = fleet.add(everything, torch.float16)
    a, b, c, d, _ = fleet.slots
    step = make_step(
        fleet, [d, 0, a, whole, *[b] * 40, *[d] * 20, 0, c, whole], "embed", y_dtype=y_dtype, block_m=block_m
    )
    ids = fleet.packed[b].row_overrides(0, "embed_tokens").ids.long()
    # the first, the last and others that are replaced, their neighbours, the ends of the vocabulary
    step.x[4:24] = torch.cat((ids[:8], ids[-8:], ids[:2] + 1, torch.tensor([0, vocab_size - 1])))
    step.x[44:50] = fleet.packed[d].row_overrides(0, "embed_tokens").ids.long()[::12]
    assert step.is_right()


@pytest.mark.parametrize("site", ["lm_head", "embed"])
def test_row_bits_do_not_depend_on_foreign_replacements(site: str) -> None:
    module = SITES[site][0]
    fleet = Fleet([4, 4, 0], EVEN, torch.float16, stored=[torch.float16, torch.int8], num_rows={module: 37})
    other = fleet.add(random_modules({module: 2}, EVEN, torch.float16, num_rows={module: 200}), torch.float16)
    a, b, c, _ = fleet.slots
    rows = [b, a, 0, other, *[b] * 18, c]
    together = make_step(fleet, rows, site, y_dtype=torch.float32)
    together.run()
    for row in (0, 1, 3, 20, 22):
        alone = make_step(fleet, [rows[row]], site, y_dtype=torch.float32)
        alone.x[0], alone.y[0] = together.x[row], together.before[row]
        assert torch.equal(alone.run()[0], together.y[row])
    base = together.y[2]
    assert torch.equal(base, together.before[2])


def test_unloaded_adapter_replaces_no_rows() -> None:
    fleet = Fleet([4, 4], EVEN, torch.float16, num_rows={"lm_head": 40})
    a, b = fleet.slots
    step = make_step(fleet, [b, a], "lm_head")
    fleet.pool.unload(b)
    step.plan.fill(torch.tensor([b, a], dtype=torch.int32).numpy())
    assert torch.equal(step.run()[0], step.before[0])


def test_nan_in_replaced_row_stays_in_column() -> None:
    fleet = Fleet([4], EVEN, torch.float16)
    rows = ReplacedRows(torch.tensor([3, 9], dtype=torch.int32), torch.randn(2, 256))
    rows.weight[1, 5] = float("nan")
    slot = fleet.add(
        [LoraModule(0, "lm_head", torch.zeros(0, 256), torch.zeros(384, 0), 1.0, row_overrides=rows)], torch.float16
    )
    y = make_step(fleet, [slot, fleet.slots[0], 0], "lm_head").run()
    assert y[0].isnan().nonzero().flatten().tolist() == [9]
    assert y[1:].isfinite().all()
