"""The keys of rank_pattern and alpha_pattern match exactly as PEFT's regular expressions would, or are refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.adapters.patterns import Pattern, first_matches, parse_pattern

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
    patterns = [p for p in map(parse_pattern, keys) if isinstance(p, Pattern)]
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
def test_a_key_matches_what_pefts_regex_matches(keys: list[str]) -> None:
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
def test_any_supported_key_matches_what_pefts_regex_matches(keys: list[str]) -> None:
    assert ours(keys, NAMES) == peft_matches(keys, NAMES)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "^",
        "$",
        ".*q_proj",
        "(a+)+b",
        "layers.[01].q_proj",
        r"layers\.\d+\.q_proj",
        "q_proj|k_proj",
        "a\\",
        "é",
        "a^b",
        "a$b",
        "a\n",
    ],
)
def test_a_key_that_needs_a_regex_engine_is_refused(key: str) -> None:
    assert isinstance(parse_pattern(key), str)
