"""What a client may write as ``model``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.errors import InvalidRequest, ModelNotFound
from loraserve.registry.model_name import (
    ParsedModel,
    check_adapter_name,
    check_alias_name,
    model_not_found,
    parse_model,
)

BASE = "org/base:7b@main"


@pytest.mark.parametrize(
    ("model", "meaning"),
    [
        (BASE, ParsedModel()),
        ("sql", ParsedModel("sql", alias="live")),
        ("sql@canary", ParsedModel("sql", alias="canary")),
        ("sql@12", ParsedModel("sql", version=12)),
        ("sql@1.2", ParsedModel("sql", alias="1.2")),
        (f"{BASE}:sql", ParsedModel("sql", alias="live")),
        (f"{BASE}:sql@3", ParsedModel("sql", version=3)),
        ("7", ParsedModel("7", alias="live")),
    ],
)
def test_every_form_is_understood(model: str, meaning: ParsedModel) -> None:
    assert parse_model(model, BASE) == meaning


BAD = ["", "SQL", "sql@", "@3", "sql@0", "sql@007", "sql@99999999999", "sql@2147483648", "sql@a@b", "org/base", "sql@٣"]
BAD += [f"{BASE}:", f"{BASE}@3", f"{BASE}:{BASE}:sql", "a" * 64, "sql@" + "9" * 5000, "../x", "sql\n", "x" * 1_000_000]


@pytest.mark.parametrize("model", BAD)
def test_what_has_no_form_cannot_exist(model: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        parse_model(model, BASE)
    assert len(str(caught.value)) < 250


def test_a_base_that_could_be_an_adapters_name_wins_over_it() -> None:
    assert parse_model("tiny", "tiny").is_base
    with pytest.raises(InvalidRequest, match="base model"):
        check_adapter_name("tiny", "tiny")


@given(st.text(max_size=80))
def test_any_text_is_a_model_or_not_found(model: str) -> None:
    try:
        parsed = parse_model(model, BASE)
    except ModelNotFound:
        return
    assert parsed.is_base == (model == BASE)
    if not parsed.is_base:
        assert (parsed.version is None) != (parsed.alias is None)


@pytest.mark.parametrize("alias", ["12", "latest", "base", "UP", "", "a" * 64, "-x"])
def test_an_alias_that_reads_as_something_else_is_refused(alias: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_alias_name(alias)
    assert caught.value.param == "alias"


def test_a_bare_name_and_its_live_alias_are_refused_in_the_callers_words() -> None:
    assert '"sql"' in str(model_not_found(parse_model("sql", BASE)))
    assert '"sql@3"' in str(model_not_found(parse_model("sql@3", BASE)))
