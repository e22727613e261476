"""What a client may write as ``model``."""

from __future__ import annotations

import re
import string
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.db.names import ADAPTER_NAME_RULE, is_adapter_name, name_fault, name_key
from loraserve.errors import InvalidRequest, ModelNotFound
from loraserve.limits import LIMITS, NAME_PATTERN
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
        (f"{BASE}:sql", ParsedModel("sql", alias="live", prefix=f"{BASE}:")),
        (f"{BASE}:sql@3", ParsedModel("sql", version=3, prefix=f"{BASE}:")),
        ("7", ParsedModel("7", alias="live")),
        ("acme/sql", ParsedModel("acme/sql", alias="live")),
        (f"{BASE}:acme/sql@3", ParsedModel("acme/sql", version=3, prefix=f"{BASE}:")),
        ("Qwen/My-LoRA@3", ParsedModel("Qwen/My-LoRA", version=3)),
        ("x:v2@canary", ParsedModel("x:v2", alias="canary")),
    ],
)
def test_every_form_is_understood(model: str, meaning: ParsedModel) -> None:
    assert parse_model(model, BASE) == meaning


BAD = [
    "",
    "sql@",
    "@3",
    "sql@0",
    "sql@007",
    "sql@99999999999",
    "sql@2147483648",
    "sql@a@b",
    "a//c",
    "a/../c",
    "a/.c",
    "a:",
    "a::b",
    "-a",
    "_a",
    "a b",
    "sql@Canary",
    "\N{KELVIN SIGN}",
    "/sql",
    "org/",
    "sql@٣",
]
BAD += [
    f"{BASE}:",
    f"{BASE}@3",
    f"{BASE}:{BASE}:sql",
    "a" * 129,
    "sql@" + "a" * 64,
    "sql@" + "9" * 5000,
    "../x",
    "sql\n",
    "x" * 1_000_000,
]


@pytest.mark.parametrize("model", BAD)
def test_malformed_model_name_is_not_found(model: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        parse_model(model, BASE)
    assert len(str(caught.value)) < 250


def test_base_name_takes_precedence_over_adapter_name() -> None:
    assert parse_model("tiny", "tiny").is_base
    with pytest.raises(InvalidRequest, match="base model"):
        check_adapter_name("tiny", "tiny")
    with pytest.raises(InvalidRequest, match="base model"):
        check_adapter_name("TINY", "tiny")
    with pytest.raises(InvalidRequest, match='mean "x" on this base'):
        check_adapter_name("Tiny:x", "tiny")


@given(st.text(max_size=80))
def test_any_text_is_a_model_or_not_found(model: str) -> None:
    try:
        parsed = parse_model(model, BASE)
    except ModelNotFound:
        return
    assert parsed.is_base == (model == BASE)
    if not parsed.is_base:
        assert (parsed.version is None) != (parsed.alias is None)


LETTERS = "aB1._-/:"
NAMES = st.text(alphabet=LETTERS + "@ +*%é\N{KELVIN SIGN}", max_size=12) | st.text(alphabet=LETTERS, max_size=200)
SEPARATORS = re.compile("[/:]")


@given(NAMES)
def test_adapter_name_obeys_rule(name: str) -> None:
    parts = SEPARATORS.split(name)
    is_valid = (
        1 <= len(name) <= 128
        and set(name) <= set(string.ascii_letters + string.digits + "._-/:")
        and name[0].isalnum()
        and all(part and (part[0].isalnum() or part[0] == "_") for part in parts)
    )
    assert is_adapter_name(name) is is_valid
    if is_valid:
        assert check_adapter_name(name, "org/base") == name
        assert is_adapter_name(name_key(name))
    else:
        with pytest.raises(InvalidRequest) as caught:
            check_adapter_name(name, "org/base")
        assert caught.value.param == "name"
        assert ADAPTER_NAME_RULE in caught.value.message
        assert name_fault(name)


@given(st.from_regex(NAME_PATTERN, fullmatch=True))
def test_lower_case_name_of_before_stays_valid(name: str) -> None:
    assert is_adapter_name(name)
    assert name_key(name) == name


@given(NAMES)
def test_name_in_any_case_means_same_adapter(name: str) -> None:
    if not is_adapter_name(name):
        return
    for selector in ("", "@3", "@canary"):
        lower, upper = (parse_model(text + selector, "org/base") for text in (name_key(name), name.upper()))
        assert lower.own_keys == upper.own_keys == (name_key(name),)
        assert lower.granted == upper.granted


@given(st.sampled_from(["x", "tiny", "acme"]), NAMES)
def test_reserved_name_never_hides_base_syntax(base: str, name: str) -> None:
    text = f"{base}:{name}"
    with pytest.raises(InvalidRequest):
        check_adapter_name(text, base)
    with pytest.raises(InvalidRequest):
        check_adapter_name(text.upper(), base)


@pytest.mark.parametrize(
    ("model", "own", "granted"),
    [
        ("sql", ("sql",), None),
        ("acme/sql", ("acme/sql",), ("acme", "sql")),
        ("ACME/Org/SQL", ("acme/org/sql",), ("acme", "org/sql")),
        ("tiny:sql", ("tiny:sql", "sql"), None),
        ("tiny:acme/sql", ("tiny:acme/sql", "acme/sql"), ("acme", "sql")),
        # the owner's name isn't part of the adapter's
        (f"acme/{'a' * 128}", (), ("acme", "a" * 128)),
        ("x:v2/sql", ("x:v2/sql",), None),
    ],
)
def test_own_name_comes_before_granted(model: str, own: tuple[str, ...], granted: tuple[str, str] | None) -> None:
    parsed = parse_model(model, "tiny")
    assert (parsed.own_keys, parsed.granted) == (own, granted)


@pytest.mark.parametrize("alias", ["12", "latest", "base", "UP", "", "a" * 64, "-x"])
def test_ambiguous_alias_name_is_refused(alias: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_alias_name(alias)
    assert caught.value.param == "alias"


def test_refusal_repeats_callers_spelling_of_name() -> None:
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
        ("a+0.5*acme/b@3", (Term(A), Term(ParsedModel("acme/b", version=3), Decimal("0.5")))),
        ("a+a@canary", (Term(A), Term(ParsedModel("a", alias="canary")))),
    ],
)
def test_a_sum_is_understood(model: str, meaning: tuple[Term, ...]) -> None:
    assert parse_terms(model, BASE) == meaning


