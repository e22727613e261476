import pytest
import torch

from loraserve_kernels.common.plan import make_plan
from loraserve_kernels.cpu.lora.layout import ReplacedNorm, pack_adapter
from loraserve_kernels.errors import InvalidPlan

from .conftest import NUM_LAYERS, SHAPES, make_adapter


def test_a_base_only_step_has_no_plan() -> None:
    assert make_plan([], 5) is None


def test_neighbouring_segments_of_same_adapter_are_joined() -> None:
    a, b = make_adapter(4), make_adapter(8)
    plan = make_plan([(a, 0, 1), (a, 1, 3), (b, 3, 4), (a, 5, 6), (a, 7, 8)], 9)
    assert plan is not None
    assert [(s.adapter is a, s.row_start, s.row_end) for s in plan.segments] == [
        (True, 0, 3),
        (False, 3, 4),
        (True, 5, 6),
        (True, 7, 8),
    ]


@pytest.mark.parametrize("rows", [[(0, 2), (1, 3)], [(2, 3), (0, 1)], [(1, 1)], [(3, 6)], [(-1, 2)]])
def test_overlapping_unordered_empty_or_outside_rows_are_refused(rows: list[tuple[int, int]]) -> None:
    adapter = make_adapter(4)
    with pytest.raises(InvalidPlan):
        make_plan([(adapter, start, end) for start, end in rows], 5)


def test_adapters_of_two_bases_dont_share_a_plan() -> None:
    other = pack_adapter([], num_layers=3, module_shapes=SHAPES, dtype=torch.float32)
    with pytest.raises(InvalidPlan, match="layers and widths"):
        make_plan([(make_adapter(4), 0, 1), (other, 1, 2)], 2)


def test_a_step_knows_whether_an_adapter_has_norms() -> None:
    plain, norm = make_adapter(4), ReplacedNorm(1, "mlp_norm", torch.ones(40))
    normed = pack_adapter([], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.int8, norms=[norm])
    without, with_norms = make_plan([(plain, 0, 1)], 3), make_plan([(plain, 0, 1), (normed, 2, 3)], 3)
    assert without is not None
    assert with_norms is not None
    assert (without.has_norms, with_norms.has_norms) == (False, True)
