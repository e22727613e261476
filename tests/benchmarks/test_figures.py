"""What is made of measurements."""

from __future__ import annotations

import math

import pytest

from benchmarks import figures

TEXT = """# TYPE loraserve_adapter_bytes gauge
loraserve_adapter_bytes{tier="device"} 10.0
loraserve_adapter_bytes{tier="host"} 5.0
# TYPE loraserve_adapter_loads counter
loraserve_adapter_loads_total 3.0
"""


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_percentile_is_of_the_nearest_rank(percent: float, value: int) -> None:
    assert figures.percentile(list(range(100, 0, -1)), percent) == value


def test_percentile_handles_single_value_and_empty_list() -> None:
    assert figures.percentile([3.0], 99) == 3.0
    assert math.isnan(figures.percentile([], 50))


def test_metrics_are_summed_over_unrequested_labels() -> None:
    scrape = figures.parse(TEXT)
    assert figures.total(scrape, "loraserve_adapter_bytes") == 15.0
    assert figures.total(scrape, "loraserve_adapter_bytes", tier="host") == 5.0
    assert figures.total(scrape, "loraserve_adapter_bytes", tier="disk") == 0.0


def test_increase_is_difference_between_scrapes() -> None:
    before, after = figures.parse(TEXT), figures.parse(TEXT.replace("_total 3.0", "_total 8.0"))
    assert figures.increase(before, after, "loraserve_adapter_loads_total") == 5.0


def test_bar_in_cell_is_escaped() -> None:
    assert figures.table(["a"], [["b|c"]]) == "| a |\n| --- |\n| b\\|c |"


def test_missing_numbers_are_dashes() -> None:
    assert figures.ms(math.nan) == figures.percent(math.nan) == figures.number(math.nan) == "–"


def test_milliseconds_have_a_decimal_below_a_hundred() -> None:
    assert (figures.ms(0.0123), figures.ms(1.2345)) == ("12.3", "1234")
