"""Checkpoints that are quantized already, as compressed-tensors and bitsandbytes write them, with
the float model that they mean.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils import get_direct_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from .conftest import build_model, edit_json

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2, "num_hidden_layers": 2}
"""Sizes that groups of 128 fill."""


def group(num_bits: int, strategy: str, *, targets: list[str] | None = None, **settings: Any) -> dict[str, Any]:
    """A config group of weights alone; `settings` with ``input_activations`` or ``format`` are the
    group's, others the weights'.
    """
    outer = {name: settings.pop(name) for name in ("input_activations", "format") if name in settings}
    weights = {"num_bits": num_bits, "strategy": strategy, **settings}
    return {"targets": targets or ["Linear"], "weights": weights, **outer}


def save_compressed(
    model: Any,
    directory: Path,
    groups: list[dict[str, Any]],
    *,
    ignore: list[str] | None = None,
    format: str | None = None,
    preset: str | None = None,
    max_shard_size: str = "5GB",
) -> Any:
    """Quantize the model, save it with the library, and return a float32 model with the weights
    that the library reads from it.

    Args:
        preset: one of the library's own schemes, for every linear, instead of `groups`.
    """
    plain = copy.deepcopy(model).float()
    config = QuantizationConfig(
        config_groups={preset: ["Linear"]} if preset else {f"group_{i}": value for i, value in enumerate(groups)},
        ignore=["lm_head"] if ignore is None else ignore,
        quantization_status="initialized",
    )
    apply_quantization_config(model, config, show_progress=False)
    quantized = {name: module for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    for module in quantized.values():
        scale, zero = _qparams(module.weight.detach(), module.quantization_scheme.weights)
        module.weight_scale.data = scale.to(module.weight_scale.dtype).view(module.weight_scale.shape)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.to(torch.int8).view(module.weight_zero_point.shape)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.1)
    compressor = ModelCompressor.from_pretrained_model(model, format)
    compressor.compress_model(model)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    compressor.update_config(str(directory))
    with torch.no_grad():
        for name, module in quantized.items():
            state = get_direct_state_dict(module)
            # the library multiplies in the scale's dtype
            state["weight_scale"] = state["weight_scale"].float()
            compressor_class = BaseCompressor.get_value_from_registry(module.quantization_scheme.format.value)
            weight = compressor_class.decompress(state, module.quantization_scheme)["weight"]
            plain.get_submodule(name).weight.copy_(weight)
    return plain


def _qparams(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    if args.strategy == "group":
        rows = weight.view(weight.shape[0], -1, args.group_size)
        return calculate_qparams(rows.amin(-1), rows.amax(-1), args)
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        blocks = padded.view(padded.shape[0] // rows, rows, -1, columns)
        return calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    if args.strategy == "channel":
        return calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), args)
    return calculate_qparams(weight.amin().view(1), weight.amax().view(1), args)


@torch.no_grad()
def put_weight(model: Any, name: str, weight: torch.Tensor) -> None:
    """Put a linear's weight, by its name in a checkpoint, into a model: an expert's into the
    parameter of all.
    """
    path, _, linear = name.removesuffix(".weight").rpartition(".")
    module, _, number = path.rpartition(".experts.")
    if not module:
        model.get_parameter(name).copy_(weight)
        return
    experts = model.get_submodule(f"{module}.experts")
    if linear == "down_proj":
        experts.down_proj[int(number)] = weight
    else:
        first = 0 if linear == "gate_proj" else len(weight)
        experts.gate_up_proj[int(number), first : first + len(weight)] = weight


def save_nf4(
    directory: Path,
    *,
    block_size: int = 64,
    is_nested: bool = False,
    storage: torch.dtype = torch.uint8,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """Save a model whose layers' linears are in NF4; return the float32 model that it means.

    The bytes are written here, not by bitsandbytes: of two codes the first is in the high bits,
    scales go along the flattened weight, and where they're nested they are entries of
    ``nested_quant_map`` times a scale for 256 of them, plus an offset (QuantState.as_dict and
    dequantize_4bit in bitsandbytes/functional.py,
    https://huggingface.co/docs/bitsandbytes/reference/nn/linear4bit). Two checkpoints that the
    library itself wrote are in `data`.
    """
    model = build_model(**{**WIDE, **overrides})
    model.save_pretrained(directory)
    rng = np.random.default_rng(seed)
    tensors = load_file(directory / "model.safetensors")
    # equally spaced numbers between the tenths that NF4 was made from are no NF4: these are the
    # paper's (arXiv:2305.14314, appendix E)
    code = torch.tensor(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ]
    )
    for name in [name for name in tensors if "_proj.weight" in name]:
        shape = tensors[name].shape
        codes = torch.from_numpy(rng.integers(0, 16, shape.numel(), dtype=np.uint8))
        absmax = torch.from_numpy(rng.uniform(0.5, 2.5, shape.numel() // block_size).astype(np.float32))
        absmax *= shape[1] ** -0.5
        state = {"quant_type": "nf4", "blocksize": block_size, "dtype": "float32", "shape": list(shape)}
        stored = absmax
        if is_nested:
            quant_map = torch.linspace(-1, 1, 256)
            nested = torch.from_numpy(rng.uniform(0.01, 0.03, -(-absmax.numel() // 256)).astype(np.float32))
            stored = torch.from_numpy(rng.integers(0, 256, absmax.numel(), dtype=np.uint8))
            absmax = torch.tensor(
                [float(quant_map[int(entry)] * nested[i // 256]) + 0.09 for i, entry in enumerate(stored)]
            )
            tensors[f"{name}.nested_absmax"], tensors[f"{name}.nested_quant_map"] = nested, quant_map.clone()
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.09}
        weight = code[codes.long()] * absmax.repeat_interleave(block_size)
        put_weight(model, name, weight.view(shape))
        packed = (codes[0::2] * 16 + codes[1::2]).view(storage).view(-1, 1)
        text = json.dumps(state).encode()
        tensors |= {
            name: packed,
            f"{name}.absmax": stored,
            f"{name}.quant_map": code.clone(),
            f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
        }
    save_file(tensors, directory / "model.safetensors")
    edit_json(
        directory / "config.json",
        quantization_config={
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": is_nested,
        },
    )
    return model
