from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.api.http.json_body import count_containers, parse_json
from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values, st.booleans())
def test_good_json_is_read(value: Any, ensure_ascii: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ensure_ascii).encode()) == value


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "empty"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e400}', "too large"),
        (b'{"a": -1e400}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too large"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"[" * 33 + b"]" * 33, "deeper"),
        (b"[" * 10_000 + b"]" * 10_000, "deeper"),
        (b"[" * 100_000 + b"]" * 100_000, "objects and arrays"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "deeper"),
        (b'{"a": 1', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": 1} {}', "not valid JSON"),
        (b'{"a": 01}', "not valid JSON"),
        (b'{"a": "\n"}', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
    ],
)
def test_bad_json_is_refused_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parse_json(body)


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert parse_json(b'"\\ud83d\\ude00"') == "😀"


def test_depth_up_to_the_bound_is_fine() -> None:
    assert parse_json(b"[" * 32 + b"]" * 32) is not None


def containers(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


@given(json_values | st.text(alphabet='"\\[]{}a').map(lambda text: {text: [text, {text: text}]}), st.booleans())
def test_containers_are_counted_outside_strings(value: Any, ensure_ascii: bool) -> None:
    assert count_containers(json.dumps(value, ensure_ascii=ensure_ascii).encode()) == containers(value)


def test_excessive_json_containers_are_refused_before_reading() -> None:
    parse_json(json.dumps({"a": [[]] * (LIMITS.max_json_containers - 2)}).encode())
    for many in ([[]] * 300_000, [{}] * LIMITS.max_json_containers):
        with pytest.raises(InvalidRequest, match="objects and arrays"):
            parse_json(json.dumps({"a": many}).encode())
    text = "[{" * 300_000 + '"\\' * 9
    assert parse_json(json.dumps({"a": text}).encode()) == {"a": text}
