"""docs/adapters.md says of each field of PEFT's configs what the tables in the code say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from loraserve.adapters.config.peft_fields import FIELDS, FieldRule, Handling
from loraserve.adapters.tuners import adalora, ia3, loha, lokr, vera
from loraserve.limits import LIMITS

PAGE = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text()
PROSE = " ".join(PAGE.split())
WORDS = {Handling.IMPLEMENTED: "implemented", Handling.IGNORED: "ignored", Handling.REFUSED: "refused"}
KINDS: dict[str, Mapping[str, FieldRule]] = {
    "LoHa": loha.FIELDS,
    "LoKr": lokr.FIELDS,
    "IA3": ia3.FIELDS,
    "VeRA": vera.FIELDS,
    "AdaLoRA": adalora.FIELDS,
}


def rows(heading: str) -> list[list[str]]:
    """The cells of every table between this heading and the next."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_loraconfig_field_has_row_stating_treatment() -> None:
    table = {row[0].strip("` "): row[1] for row in rows("Every field of LoraConfig") if row[0].startswith("`")}
    assert set(table) == set(FIELDS)
    wrong = [name for name, cell in table.items() if not cell.startswith(WORDS[FIELDS[name].handling])]
    assert not wrong


def test_every_row_cites_behaviour_of_peers() -> None:
    for row in rows("Every field of LoraConfig")[1:]:
        if row[0].startswith("---"):
            continue
        assert len(row) == 4, row
        for cell in row[2:]:
            assert "[^" in cell or "not found" in cell, row


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_further_kinds_are_listed_by_treatment(kind: str) -> None:
    table = rows("The other kinds")
    heading = next(index for index, row in enumerate(table) if row[0] == "kind")
    row = next(row for row in table[heading:] if row[0] == kind)
    listed = dict(zip(("implemented", "ignored", "refused"), row[1:], strict=True))
    own = {name: rule for name, rule in KINDS[kind].items() if name != "peft_type" and rule != FIELDS.get(name)}
    assert own
    for name, rule in own.items():
        assert f"`{name}`" in listed[WORDS[rule.handling]], name


def test_every_footnote_is_there_once_and_used() -> None:
    defined = re.findall(r"^\[\^([a-z-]+)\]:", PAGE, flags=re.MULTILINE)
    used = re.findall(r"\[\^([a-z-]+)\](?!:)", PAGE)
    assert sorted(defined) == sorted(set(used))


def test_documented_limits_equal_enforced_limits() -> None:
    assert f"rank over {LIMITS.max_rank}" in PROSE
    assert f"{LIMITS.max_factors_bytes >> 30} GiB of factors" in PROSE
    assert (
        f"Up to {LIMITS.max_composition_terms} terms; weights between −{LIMITS.max_composition_weight:g} and" in PROSE
    )
    assert f"a scaling over {LIMITS.max_scaling:,.0f}" in PROSE
