"""The table of docs/clients.md says what is tested, and what is tested is in it."""

from __future__ import annotations

import datetime
import re

import pytest

from .table import COLUMNS, FOLDED, HAND_RUNS, HERE, ROOT, ROWS, HandRun, Row, rendered

DOCS = ROOT / "docs" / "clients.md"


def test_the_page_has_the_table_of_the_tests() -> None:
    assert rendered() in DOCS.read_text(), "docs/clients.md: python -m tests.clients.table prints the right table"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group}-{row}")
def test_row_lists_only_features_of_script(row: Row) -> None:
    text = row.path.read_text()
    pattern = r"^  async (\w+)\(\) \{" if row.group == "node" else r"^@feature\n(?:async )?def (\w+)"
    written = set(re.findall(pattern, text, re.MULTILINE))
    named = set(row.tested)
    assert named <= written, f"{row.script} hasn't {named - written}"
    assert {FOLDED.get(name, name) for name in named} <= set(COLUMNS)
    assert row.version


def test_each_script_feature_is_in_row() -> None:
    for script in {row.script for row in ROWS}:
        rows = [row for row in ROWS if row.script == script]
        text = rows[0].path.read_text()
        written = set(re.findall(r"^(?:@feature\n(?:async )?def|  async) (\w+)\(", text, re.MULTILINE))
        assert written == {name for row in rows for name in row.tested}, script


def test_every_script_has_a_row() -> None:
    scripts = {path.name for folder in ("python", "node") for path in (HERE / folder).glob("*.[pm]*")}
    shared = {"probe.py", "probe.mjs", "program.py", "relay.py"}
    assert scripts - shared == {row.script for row in ROWS}


@pytest.mark.parametrize("run", HAND_RUNS, ids=lambda run: run.client)
def test_hand_run_has_version_and_day(run: HandRun) -> None:
    assert re.fullmatch(r"\d+(\.\d+)+", run.version)
    assert datetime.date.fromisoformat(run.date) <= datetime.datetime.now(datetime.UTC).date()
    assert {FOLDED.get(name, name) for name in run.features.split()} <= set(COLUMNS)
    # a client with a test needs no trial by hand
    assert run.client not in {row.client for row in ROWS}
