"""A step in micro-batches has the same rows, of whole sequences, in the same order."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch

from loraserve.engine.parallel.micro_batches import MIN_ROWS, cut_step
from loraserve.model.inputs import ModelInputs, PooledRows
from loraserve_kernels.common.plan import make_plan
from loraserve_kernels.cpu.lora.layout import PackedAdapter, pack_adapter


def adapter() -> PackedAdapter:
    return pack_adapter([], num_layers=1, module_shapes={"q_proj": (8, 8)}, dtype=torch.float32)


def step(counts: list[int], *, pooled: PooledRows | None = None) -> ModelInputs:
    """Sequences of so many rows; an adapter on the middle third of them, another on the last."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    num_rows = starts[-1]
    third = num_rows // 3
    return ModelInputs(
        token_ids=torch.arange(num_rows) + 100,
        positions=torch.arange(num_rows),
        slot_mapping=torch.arange(num_rows) * 2,
        query_starts=starts,
        context_lens=[count + 5 for count in counts],
        block_tables=torch.arange(3 * len(counts), dtype=torch.int32).view(-1, 3),
        logits_rows=torch.tensor([end - 1 for end in starts[1:]]),
        lora=make_plan([(adapter(), third, 2 * third), (adapter(), 2 * third, num_rows)], num_rows),
        pooled=pooled,
    )


def test_parts_together_are_the_step() -> None:
    for counts in ([4] * 8, [1, 2, 30, 1, 1, 9], [40, 1, 1, 1], [7, 7, 7]):
        for most in (2, 3, 4, 7):
            whole = step(counts)
            parts = cut_step(whole, most)
            assert 1 < len(parts) <= most
            for name in ("token_ids", "positions", "slot_mapping", "block_tables"):
                assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
            assert [length for part in parts for length in part.context_lens] == whole.context_lens
            firsts = [0]
            for part in parts:
                firsts.append(firsts[-1] + len(part.token_ids))
                assert part.query_starts[0] == 0
                assert part.query_starts[-1] == len(part.token_ids)
            starts = [
                first + start for first, part in zip(firsts, parts, strict=False) for start in part.query_starts[:-1]
            ]
            assert [*starts, firsts[-1]] == whole.query_starts
            rows = [part.logits_rows + first for first, part in zip(firsts, parts, strict=False)]  # type: ignore[operator]
            assert torch.equal(torch.cat(rows), cast(torch.Tensor, whole.logits_rows))
            assert by_row(parts) == by_row([whole])


def by_row(parts: list[ModelInputs]) -> list[int | None]:
    """The adapter of each row."""
    rows: list[int | None] = []
    for part in parts:
        found: list[int | None] = [None] * len(part.token_ids)
        for segment in () if part.lora is None else part.lora.segments:
            for row in range(segment.row_start, segment.row_end):
                found[row] = id(segment.adapter)
        rows += found
    return rows


def test_parts_have_about_equal_rows() -> None:
    sizes = [len(part.token_ids) for part in cut_step(step([3, 5, 2, 7, 1, 6, 4, 4]), 4)]
    assert sizes == [8, 9, 7, 8]


def test_small_step_is_single_micro_batch() -> None:
    for counts in ([2 * MIN_ROWS - 1], [300], [1] * (2 * MIN_ROWS - 1)):
        whole = step(counts)
        assert cut_step(whole, 4) == [whole]
    assert len(cut_step(step([1] * 2 * MIN_ROWS), 4)) == 2


def test_pooled_rows_go_with_own_sequences() -> None:
    kept = torch.tensor([3, 5, 6, 7, 11, 15])
    pooled = PooledRows(kept, torch.tensor([0, 3, 5]), torch.tensor([1, 2, 4]))
    whole = step([4, 4, 4, 4], pooled=pooled)
    parts = cut_step(whole, 2)
    firsts = [0, 8]
    found = [
        (kept_row, first + int(part.pooled.kept[place]))
        for kept_row, name in ((True, "logits_places"), (False, "hidden_places"))
        for first, part in zip(firsts, parts, strict=True)
        if part.pooled is not None
        for place in getattr(part.pooled, name)
    ]
    assert found == [(True, 3), (True, 7), (True, 15), (False, 5), (False, 6), (False, 11)]
    assert [bool(a < b) for part in parts if part.pooled for a, b in pairwise(part.pooled.kept)] == [True] * 4
