"""Blocks mean what llama.cpp's own package says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from loraserve.model.config.gguf_types import BLOCK_FORMATS, TYPES
from loraserve.model.gguf.gguf_blocks import unpack_blocks

HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Places of a block's float16 numbers: random bytes would be infinite there."""


def random_rows(name: str, rows: int = 7, width: int = 512, *, scale: float = 0.01, seed: int = 0) -> np.ndarray:
    form, generator = BLOCK_FORMATS[name], np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, width // form.block, form.block_bytes), dtype=np.uint8)
    for place in HALVES[name]:
        numbers = (generator.standard_normal((*blocks.shape[:2], 1)) * scale).astype(np.float16)
        blocks[..., place : place + 2] = numbers.view(np.uint8)
    if name == "MXFP4":
        # a power of two, and NaN if it's 255
        exponent = round(127 + np.log2(scale))
        blocks[..., 0] = generator.integers(exponent - 4, exponent + 1, blocks.shape[:2])
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_mean_the_same_numbers(name: str) -> None:
    raw = random_rows(name)
    expected = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[name]))
    found = unpack_blocks(torch.from_numpy(raw), name, 512).dequantize(torch.float32)
    if BLOCK_FORMATS[name].has_zeros:
        # a minimum is kept as a zero: one rounding more
        torch.testing.assert_close(found, expected, rtol=0, atol=float(1e-6 * expected.abs().max()))
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", [name for name, form in BLOCK_FORMATS.items() if form.has_zeros])
def test_blocks_without_scale_equal_minimum(name: str) -> None:
    raw = random_rows(name)
    form = BLOCK_FORMATS[name]
    raw.reshape(7, -1, form.block_bytes)[..., HALVES[name][0] : HALVES[name][0] + 2] = 0
    expected = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[name]))
    found = unpack_blocks(torch.from_numpy(raw), name, 512).dequantize(torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


def test_sizes_of_blocks_are_llama_cpps() -> None:
    for number, type_ in TYPES.items():
        kind = GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (type_.name, type_.block, type_.num_bytes)
