"""A checkpoint that is quantized already, and one that is rounded while it's read, answer on a GPU
as on a CPU: float16 activations beside float32 ones.

The kernels run in Triton's interpreter. That the CPU's answers are right, `test_prequantized`
shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaigns import default_and_campaign
from stored_words import save_fp8, save_gptq
from torch import Tensor

pytest.importorskip("triton")

from loraserve.model.decoder import Decoder
from loraserve.model.inputs import GpuInputs, KVTensors
from loraserve_kernels.common.quantized import quantize
from loraserve_kernels.gpu.attention.plan import GpuAttentionPlan

from ..conftest import BLOCK_SIZE, PagedRun, build_model, load, random_tokens, save_model
from ..stored_quantized import WIDE, group, save_compressed, save_nf4

pytestmark = pytest.mark.interpreted

SIZES = {**WIDE, "num_hidden_layers": 1}
# rows of the first step; then a single one
CHUNKS = [5]
NUM_TOKENS = 6


def on_gpu(decoder: Decoder, token_ids: list[int], chunks: list[int]) -> Tensor:
    """The logits of a whole sequence computed in these chunks and then token by token, its blocks
    in a cache full of NaN and out of order.
    """
    num_layers, num_kv_heads, head_dim = decoder.kv_shape
    shape = (8, num_kv_heads, BLOCK_SIZE, head_dim)
    k, v = (tuple(torch.full(shape, float("nan"), dtype=decoder.kv_dtype) for _ in range(num_layers)) for _ in range(2))
    plan = GpuAttentionPlan(
        num_heads=decoder.spec.modules["q_proj"][0] // head_dim,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=BLOCK_SIZE,
        max_num_tokens=128,
        max_num_seqs=1,
        max_model_len=decoder.spec.max_model_len,
        device=decoder.backend.device,
    )
    blocks = np.array([[5, 2, 7, 0, 3, 6]], dtype=np.int32)
    logits, start = [], 0
    for count in [*chunks, *[1] * (len(token_ids) - sum(chunks))]:
        places = np.arange(start, start + count)
        start += count
        plan.fill(np.array([0, count], dtype=np.int32), np.array([start], dtype=np.int32), blocks)
        slots = blocks[0, places // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + places % BLOCK_SIZE
        inputs = GpuInputs(
            token_ids=torch.tensor(token_ids[start - count : start]),
            positions=torch.from_numpy(places.astype(np.int32)),
            slot_mapping=torch.from_numpy(slots),
            attention=plan,
            logits_rows=None,
            lora=None,
            logits_lora=None,
        )
        with torch.inference_mode():
            logits.append(decoder.forward(inputs, KVTensors(k=k, v=v, block_size=BLOCK_SIZE)).clone())
    return torch.cat(logits)


def assert_same(on_the_gpu: Decoder, on_the_cpu: Decoder, chunks: list[int], num_tokens: int = NUM_TOKENS) -> None:
    token_ids = random_tokens(num_tokens)
    ours, expected = on_gpu(on_the_gpu, token_ids, chunks), PagedRun(on_the_cpu).logits(token_ids, chunks)
    assert ours.dtype == torch.float32
    # logits have a deviation near 1; a dozen roundings to float16 lie between the token and them
    torch.testing.assert_close(ours, expected, rtol=0, atol=16 * torch.finfo(torch.float16).eps)


STORED: dict[str, Callable[[Path], Any]] = {
    "int4": lambda path: save_compressed(
        build_model("qwen2", **SIZES), path, [group(4, "group", group_size=32, symmetric=False)]
    ),
    "int8": lambda path: save_compressed(build_model("qwen2", **SIZES), path, [group(8, "group", group_size=64)]),
    "nf4": lambda path: save_nf4(path, is_nested=True, **SIZES),
    "int4-reordered": lambda path: save_gptq(build_model("qwen2", **SIZES), path, desc_act=True),
    "fp8-blocks": lambda path: save_fp8(build_model("qwen2", **SIZES), path),
}


@pytest.mark.parametrize("format", default_and_campaign(STORED, default=["nf4"]))
def test_stored_format_answers_equally_on_gpu_and_cpu(tmp_path: Path, format: str) -> None:
    STORED[format](tmp_path)
    decoder = load(tmp_path, device="cuda", dtype=torch.float16)
    assert_same(decoder, load(tmp_path, activation_dtype="float"), CHUNKS)
    assert decoder.spec.quantization == format.partition("-")[0]


def test_gpu_answers_match_beyond_few_row_kernel(tmp_path: Path) -> None:
    STORED["int8"](tmp_path)
    assert_same(load(tmp_path, device="cuda", dtype=torch.float16), load(tmp_path, activation_dtype="float"), [65], 65)


def test_int8_rounding_at_load_matches_rounded_weights(tmp_path: Path) -> None:
    """The CPU's own int8 linears round activations too,
    so it is given the rounded weights as floats.
    """
    model = build_model("qwen2", **SIZES)
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in rounded.named_modules():
            if name.endswith("_proj") or name == "lm_head":
                module.weight.copy_(quantize(module.weight, "int8").dequantize(torch.float32))
    save_model(model, tmp_path / "float")
    save_model(rounded, tmp_path / "rounded")
    decoder = load(tmp_path / "float", device="cuda", dtype=torch.float16, quantize="int8")
    assert_same(decoder, load(tmp_path / "rounded", activation_dtype="float"), CHUNKS)
    assert decoder.spec.quantization == "int8"
