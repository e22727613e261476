"""What a run leaves behind."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks import reporting

FACTS = {
    "processor": "A processor",
    "instructions": ["avx2"],
    "cores": 2,
    "memory_bytes": 24 << 30,
    "python": "3.12",
    "versions": {"torch": "2.13"},
    "load_average": 0.25,
}


@dataclass(frozen=True, slots=True)
class Point:
    values: tuple[float, ...]


def test_page_names_machine_versions_date_command_and_load() -> None:
    text = reporting.describe(FACTS, reporting.command("trace", ["--quick"]), 1.5, "2026-01-02")
    for words in (
        "A processor, 2 threads, 24 GiB; avx2",
        "torch 2.13",
        "2026-01-02",
        "`make bench ARGS='trace --quick'`",
    ):
        assert words in text
    assert "a load average of 0.2 on 2 cores before the start, 1.5 at the end" in text


def test_page_and_json_are_written_and_overwritten(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        page, document = reporting.write("x", "Title", "text", {"points": [Point((value,))]}, FACTS, tmp_path / "new")
    assert page.read_text() == "# Title\n\ntext\n"
    assert json.loads(document.read_text()) == {"machine": FACTS, "points": [{"values": [2.0]}]}
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_non_finite_number_becomes_null(tmp_path: Path) -> None:
    _, document = reporting.write("x", "t", "", {"point": Point((math.nan, math.inf, 1.0))}, FACTS, tmp_path)
    assert json.loads(document.read_text())["point"] == {"values": [None, None, 1.0]}


def test_file_name_has_part_size_date_and_mode() -> None:
    assert reporting.dated("trace", "S", is_quick=False) == f"trace-S-{reporting.today()}"
    assert reporting.dated("trace", "S", is_quick=True) == f"trace-S-{reporting.today()}-quick"


def test_machine_is_described_without_hostname() -> None:
    facts = reporting.facts()
    assert facts.keys() == FACTS.keys()
    assert facts["memory_bytes"] > 1 << 28
