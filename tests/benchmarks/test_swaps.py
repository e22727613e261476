"""What is made of the measurements of swaps."""

from __future__ import annotations

import argparse

from benchmarks import swaps
from benchmarks.swaps import Leftovers, Swaps

OPTIONS = argparse.Namespace(size="S", swaps=20, adapters=500)


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
    for name, value in fields.items():
        setattr(measured, name, value)
    return measured


def test_rows_bytes_and_versions_are_left_overs_and_usage_is_the_invoices() -> None:
    assert make_leftovers().is_clean
    assert not any(
        make_leftovers(**fields).is_clean
        for fields in ({"rows": {"adapters": 1}}, {"held_bytes": 1.0}, {"held_versions": 1.0})
    )


def test_the_page_has_the_first_token_from_the_loads_answer_and_both_together() -> None:
    load, token, both = swaps.times_table(make_swaps()).splitlines()[2:5]
    assert load.startswith("| load, to its answer | 200 | 200 |")
    assert token.startswith("| **first token of the new version**, from there | 50.0 | 90.0 |")
    assert both.startswith("| both together | 250 |")


def test_the_page_says_what_was_stale_wrong_or_left() -> None:
    page = swaps.text(OPTIONS, make_swaps(num_stale=3, num_wrong=4), make_leftovers(rows={"aliases": 7}), 5_200_000)
    for words in (
        "at the median: **10.0 ms** (100 at most)",
        "Stale KV: **3** of 20",
        "Wrong version: **4**.",
        "2.0e-05 at most",
        "by 3.00 at least",
        "**7 rows** {'aliases': 7}",
        "What went wrong: nothing.",
    ):
        assert words in page, words
