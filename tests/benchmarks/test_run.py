"""Limits that a CPU's figures are held against, by numbers worked out by hand."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import run
from benchmarks.formats import FORMATS

MACHINE = {"read_bytes_per_s": 1e9, "float32_ops_per_s": 1e10, "bfloat16_ops_per_s": 2e10, "int8_ops_per_s": 1e11}
PREFILL, DECODES = run.PROMPT_TOKENS, run.OUTPUT_TOKENS - 1


def limits(**machine: float) -> run.Limits:
    return run.Limits({**MACHINE, **machine}, 1_000_000, 500_000, [10_000, 20_000], 0)


def test_single_request_is_limited_by_bytes_of_format() -> None:
    fast = limits(float32_ops_per_s=1e20, int8_ops_per_s=1e20)
    for name, num_bytes in (("float32", 6e6), ("int8", 1.5e6), ("int4", 0.65625e6 + 0.5e6)):
        step_s = num_bytes / 1e9
        assert fast.tokens_per_s(FORMATS[name], 1, False) == pytest.approx(64 / (step_s + DECODES * step_s)), name


def test_many_requests_are_limited_by_operations_of_format() -> None:
    slow = limits(read_bytes_per_s=1e20)
    for name, rate in (("float32", 1e10), ("bfloat16", 2e10), ("int4-rounded", 1e11)):
        wall_s = 8 * 2 * (PREFILL * 1_000_000 + DECODES * 1_500_000) / rate
        assert slow.tokens_per_s(FORMATS[name], 8, False) == pytest.approx(8 * 64 / wall_s), name


def test_adapters_add_bytes_of_storage_format() -> None:
    fast = limits(float32_ops_per_s=1e20, int8_ops_per_s=1e20)
    for name, width in (("int8", 2), ("int8+int8", 1)):
        step_s = (1.5e6 + 30_000 * width) / 1e9
        assert fast.tokens_per_s(FORMATS[name], 2, True) == pytest.approx(2 * 64 / (64 * step_s)), name


def test_unknown_format_is_named() -> None:
    assert run.formats("int8,int4-rounded+int8") == "int8,int4-rounded+int8"
    with pytest.raises(argparse.ArgumentTypeError, match="int3; expected some of float32"):
        run.formats("int8,int3")
