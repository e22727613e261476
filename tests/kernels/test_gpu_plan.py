import subprocess
import sys
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from paged_pools import EVEN, MIXED_RANKS, ODD, Fleet, random_modules

from loraserve_kernels import ops
from loraserve_kernels.common.modules import SITES
from loraserve_kernels.errors import InvalidPlan, TensorMismatch
from loraserve_kernels.gpu.lora import plan as gpu_plan
from loraserve_kernels.gpu.lora.plan import HEADER, NO_WORK, REPLACED_AT, SITE_INDEX, GpuLoraPlan, split_k
from loraserve_kernels.gpu.paged.layout import REPLACED_GROUP, REPLACED_WORK

STORED = [torch.float16, torch.int8, torch.float16, torch.int8, torch.float16]


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    torch.manual_seed(0)
    return Fleet(MIXED_RANKS, ODD, torch.float16, stored=STORED, has_delta=["v_proj"])


def make_slots(fleet: Fleet, num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).choice([0, *fleet.slots], num_tokens).astype(np.int32)


def words_of(fleet: Fleet, slot: int, site: str) -> list[list[int]]:
    """For each of the site's slices: 0, tiles, first tile, whether there is a δ or a shift."""
    index = list(SITES).index(site)
    words: list[list[int]] = fleet.pool.sites[slot, index, 4:].reshape(3, 4).tolist()
    return words


@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize(("num_tokens", "num_sampled"), [(1, 1), (63, None), (63, 20), (1000, 3)])
def test_each_row_meets_each_adapter_tile_once(
    fleet: Fleet, num_tokens: int, num_sampled: int | None, block_m: int
) -> None:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=1000, max_work_items=2000, block_m=block_m)
    slots = make_slots(fleet, num_tokens) if num_tokens > 1 else np.array(fleet.slots[:1], dtype=np.int32)
    sampled = None
    if num_sampled is not None:
        sampled = np.sort(np.random.default_rng(1).choice(num_tokens, num_sampled, replace=False)).astype(np.int32)
    assert plan.fill(slots, sampled)
    buffer = plan.buffer.numpy()
    perm = buffer[HEADER:]
    for index, (site, modules) in enumerate(SITES.items()):
        num_items, items_at, num_row_tiles, row_tiles_at = buffer[4 * index : 4 * index + 4].tolist()
        assert items_at % 4 == row_tiles_at % 16 == 0
        site_slots = slots[sampled] if site == "lm_head" and sampled is not None else slots
        expected = Counter(
            (row, first_tile + t)
            for row, slot in enumerate(site_slots)
            for _, num_tiles, first_tile, _ in words_of(fleet, slot, site)
            for t in range(num_tiles)
        )
        items = buffer[items_at : items_at + 4 * num_items].reshape(-1, 4).tolist()
        assert Counter((int(perm[row0 + i]), tile) for row0, n, tile, _ in items for i in range(n)) == expected, site
        # what expand will read: a slice's items, in order, each with its tile
        seen: Counter[tuple[int, int]] = Counter()
        for row_tile in buffer[row_tiles_at : row_tiles_at + 16 * num_row_tiles].reshape(-1, 16).tolist():
            row0, num_rows, kind, _ = row_tile[:4]
            assert 1 <= num_rows <= block_m
            rows = [int(perm[row0 + i]) for i in range(num_rows)]
            slot = int(site_slots[rows[0]])
            assert {int(site_slots[row]) for row in rows} == {slot}
            assert kind == (STORED[fleet.slots.index(slot)] == torch.int8)
            for s, (_, num_tiles, first_tile, has_delta) in enumerate(words_of(fleet, slot, site)):
                first_item = row_tile[4 + 4 * s]
                assert row_tile[5 + 4 * s : 8 + 4 * s] == [num_tiles, first_tile, has_delta]
                assert has_delta == (slot in fleet.slots[1::2] and modules[s : s + 1] == ("v_proj",))
                for j in range(num_tiles):
                    assert items[first_item + j] == [row0, num_rows, first_tile + j, kind]
                    seen.update((row, first_tile + j) for row in rows)
        assert seen == expected


