"""What is made of the measurements of swaps."""

from __future__ import annotations

import argparse
from typing import get_args

from benchmarks import swaps
from benchmarks.swaps import Leftovers, Swaps
from loraserve.settings import Settings

OPTIONS = argparse.Namespace(size="S", quantize="none", swaps=20, adapters=500)


def make_leftovers(**fields: object) -> Leftovers:
    clean = {
        "num_adapters": 500,
        "num_used": 50,
        "wall_s": 9.0,
        "rows": {},
        "usage_rows": 1,
        "held_bytes": 0.0,
        "held_versions": 0.0,
        "device_adapters": 0.0,
        "host_adapters": 0.0,
        "descriptors": 0,
        "server_rss_growth": 1 << 20,
        "engine_rss_growth": 1 << 20,
    }
    return Leftovers(**{**clean, **fields})  # type: ignore[arg-type]


def make_swaps(**fields: object) -> Swaps:
    measured = Swaps(load_s=[0.2] * 20, first_token_s=[0.05] * 10 + [0.09] * 10, whole_s=[0.25] * 20)
    measured.resident_s = [0.04] * 20
    measured.num_checked, measured.differences, measured.neighbours = 2, [1e-5, 2e-5], [3.0, 4.0]
    measured.stream_gaps, measured.stream_neighbours = [0.0, 3e-6], [8.0, 9.0]
    measured.waits_s = {"queue": [0.001] * 20, "prefill": [0.03] * 20}
    for name, value in fields.items():
        setattr(measured, name, value)
    return measured


def test_leftover_rows_bytes_or_versions_are_not_clean() -> None:
    assert make_leftovers().is_clean
    assert not any(
        make_leftovers(**fields).is_clean
        for fields in ({"rows": {"adapters": 1}}, {"held_bytes": 1.0}, {"held_versions": 1.0})
    )


def test_rows_of_server_are_not_leftovers() -> None:
    before = {"adapters": 3, "usage_hours": 1, "leases": 0, "store_stamps": 0, "fds": 20}
    after = {"adapters": 4, "usage_hours": 2, "leases": 1, "store_stamps": 1, "fds": 25}
    assert swaps.more_rows(before, after) == {"adapters": 1, "usage_hours": 1, "fds": 5, "leases": 1, "store_stamps": 1}
    assert swaps.left_rows(before, after) == {"adapters": 1}


def test_page_shows_load_first_token_and_combined_time() -> None:
    load, token, both = swaps.times_table(make_swaps()).splitlines()[2:5]
    assert load.startswith("| load, to its answer | 200 | 200 |")
    assert token.startswith("| **first token of the new version**, from there | 50.0 | 90.0 |")
    assert both.startswith("| both together | 250 |")


def test_page_reports_stale_wrong_and_leftover_counts() -> None:
    page = swaps.text(OPTIONS, make_swaps(num_stale=3, num_wrong=4), make_leftovers(rows={"aliases": 7}), 5_200_000)
    for words in (
        "at the median: **10.0 ms** (100 at most)",
        "Stale KV: **3** of 20",
        "Wrong version: **4**.",
        "2.0e-05 at most",
        "by 3.00 at least (the bound is 0.002)",
        "falls short of PEFT's likeliest by 3.0e-06 at most, and of the version before's by 8.00 at least",
        "**7 rows** {'aliases': 7}",
        "What went wrong: nothing.",
    ):
        assert words in page, words


def test_page_names_base_format_and_bound() -> None:
    page = swaps.text(
        argparse.Namespace(**{**vars(OPTIONS), "quantize": "int8"}), make_swaps(), make_leftovers(), 5_200_000
    )
    assert "Size S, base int8;" in page
    assert f"(the bound is {swaps.MAX_DIFFERENCE['int8']:g})" in page
    assert "| of the first token, in the engine: queue | 1.0 |" in page


def test_the_servers_own_times_are_read() -> None:
    assert swaps.waits_s("queue;dur=0.4, adapter;dur=12.0, prefill;dur=250.0") == {
        "queue": 0.0004,
        "adapter": 0.012,
        "prefill": 0.25,
    }
    assert swaps.waits_s("") == {}


def test_check_unable_to_distinguish_versions_is_error() -> None:
    assert make_swaps().margin_error(0.002) is None
    assert make_swaps(neighbours=[], stream_neighbours=[]).margin_error(0.002) is None
    assert "only 3.00 away" in (make_swaps().margin_error(1.0) or "")
    assert "only 0.01 away" in (make_swaps(stream_neighbours=[0.008]).margin_error(0.002) or "")


def test_each_server_format_has_bound() -> None:
    assert set(swaps.MAX_DIFFERENCE) == set(get_args(Settings.model_fields["quantize"].annotation))
