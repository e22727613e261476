"""The keys of rank_pattern and alpha_pattern match exactly as PEFT's regular expressions do,
or are refused.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.adapters.config.patterns import first_matches, parse_pattern
from loraserve.adapters.config.regexes import Regex

NAMES = [
    f"model.layers.{i}.{m}" for i in (0, 1, 10, 11) for m in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
]


def peft_matches(keys: list[str], names: list[str]) -> dict[str, int]:
    result: dict[str, int] = {}
    for name in names:
        for index, key in enumerate(keys):
            if re.match(rf"(.*\.)?({key})$", name):
                result[name] = index
                break
    return result


def ours(keys: list[str], names: list[str]) -> dict[str, int]:
    patterns = [p for p in map(parse_pattern, keys) if not isinstance(p, str)]
    assert len(patterns) == len(keys)
    return first_matches(patterns, names)


@pytest.mark.parametrize(
    "keys",
    [
        ["q_proj"],
        ["proj"],
        ["self_attn.q_proj", "q_proj"],
        ["q_proj", "self_attn.q_proj"],
        ["layers.1.self_attn.q_proj"],
        ["1.self_attn.q_proj"],
        ["^model.layers.1.self_attn.q_proj"],
        ["^layers.1.self_attn.q_proj"],
        ["^q_proj"],
        ["q_proj$"],
        [r"model\.layers\.10\.mlp\.up_proj"],
        [r"mlp\.up\_proj"],
        ["q.proj"],
        [r"q\.proj"],
        ["......"],
        ["model.layers.1.self_attn.q_proj", "layers.1..self_attn.q_proj"],
        ["layers.1..mlp.up_proj"],
    ],
)
def test_key_matches_as_in_peft(keys: list[str]) -> None:
    assert ours(keys, NAMES) == peft_matches(keys, NAMES)


_part = st.sampled_from(
    ["model", "layers", "1", "11", "self_attn", "q_proj", "up_proj", ".", r"\.", "q", "_", "proj", "mlp"]
)


@settings(max_examples=300, deadline=None)
@given(
    keys=st.lists(
        st.tuples(st.sampled_from(["", "^"]), st.lists(_part, min_size=1, max_size=8), st.sampled_from(["", "$"])).map(
            lambda t: t[0] + "".join(t[1]) + t[2]
        ),
        min_size=1,
        max_size=4,
    )
)
def test_random_supported_key_matches_as_in_peft(keys: list[str]) -> None:
    assert ours(keys, NAMES) == peft_matches(keys, NAMES)


@pytest.mark.parametrize(
    "keys",
    [
        [".*q_proj"],
        ["(a+)+b", "layers.[01].self_attn.q_proj"],
        [r"layers\.\d+\.self_attn.q_proj", "q_proj"],
        ["q_proj|k_proj"],
        # the frame is PEFT's, so that this begins with one regex and ends with another
        ["model)|(q_proj"],
        ["q_proj", r"(?:self_attn|mlp)\.\w+"],
        [r"layers\.1?0\..*"],
        ["a^b", "a$b", "q_proj$"],
        [r"(?i:Q_PROJ)"],
        [r"[^.]{3,}\.up_proj", "u.{0,2}proj"],
        # what RE2 doesn't have, or reads in its own way
        ["q_proj(?=x)", "(?!.*q_).*proj", "(?<!up)_proj"],
        [r"layers\.(?:(?:[0-9]{100}){10}){0,10}1\.mlp\..*"],
        ["(?<=q)_proj", r".*(?<!\.1)(?<!\.11)\.mlp\.up_proj"],
        ["q{,2}_proj"],
        [r"up_proj\Z", "(?#a comment)q_proj"],
    ],
)
def test_regex_matches_as_in_peft(keys: list[str]) -> None:
    assert ours(keys, NAMES) == peft_matches(keys, NAMES)


SHORT = ["m.l.0.q_proj", "m.l.11.q_proj", "m.l.1.up_proj", "lm.q", "q_proj"]
_leaf = st.tuples(
    st.sampled_from([r"\.", ".", "q_proj", "up", "m", "l", "_", r"\d", r"\w", "[01]", "[^.]", "(l|m|)"]),
    st.sampled_from(["", "", "*", "+", "?", "{1,2}", "*?"]),
).map("".join)
# No star stands over another, and names are short: Python's engine, the oracle, must come to an
# end.
_regex = st.recursive(
    _leaf,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda t: f"(?:{t[0]}|{t[1]})"),
        inner.map(lambda text: f"({text})?"),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(keys=st.lists(_regex, min_size=1, max_size=3))
def test_random_accepted_regex_matches_as_in_peft(keys: list[str]) -> None:
    keys = [key for key in keys if not isinstance(parse_pattern(key), str)]
    assert ours(keys, SHORT) == peft_matches(keys, SHORT)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "empty"),
        ("^", "empty"),
        ("$", "empty"),
        ("a\\", "PEFT can't compile it"),
        ("é", "ASCII"),
        ("a\n", "ASCII"),
        ("(q_proj", "PEFT can't compile it"),
        ("(" * 2000 + ")" * 2000, "PEFT can't compile it"),
        ("q++", "a possessive repetition or an atomic group"),
        ("(?>q)_proj", "a possessive repetition or an atomic group"),
        (r"(q)\1", "it has a back-reference, which can't be matched in bounded time; list the modules by name"),
        ("(q)?(?(1)_proj|k)", "it has a back-reference"),
        ("(?<=q*)_proj", "PEFT can't compile it (look-behind requires fixed-width pattern)"),
        ("(" * 70 + "(?=q)" + ")" * 70, "nested deeper than 64"),
        # Python's own sets may get another meaning
        ("[[:alpha:]]_proj", '"[["'),
        ("[a[:alpha:]]_proj", '"[:"'),
        ("(q|[k[:alpha:]])_proj", '"[:"'),
        ("[a-z--b]", '"--"'),
        ("q" * 4095 + ".*", "4,097 characters; at most 4,096"),
    ],
)
def test_key_without_peft_equivalent_is_refused(key: str, reason: str) -> None:
    found = parse_pattern(key)
    assert isinstance(found, str)
    assert reason in found


def test_regex_time_depends_only_on_name_length() -> None:
    """With Python's engine, this would take longer than the universe has."""
    pattern = parse_pattern("(a+)+b")
    assert isinstance(pattern, Regex)
    assert first_matches([pattern], ["a" * 400]) == {}


def test_plain_keys_need_no_regex_engine() -> None:
    """RE2 is loaded for those who have a regex."""
    code = (
        "import sys; from loraserve.adapters.config.patterns import *; from loraserve.adapters import compiler; "
        "first_matches([parse_pattern(r'self_attn\\.q_proj')], ['self_attn.q_proj']); sys.exit('re2' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
