"""What a client may write as ``model``."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.errors import InvalidRequest, ModelNotFound
from loraserve.limits import LIMITS
from loraserve.registry.model_name import (
    ParsedModel,
    Term,
    check_adapter_name,
    check_alias_name,
    model_not_found,
    parse_model,
    parse_terms,
    terms_of,
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
        ("acme/sql", ParsedModel("sql", alias="live", owner="acme")),
        (f"{BASE}:acme/sql@3", ParsedModel("sql", version=3, owner="acme")),
    ],
)
def test_every_form_is_understood(model: str, meaning: ParsedModel) -> None:
    assert parse_model(model, BASE) == meaning


BAD = [
    "",
    "SQL",
    "sql@",
    "@3",
    "sql@0",
    "sql@007",
    "sql@99999999999",
    "sql@2147483648",
    "sql@a@b",
    "a/b/c",
    "/sql",
    "org/",
    "sql@٣",
]
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


A, B = ParsedModel("a", alias="live"), ParsedModel("b", version=3)


@pytest.mark.parametrize(
    ("model", "meaning"),
    [
        (BASE, ()),
        ("a", (Term(A),)),
        ("a+b@3", (Term(A), Term(B))),
        ("a+0.5*b@3", (Term(A), Term(B, Decimal("0.5")))),
        ("-2*a+.25*b@3+1.*a", (Term(A, Decimal(-2)), Term(B, Decimal("0.25")), Term(A))),
        ("5e-3*a", (Term(A, Decimal("0.005")),)),
        (f"{BASE}:a+b@3", (Term(A), Term(B))),
        ("0.5*0.5", (Term(ParsedModel("0.5", alias="live"), Decimal("0.5")),)),
        ("a+0.5*acme/b@3", (Term(A), Term(ParsedModel("b", version=3, owner="acme"), Decimal("0.5")))),
        ("a+a@canary", (Term(A), Term(ParsedModel("a", alias="canary")))),
    ],
)
def test_a_sum_is_understood(model: str, meaning: tuple[Term, ...]) -> None:
    assert parse_terms(model, BASE) == meaning


SUMS = ["a+", "+a", "a++b", "a + b", "a*0.5", "0.5*", "*a", "a-0.5*b", "A+b", "a+b@", "a+b@c@d", "a+../x", "a+b\n"]
SUMS += ["nan*a", "inf*a", "1e400*a", "0x1*a", "1_0*a", "٣*a", "--1*a", "1*2*a", "0." + "1" * 40 + "*a", "a+b*", "+"]
SUMS += [f"{LIMITS.max_composition_weight + 1:g}*a", "-11*a+b", "+".join(["a"] * (LIMITS.max_composition_terms + 1))]
SUMS += [f"a+{BASE}:b", "a+org/base/c", "a+/b", "a+org/"]


@pytest.mark.parametrize("model", SUMS)
def test_what_is_no_sum_is_refused(model: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_terms(model, BASE)
    assert caught.value.param == "model"


@pytest.mark.parametrize("model", ["a+MARKER", "MARKER*a", "a*MARKER+b", "a@MARKER+b", "+".join(["MARKER"] * 99)])
def test_the_refusal_of_a_sum_repeats_nothing_of_it(model: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_terms(model, BASE)
    assert "MARKER" not in str(caught.value)


@pytest.mark.parametrize("model", BAD)
def test_what_is_one_adapter_is_found_or_not_as_ever(model: str) -> None:
    with pytest.raises(ModelNotFound):
        parse_terms(model, BASE)


def test_a_version_that_cannot_be_is_not_found_in_a_sum_either() -> None:
    with pytest.raises(ModelNotFound):
        parse_terms("a+b@0", BASE)


@given(st.text(alphabet="ab@+*.5e-1 ", max_size=24))
def test_any_text_is_a_sum_or_refused(model: str) -> None:
    try:
        terms = parse_terms(model, BASE)
    except (InvalidRequest, ModelNotFound):
        return
    assert 1 <= len(terms) <= LIMITS.max_composition_terms
    assert all(abs(term.weight) <= LIMITS.max_composition_weight for term in terms)


def test_adapters_and_weights_are_the_same_sum_as_the_text() -> None:
    assert terms_of([("a", 1.0), ("b@3", -0.1)]) == parse_terms("a+-0.1*b@3", BASE)
    with pytest.raises(InvalidRequest) as caught:
        terms_of([("a", 1.0), ("b", 10.5)])
    assert caught.value.param == "adapters.1.weight"
    with pytest.raises(ModelNotFound):
        terms_of([("a+b", 1.0)])
