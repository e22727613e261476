import subprocess
import sys
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from paged_pools import MIXED_RANKS, ODD, Fleet

from loraserve_kernels import gpu_plan, launch
from loraserve_kernels.errors import InvalidPlan, ShapeMismatch
from loraserve_kernels.gpu_plan import HEADER, GpuLoraPlan, split_k
from loraserve_kernels.layout import MODULE_INDEX, SITES


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    torch.manual_seed(0)
    return Fleet(MIXED_RANKS, ODD, torch.float16)


def make_slots(fleet: Fleet, num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).choice([0, *fleet.slots], num_tokens).astype(np.int32)


@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize("num_tokens", [1, 63, 1000])
def test_every_row_meets_every_tile_of_its_adapter_once(fleet: Fleet, num_tokens: int, block_m: int) -> None:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=1000, max_work_items=2000, block_m=block_m)
    slots = make_slots(fleet, num_tokens) if num_tokens > 1 else np.array(fleet.slots[:1], dtype=np.int32)
    assert plan.fill(slots)
    buffer = plan.buffer.numpy()
    perm = buffer[HEADER:]
    for index, (site, modules) in enumerate(SITES.items()):
        num_items, items_at, num_row_tiles, row_tiles_at = buffer[4 * index : 4 * index + 4].tolist()
        assert items_at % 16 == row_tiles_at % 16 == 0
        columns = [MODULE_INDEX[module] for module in modules]
        expected = Counter(
            (row, int(fleet.pool.first_tiles[slot, c]) + t)
            for row, slot in enumerate(slots)
            for c in columns
            for t in range(int(fleet.pool.num_tiles[slot, c]))
        )
        items = buffer[items_at : items_at + 4 * num_items].reshape(-1, 4).tolist()
        assert Counter((int(perm[row0 + i]), tile) for row0, n, tile, _ in items for i in range(n)) == expected, site
        # what expand will read: a slice's items, in order, each with its tile
        seen: Counter[tuple[int, int]] = Counter()
        for row_tile in buffer[row_tiles_at : row_tiles_at + 16 * num_row_tiles].reshape(-1, 16).tolist():
            row0, num_rows = row_tile[:2]
            assert 1 <= num_rows <= block_m
            for s, column in enumerate(columns):
                first_item, count, first_tile, _ = row_tile[4 + 4 * s : 8 + 4 * s]
                for j in range(count):
                    assert items[first_item + j] == [row0, num_rows, first_tile + j, 0]
                    seen.update((int(perm[row0 + i]), first_tile + j) for i in range(num_rows))
                for i in range(num_rows):
                    slot = int(slots[perm[row0 + i]])
                    assert count == fleet.pool.num_tiles[slot, column]
            assert not any(row_tile[4 + 4 * len(columns) :])
        assert seen == expected


def test_rows_of_one_adapter_share_tiles_wherever_they_stand(fleet: Fleet) -> None:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=40, max_work_items=100)
    a, b = fleet.slots[0], fleet.slots[1]
    plan.fill(np.array([a, 0, b, a] * 10, dtype=np.int32))
    # twenty rows of a in two tiles, ten of b in one
    assert plan.buffer[2] == 3


def test_a_step_of_base_rows_launches_nothing(fleet: Fleet) -> None:
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


def test_a_step_over_the_plans_capacity_is_refused_and_the_last_one_stands(fleet: Fleet) -> None:
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


def test_the_largest_step_fits_its_buffer(fleet: Fleet) -> None:
    # one row for each tile, and as many work items as the plan takes
    slot = fleet.slots[-1]
    num_items = int(fleet.pool.num_tiles[slot, :3].sum())
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=16, max_work_items=num_items)
    assert plan.fill(np.array([slot] * 16, dtype=np.int32))


@pytest.mark.parametrize(("in_features", "parts"), [(40, 1), (1024, 2), (4096, 8), (14336, 16)])
def test_the_number_of_parts_follows_the_length_alone(in_features: int, parts: int) -> None:
    assert split_k(in_features) == parts


def test_python_runs_the_same_lines_whatever_the_number_of_rows(fleet: Fleet) -> None:
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

    assert num_lines(make_slots(fleet, 8192)) == num_lines(make_slots(fleet, 32)) > 0


def test_the_wrong_plan_for_a_device_is_refused_without_loading_triton(fleet: Fleet) -> None:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=8, max_work_items=8)
    x, y = torch.zeros(1, 72, dtype=torch.float16), torch.zeros(1, 200, dtype=torch.float16)
    with pytest.raises(ShapeMismatch, match="GPUs take a GpuLoraPlan"):
        launch.apply_lora(x, y, plan, "o", 0)
    script = "import sys, loraserve_kernels.launch; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
