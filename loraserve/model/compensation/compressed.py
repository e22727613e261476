"""A checkpoint of rotated int4 weights in compressed-tensors' files, which vLLM reads too.

Source: compressed-tensors' ``pack-quantized`` and ``transform_config``
(https://github.com/vllm-project/compressed-tensors).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from loraserve.errors import ModelError
from loraserve.model.checkpoint.blueprint import Blueprint, SiteKind
from loraserve.model.checkpoint.files import Checkpoint
from loraserve.model.checkpoint.headers import INDEX_FILE
from loraserve.model.config.formats import INT4_GROUP_SIZE
from loraserve_kernels.common.formats import rotation_block
from loraserve_kernels.common.quantized import QuantizedWeight, pack_nibbles

_PER_WORD = 8


class CompressedWriter:
    """Writes a checkpoint, a layer a file; it appears under its name once it is whole.

    Args:
        source: the float checkpoint's directory, of which other files are copied.
        out: what is made; it mustn't be there.

    Raises:
        ModelError: `out` is there, or can't be written.
    """

    def __init__(self, source: Path, out: Path, blueprint: Blueprint, checkpoint: Checkpoint) -> None:
        if out.exists():
            raise ModelError(f"{out} is there already.", hint="Remove it, or give another --out.")
        self._source, self._out, self._blueprint, self._checkpoint = source, out, blueprint, checkpoint
        self._partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
        self._num_files = blueprint.config.num_layers + 1
        self._places: dict[str, str] = {}
        self._int8_paths: list[str] = []
        self._num_bytes = 0
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise ModelError(f"{self._partial} can't be made: {error.strerror}.") from error

    def put_layer(self, layer: int, weights: Mapping[str, QuantizedWeight]) -> None:
        """Write the linears of a layer, by path."""
        tensors: dict[str, Tensor] = {}
        for path, weight in weights.items():
            tensors |= _parts(path, weight)
            if weight.format == "int8":
                self._int8_paths.append(path)
        self._save(layer, tensors)

    def finish(self) -> Path:
        """Write everything else, and give the checkpoint its name."""
        rounded = {f"{path}.weight" for path in self._paths()}
        names = frozenset(name for name in self._blueprint.expected if name not in rounded)
        self._save(self._num_files - 1, {stored.name: tensor for stored, tensor, _ in self._checkpoint.read(names)})
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._places}
        (self._partial / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        config = json.loads((self._source / "config.json").read_text())
        config["quantization_config"] = self._config()
        (self._partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in sorted(self._source.iterdir()):
            is_other = path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json")
            if is_other and path.name != "config.json":
                shutil.copyfile(path, self._partial / path.name)
        self._partial.rename(self._out)
        return self._out

    def discard(self) -> None:
        """Remove what was written of a checkpoint that isn't finished; no-op after `finish`."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _paths(self) -> list[str]:
        kinds = (SiteKind.LAYER, SiteKind.EXPERT)
        return [module.path for site in self._blueprint.sites if site.kind in kinds for module in site.modules]

    def _save(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        name = f"model-{number + 1:05d}-of-{self._num_files:05d}.safetensors"
        try:
            save_file(dict(tensors), self._partial / name, {"format": "pt"})
        except OSError as error:
            raise ModelError(f"{self._partial / name} can't be written: {error.strerror}.") from error
        self._places |= dict.fromkeys(tensors, name)
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _config(self) -> dict[str, Any]:
        by_block: dict[int, list[str]] = {}
        for site in self._blueprint.sites:
            if site.kind in (SiteKind.LAYER, SiteKind.EXPERT):
                by_block.setdefault(rotation_block(site.in_features), []).extend(m.path for m in site.modules)
        groups = {"group_0": _group(["Linear"], 4, symmetric=False, strategy="group", group_size=INT4_GROUP_SIZE)}
        if self._int8_paths:
            # a path is tried before a class
            groups["group_1"] = _group(self._int8_paths, 8, symmetric=True, strategy="channel", group_size=None)
        unrounded = [self._blueprint.config.architecture.head.removesuffix(".weight")]
        unrounded += [m.path for site in self._blueprint.sites if site.kind is SiteKind.ROUTER for m in site.modules]
        transforms = {f"h{block}": _transform(block, paths) for block, paths in by_block.items() if block}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": unrounded,
            "transform_config": {"config_groups": transforms},
        }


def _group(targets: Sequence[str], num_bits: int, **weights: object) -> dict[str, Any]:
    """Build a config group of linears whose weights are stored in that many bits."""
    return {
        "targets": list(targets),
        "weights": {"num_bits": num_bits, "type": "int", "dynamic": False, **weights},
        "input_activations": None,
    }


def _transform(block: int, paths: Sequence[str]) -> dict[str, Any]:
    places = ({"location": "input"}, {"location": "weight_input", "inverse": True})
    return {"type": "hadamard", "head_dim": block, "apply": [{"targets": list(paths), **place} for place in places]}


def _parts(path: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Convert a linear to the tensors of pack-quantized, whose Hadamard matrices are orthogonal."""
    scales = weight.scales * math.sqrt(max(weight.rotation, 1))
    shape = torch.tensor([weight.out_features, weight.in_features])
    zeros = weight.zeros
    if zeros is None:
        # of int8, by channel; a word holds four codes, each its value and 128
        codes = weight.codes.contiguous().view(torch.uint8) ^ 0x80
        padded = codes.new_full((weight.out_features, -(-weight.in_features // 4) * 4), 0x80)
        padded[:, : weight.in_features] = codes
        return {
            f"{path}.weight_packed": padded.view(torch.int32),
            f"{path}.weight_scale": scales.contiguous(),
            f"{path}.weight_shape": shape,
        }
    # words hold the zeros of eight channels, the first in the lowest bits
    padded = zeros.new_zeros(zeros.shape[1], -(-zeros.shape[0] // _PER_WORD) * _PER_WORD)
    padded[:, : zeros.shape[0]] = zeros.t()
    packed_zeros = pack_nibbles(padded).contiguous().view(torch.int32).t().contiguous()
    return {
        f"{path}.weight_packed": weight.codes.contiguous().view(torch.int32),
        f"{path}.weight_scale": scales.bfloat16().contiguous(),
        f"{path}.weight_zero_point": packed_zeros,
        f"{path}.weight_shape": shape,
    }