def test_step_is_filled_while_previous_copy_waits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=40, max_work_items=100)
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    copy = torch.Tensor.copy_
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking: waiting.append((self, source)))
        plan.fill(make_slots(fleet, 40, 1))
        first = waiting[0][1].clone()
        plan.fill(make_slots(fleet, 40, 2))
    assert torch.equal(waiting[0][1], first)
    copy(*waiting[0])
    third = make_slots(fleet, 40, 3)
    plan.fill(third)
    found = plan.buffer.clone()
    copy(*waiting[1])
    plan.fill(third)
    header = found[:HEADER]
    assert torch.equal(header, plan.buffer[:HEADER])


def test_sampled_rows_cost_no_work_without_head_adapter() -> None:
    lonely = Fleet([{"q_proj": 8}, {"q_proj": 8, "lm_head": 4}], EVEN, torch.float16)
    plan = GpuLoraPlan(lonely.pool, max_num_tokens=8, max_work_items=8)
    a, b = lonely.slots
    everything, one = np.full(8, a, dtype=np.int32), np.array([3], dtype=np.int32)
    plan.fill(everything, one)
    assert plan.buffer[4 * SITE_INDEX["lm_head"]] == plan.buffer[4 * SITE_INDEX["lm_head"] + 2] == 0
    everything[3] = b
    plan.fill(everything, one)
    assert (plan.num_tokens, plan.num_sampled) == (8, 1)
    assert plan.buffer[4 * SITE_INDEX["lm_head"]] == plan.buffer[4 * SITE_INDEX["lm_head"] + 2] == 1
    # the head's row stands behind the layers' eight and is its own first
    tiles_at = int(plan.buffer[4 * SITE_INDEX["lm_head"] + 3])
    assert plan.buffer[tiles_at : tiles_at + 2].tolist() == [8, 1]
    assert plan.buffer[HEADER + 8] == 0


def test_replaced_rows_count_as_work_only_at_ends() -> None:
    torch.manual_seed(0)
    ends = Fleet(
        [{"q_proj": 8, "lm_head": 4}, {"q_proj": 8, "lm_head": 4}], EVEN, torch.float16, num_rows={"lm_head": 33}
    )
    plan = GpuLoraPlan(ends.pool, max_num_tokens=64, max_work_items=20)
    a, b = ends.slots
    embedder = random_modules({"embed_tokens": 0}, EVEN, torch.float16, num_rows={"embed_tokens": 16})
    c = ends.add(embedder, torch.float16)
    d = ends.add(random_modules({"lm_head": 0}, EVEN, torch.float16, num_rows={"lm_head": 3}), torch.float16)

    def works(row_slots: list[int]) -> tuple[list[int], list[list[int]]]:
        plan.fill(np.array(row_slots, dtype=np.int32))
        _, _, num_row_tiles, tiles_at = plan.buffer[4 * SITE_INDEX["lm_head"] :][:4].tolist()
        tiles = plan.buffer[tiles_at : tiles_at + 16 * num_row_tiles].view(-1, 16)
        return plan.buffer[REPLACED_AT : REPLACED_AT + len(SITES)].tolist(), tiles[
            :, [REPLACED_WORK, REPLACED_GROUP]
        ].tolist()

    # two row tiles of a's, two of b's, which share three times sixteen rows, one of c's, which
    # replaces none here
    assert works([a, b] * 17) == ([0, 0, 0, 0, 6, 0], [[0, 2], [NO_WORK, 2], [0, 2], [NO_WORK, 2]])
    assert works([c, b]) == ([0, 0, 0, 0, 3, 1], [[0, 1]])
    assert works([a, b, d, d]) == ([0, 0, 0, 0, 4, 0], [[0, 1], [0, 1], [3, 1]])
    # what the step before had is gone
    assert works([a, 0])[0] == [0] * 6


