"""Figures of docs/scale.md that are calculated: from the newest results, by formulas that hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.scale import Measured

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("exponent", [0.6, 0.9])
def test_zipf_sum_matches_exact_sum_for_many_ranks(exponent: float) -> None:
    assert scale.zipf_sum(300_000, exponent) == pytest.approx(math.fsum(k**-exponent for k in range(1, 300_001)))


def test_load_makes_get_per_config_and_weight_piece() -> None:
    assert [scale.gets_per_load(num_bytes) for num_bytes in (1, 8 << 20, (8 << 20) + 1, 26 << 20)] == [2, 2, 3, 5]


def test_all_adapters_in_memory_are_found_there() -> None:
    measured = Measured.load()
    num_machines = scale.NUM_VERSIONS // measured.adapters_per_machine + 1
    assert scale.in_memory(num_machines, measured) == 1
    assert scale.loads_per_s(num_machines, measured) == 0


def test_page_has_the_tables_of_the_newest_results() -> None:
    page = (DOCS / "scale.md").read_text()
    for table in scale.tables():
        assert table in page, f"put this table in the place of the old one:\n{table}"
    for source in Measured.load().sources:
        assert source.rpartition("/")[2] in page
