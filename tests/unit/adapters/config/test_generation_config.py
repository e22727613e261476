"""Defaults of requests in the base's generation_config.json, and a version's over them."""

from __future__ import annotations

import json

import pytest

from loraserve.adapters.config.generation_config import NO_DEFAULTS, GenerationDefaults, read_base_defaults

SAMPLED = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
}


def read(**fields: object) -> tuple[GenerationDefaults, tuple[str, ...]]:
    return read_base_defaults(json.dumps(fields).encode())


def test_base_file_gives_sampling_without_warnings() -> None:
    defaults, warnings = read(**SAMPLED, eos_token_id=[2, 10**9], pad_token_id=None, transformers_version="5")
    assert defaults == GenerationDefaults(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05, max_default_tokens=2048
    )
    assert warnings == ()
    assert defaults.as_fields() == {
        name: value for name, value in {**SAMPLED, "max_tokens": 2048}.items() if name not in DROPPED
    }


DROPPED = ("do_sample", "max_new_tokens")


def test_base_without_sampling_is_greedy() -> None:
    assert read(do_sample=False, temperature=0.6)[0].temperature == 0
    # absent, as transformers writes files: the fields beside it count
    assert read(temperature=0.6)[0].temperature == 0.6


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"top_p": 1.5}, "top_p is 1.5; expected a number from 0 to 1"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": 1e3}, "top_k is 1000.0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"do_sample": 1}, "do_sample is 1"),
        ({"num_beams": 4}, "num_beams is 4, which would change answers"),
        ({"stop_strings": ["!"]}, "stop_strings is ['!'], which would change answers"),
        ({"my_field": {"x": []}}, "the field 'my_field' isn't known"),
    ],
)
def test_odd_field_leaves_valid_fields_in_force(fields: dict[str, object], warning: str) -> None:
    defaults, warnings = read(min_p=0.1, **fields)
    assert defaults == GenerationDefaults(min_p=0.1)
    assert [warning in found for found in warnings] == [True]


@pytest.mark.parametrize("data", [b"[]", b"{", b'{"top_k": 1, "top_k": 2}', b'{"top_p": NaN}', b"\xff"])
def test_unreadable_base_file_gives_single_warning(data: bytes) -> None:
    defaults, warnings = read_base_defaults(data)
    assert defaults == NO_DEFAULTS
    assert len(warnings) == 1


def test_version_defaults_precede_base_defaults() -> None:
    base = GenerationDefaults(temperature=0.6, top_k=20, max_default_tokens=100)
    own = GenerationDefaults(temperature=0.0, stop_token_ids=(7,), max_new_tokens=500)
    both = own.over(base)
    assert (both.temperature, both.top_k, both.stop_token_ids) == (0, 20, (7,))
    assert both.max_tokens(16) == 500
    assert NO_DEFAULTS.over(base) == base


@pytest.mark.parametrize(
    ("cap", "otherwise", "length"), [(None, 16, 16), (100, 16, 16), (8, 16, 8), (100, None, 100), (None, None, None)]
)
def test_base_length_only_caps_default(cap: int | None, otherwise: int | None, length: int | None) -> None:
    assert GenerationDefaults(max_default_tokens=cap).max_tokens(otherwise) == length
