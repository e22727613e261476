"""Checkpoints in the layouts of GPTQ, AWQ, AutoRound and FP8 blocks, with the float model that they
mean.

The packers follow QuantLinear.pack of AutoGPTQ (auto_gptq/nn_modules/qlinear/qlinear_cuda.py),
WQLinear_GEMM.from_linear of AutoAWQ (awq/modules/linear/gemm.py) and the block-wise quantization of
transformers' FineGrainedFP8Config. Weights are dequantized from the codes before they're packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Codes:
    """A weight as whole numbers: codes [in, out], zeros and scales [groups, out], g_idx [in]."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    g_idx: Tensor

    @property
    def weight(self) -> Tensor:
        """The float32 weight [out, in] that they mean."""
        groups = self.g_idx.long()
        return (self.scales.float()[groups] * (self.codes - self.zeros[groups])).t()


def shuffled_groups(in_features: int, group_size: int, seed: int = 0) -> Tensor:
    """A g_idx as desc_act writes it: inputs have groups in no order."""
    order = torch.randperm(in_features, generator=torch.Generator().manual_seed(seed))
    g_idx = torch.empty(in_features, dtype=torch.int32)
    g_idx[order] = torch.arange(in_features, dtype=torch.int32) // group_size
    return g_idx


def round_weight(weight: Tensor, bits: int, group_size: int, *, sym: bool, g_idx: Tensor | None = None) -> Codes:
    """Round a weight [out, in] to codes, each group by its range."""
    in_features = weight.shape[1]
    size = in_features if group_size == -1 else group_size
    g_idx = torch.arange(in_features, dtype=torch.int32) // size if g_idx is None else g_idx
    num_groups, top = -(-in_features // size), 2**bits - 1
    columns = weight.float().t()
    scales, zeros = torch.empty(num_groups, weight.shape[0]), torch.empty(num_groups, weight.shape[0])
    for group in range(num_groups):
        rows = columns[g_idx == group]
        low, high = rows.amin(0).clamp_max(0), rows.amax(0).clamp_min(0)
        if sym:
            high = torch.maximum(high, -low)
            low = -high
        scales[group] = ((high - low) / top).clamp_min(1e-5).half().float()
        zeros[group] = (top + 1) // 2 if sym else (-low / scales[group]).round().clamp(1, top)
    groups = g_idx.long()
    codes = (columns / scales[groups] + zeros[groups]).round().clamp(0, top)
    return Codes(codes.int(), zeros.int(), scales.half(), g_idx)


def pack_inputs(codes: Tensor, bits: int) -> Tensor:
    """GPTQ's qweight: [in / (32 / bits), out] int32, the first input in the lowest bits."""
    per_word = 32 // bits
    words = codes.long().view(-1, per_word, codes.shape[1])
    return sum((words[:, j] << bits * j for j in range(per_word)), torch.zeros(1, dtype=torch.long)).to(torch.int32)


def pack_outputs(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, out / (32 / bits)] int32; `order`: of the outputs of a word, from the lowest bits."""
    per_word = 32 // bits
    words = codes.long().view(len(codes), -1, per_word)
    places = enumerate(order or range(per_word))
    return sum((words[:, :, k] << bits * j for j, k in places), torch.zeros(1, dtype=torch.long)).to(torch.int32)


def gptq_parts(codes: Codes, bits: int, *, is_second_format: bool = False) -> dict[str, Tensor]:
    qzeros = pack_outputs(codes.zeros, bits).long()
    if not is_second_format:
        # as GPTQModel takes one from each zero of a word
        qzeros -= 0x11111111 if bits == 4 else 0x01010101
    return {
        "qweight": pack_inputs(codes.codes, bits),
        "qzeros": qzeros.to(torch.int32),
        "scales": codes.scales,
        "g_idx": codes.g_idx,
    }


def awq_parts(codes: Codes) -> dict[str, Tensor]:
    return {
        "qweight": pack_outputs(codes.codes, 4, AWQ_ORDER),
        "qzeros": pack_outputs(codes.zeros, 4, AWQ_ORDER),
        "scales": codes.scales,
    }


def fp8_blocks(weight: Tensor, block: tuple[int, int] = (128, 128)) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight in FP8 with a scale for each block, and the weight that they mean."""
    rows, columns = block
    out_features, in_features = weight.shape
    scales = torch.empty(-(-out_features // rows), -(-in_features // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = part.abs().amax() / 448
    spread = scales.repeat_interleave(rows, 0)[:out_features].repeat_interleave(columns, 1)[:, :in_features]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def save_parts(
    model: Any,
    directory: Path,
    make: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None],
    quantization_config: dict[str, Any] | None,
) -> Any:
    """Save a float32 model whose linears `make` turns into tensors; return the model that they
    mean.

    Args:
        make: gets a linear's path and weight; returns its tensors by what follows the path, and the
            weight that they mean. None: it stays as it is.
        quantization_config: None: config.json gets none.
    """
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight") or name == "lm_head.weight"]:
        path = name.removesuffix(".weight")
        made = make(path, tensors[name])
        if made is None:
            continue
        parts, meant = made
        del tensors[name]
        tensors |= {f"{path}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        with torch.no_grad():
            model.get_submodule(path).weight.copy_(meant)
    save_file(tensors, directory / "model.safetensors")
    if quantization_config is not None:
        config = directory / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": quantization_config}))
    return model


def is_of_a_layer(path: str) -> bool:
    return path != "lm_head"


def save_gptq(
    model: Any,
    directory: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = False,
    desc_act: bool = False,
    version: str = "gptq",
    is_quantized: Callable[[str], bool] = is_of_a_layer,
    **config: Any,
) -> Any:
    """Save a model in GPTQ's layout; with desc_act linears of one input share a shuffled g_idx."""

    def make(path: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_quantized(path):
            return None
        size = weight.shape[1] if group_size == -1 else group_size
        g_idx = shuffled_groups(weight.shape[1], size) if desc_act else None
        codes = round_weight(weight, bits, group_size, sym=sym, g_idx=g_idx)
        return gptq_parts(codes, bits, is_second_format=version == "gptq_v2"), codes.weight

    settings = {"bits": bits, "group_size": group_size, "sym": sym, "desc_act": desc_act}
    written = {"quant_method": "gptq", "checkpoint_format": version, **settings, **config}
    return save_parts(model, directory, make, written)


def save_awq(
    model: Any,
    directory: Path,
    *,
    group_size: int = 32,
    is_quantized: Callable[[str], bool] = is_of_a_layer,
    **config: Any,
) -> Any:
    def make(path: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_quantized(path):
            return None
        codes = round_weight(weight, 4, group_size, sym=False)
        return awq_parts(codes), codes.weight

    settings = {"bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return save_parts(model, directory, make, {"quant_method": "awq", **settings, **config})


def save_fp8(
    model: Any,
    directory: Path,
    *,
    block: tuple[int, int] = (128, 128),
    is_quantized: Callable[[str], bool] = is_of_a_layer,
    **config: Any,
) -> Any:
    settings = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(block)}
    return save_parts(
        model,
        directory,
        lambda path, weight: fp8_blocks(weight, block) if is_quantized(path) else None,
        {"quant_method": "fp8", **settings, **config},
    )