def test_rows_of_same_adapter_share_tiles_across_positions(fleet: Fleet) -> None:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=40, max_work_items=100)
    a, b = fleet.slots[0], fleet.slots[1]
    plan.fill(np.array([a, 0, b, a] * 10, dtype=np.int32))
    # twenty rows of a in two tiles, ten of b in one
    assert plan.buffer[2] == 3


def test_step_of_base_rows_launches_no_kernel(fleet: Fleet) -> None:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=8, max_work_items=8)
    assert not plan.fill(np.zeros(8, dtype=np.int32))
    assert not plan.fill(np.zeros(0, dtype=np.int32))
    assert plan.fill(np.array(fleet.slots[:1], dtype=np.int32))


def test_addresses_stay_from_step_to_step(fleet: Fleet) -> None:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=100, max_work_items=500)
    addresses = plan.buffer.data_ptr(), plan.scratch.data_ptr()
    for seed, num_tokens in enumerate((100, 1, 64)):
        plan.fill(make_slots(fleet, num_tokens, seed))
        assert (plan.buffer.data_ptr(), plan.scratch.data_ptr()) == addresses


def test_oversized_step_is_refused_and_previous_step_stays(fleet: Fleet) -> None:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=8, max_work_items=3)
    plan.fill(np.array([fleet.slots[0]] * 3, dtype=np.int32))
    before = plan.buffer.clone()
    with pytest.raises(InvalidPlan, match="9 rows"):
        plan.fill(np.zeros(9, dtype=np.int32))
    with pytest.raises(InvalidPlan, match="work items at site qkv"):
        plan.fill(np.array(fleet.slots, dtype=np.int32))
    with pytest.raises(InvalidPlan, match="slots 0 to 99"):
        plan.fill(np.array([0, 99], dtype=np.int32))
    with pytest.raises(InvalidPlan, match="slots -1"):
        plan.fill(np.array([-1], dtype=np.int32))
    assert plan.num_tokens == 3
    assert torch.equal(plan.buffer, before)
    with pytest.raises(InvalidPlan, match="tiles of 64 rows"):
        GpuLoraPlan(fleet.pool, max_num_tokens=8, max_work_items=3, block_m=64)
    with pytest.raises(InvalidPlan, match="sampled rows, 0 to 3, of a step of 3"):
        plan.fill(np.zeros(3, dtype=np.int32), np.array([0, 3], dtype=np.int32))


def test_largest_step_fits_buffer(fleet: Fleet) -> None:
    # one row for each tile, and as many work items as the plan takes
    slot = fleet.slots[-1]
    num_items = sum(words[1] for words in words_of(fleet, slot, "qkv"))
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=16, max_work_items=num_items)
    assert plan.fill(np.array([slot] * 16, dtype=np.int32))


@pytest.mark.parametrize(("in_features", "parts"), [(40, 1), (1024, 2), (4096, 8), (14336, 16)])
def test_the_number_of_parts_follows_the_length_alone(in_features: int, parts: int) -> None:
    assert split_k("qkv", in_features) == parts
    assert split_k("embed", in_features) == 1


def test_number_of_python_lines_is_independent_of_rows(fleet: Fleet) -> None:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=8192, max_work_items=20_000)

    def num_lines(slots: np.ndarray) -> int:
        lines = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal lines
            lines += event == "line" and frame.f_code.co_filename == gpu_plan.__file__
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            plan.fill(slots)
        finally:
            sys.settrace(before)
        return lines

    # both have adapters with more rows than a tile
    assert num_lines(make_slots(fleet, 8192)) == num_lines(make_slots(fleet, 200)) > 0


def test_wrong_plan_is_refused_without_loading_triton(fleet: Fleet) -> None:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=8, max_work_items=8)
    x, y = torch.zeros(1, 72, dtype=torch.float16), torch.zeros(1, 200, dtype=torch.float16)
    with pytest.raises(TensorMismatch, match="GPUs take a GpuLoraPlan"):
        ops.apply_lora(x, y, plan, "o", 0)
    script = "import sys, loraserve_kernels.ops; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