SUMS = ["a+", "+a", "a++b", "a + b", "a*0.5", "0.5*", "*a", "a-0.5*b", "a+b@", "a+b@c@d", "a+../x", "a+b\n"]
SUMS += ["nan*a", "inf*a", "1e400*a", "0x1*a", "1_0*a", "٣*a", "--1*a", "1*2*a", "0." + "1" * 40 + "*a", "a+b*", "+"]
SUMS += [f"{LIMITS.max_composition_weight + 1:g}*a", "-11*a+b", "+".join(["a"] * (LIMITS.max_composition_terms + 1))]
SUMS += [f"a+{BASE}:b", "a+org//c", "a+/b", "a+org/"]


@pytest.mark.parametrize("model", SUMS)
def test_malformed_sum_is_refused_as_model_parameter(model: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_terms(model, BASE)
    assert caught.value.param == "model"


@pytest.mark.parametrize("model", ["a+_MARKER", "MARKER*a", "a*MARKER+b", "a@MARKER+b", "+".join(["MARKER"] * 99)])
def test_sum_refusal_repeats_no_input(model: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_terms(model, BASE)
    assert "MARKER" not in str(caught.value)


@pytest.mark.parametrize("model", BAD)
def test_malformed_single_term_is_not_found(model: str) -> None:
    with pytest.raises(ModelNotFound):
        parse_terms(model, BASE)


def test_impossible_version_in_sum_is_not_found() -> None:
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


def test_adapter_list_equals_textual_sum() -> None:
    assert terms_of([("a", 1.0), ("b@3", -0.1)]) == parse_terms("a+-0.1*b@3", BASE)
    with pytest.raises(InvalidRequest) as caught:
        terms_of([("a", 1.0), ("b", 10.5)])
    assert caught.value.param == "adapters.1.weight"
    with pytest.raises(ModelNotFound):
        terms_of([("a+b", 1.0)])
