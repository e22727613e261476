"""Weights that a checkpoint holds in 8 or 4 bits: what their tensors become together.

Codes and scales are taken over as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loraserve.errors import ModelError, ShapeMismatch
from loraserve.model.checkpoint.stored_weights import NF4_STATE, StoredWeight
from loraserve.model.checkpoint.word_codes import assemble_words, input_order, reordered
from loraserve.model.config.quantization_config import Layout
from loraserve.model.gguf.gguf_blocks import unpack_blocks
from loraserve_kernels.common.quantized import NF4_CODE, NF4_GROUP_SIZE, QuantizedWeight, unpack_nibbles

_MAX_STATE_BYTES = 1 << 16

_ROWS_AT_A_TIME = 1024


def assemble(stored: StoredWeight, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """Assemble a weight from these tensors, as many as `stored.tensors` names.

    Codes are copied only where their bits must be moved.

    Raises:
        ModelError: they contradict each other, or hold numbers that no weight can be made of; the
            message names one.
    """
    return _Assembly(stored).weight(parts)


@dataclass(frozen=True, slots=True)
class _Assembly:
    stored: StoredWeight

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        if self.stored.scheme.layout is Layout.GGUF:
            return unpack_blocks(parts["weight"], self.stored.scheme.block_type, self.stored.in_features)
        if self.stored.scheme.layout in (Layout.GPTQ, Layout.AWQ):
            return assemble_words(self.stored, parts)
        if self.stored.scheme.layout is Layout.FP8:
            return self._finish(parts["weight"], parts[self.stored.scale_name], None)
        if self.stored.scheme.layout is Layout.NAIVE:
            zeros = parts.get("weight_zero_point")
            # kernels have the code that means 0 as a number from 0, in bytes
            zeros = None if zeros is None else (zeros ^ -0x80).view(torch.uint8)
            return self._finish(parts["weight"], parts["weight_scale"], zeros)
        if self.stored.scheme.layout is Layout.PACKED:
            return self._unpack(parts)
        return self._from_bitsandbytes(parts)

    def _unpack(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        shape = (self.stored.out_features, self.stored.in_features)
        found = tuple(parts["weight_shape"].tolist())
        if found != shape:
            raise ShapeMismatch(
                f"The tensor {self.stored.path}.weight_shape says {list(found)}; expected {list(shape)}."
            )
        # int32 words hold the codes from the lowest bits up, so that their bytes, in the file's
        # order, do too
        codes = parts["weight_packed"].view(torch.uint8)
        if self.stored.scheme.format == "int8":
            # each code is its value and 128
            codes = (codes[:, : self.stored.in_features] ^ 0x80).view(torch.int8)
        zeros = parts.get("weight_zero_point")
        zeros = None if zeros is None else self._zeros(zeros)
        return self._finish(codes, parts["weight_scale"], zeros, parts.get("weight_g_idx"))

    def _zeros(self, packed: Tensor) -> Tensor:
        """Unpack each group's code for 0, [out_features, groups] uint8.

        They are read from words that hold the codes of four channels, or of eight for int4.
        """
        columns = packed.t().contiguous().view(torch.uint8)
        codes = columns
        if self.stored.scheme.format == "int4":
            codes = unpack_nibbles(columns)
        return codes[:, : self.stored.out_features].t().contiguous()

    def _finish(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None = None
    ) -> QuantizedWeight:
        """Bring scales and zeros into groups that kernels have."""
        self._check_numbers(codes, scales)
        # one scale for the whole tensor is the scale of every channel
        scales = scales.float().reshape(-1, scales.shape[-1] if scales.dim() == 2 else 1)
        block_rows, out_features = self.stored.scheme.block_rows, self.stored.out_features
        if block_rows:
            scales = scales.repeat_interleave(block_rows, dim=0)[:out_features]
        scales = scales.expand(out_features, scales.shape[1])
        permutation, groups = input_order(self.stored, g_idx, self.stored.group_size)
        scales, zeros = scales[:, groups], None if zeros is None else zeros[:, groups]
        rotation = self.stored.scheme.rotation
        if rotation:
            # the file's Hadamard matrices are orthogonal, the kernels' have elements of 1 and −1
            scales = scales / math.sqrt(rotation)
        return QuantizedWeight(
            self.stored.scheme.format,
            reordered(codes, permutation),
            scales.contiguous(),
            zeros,
            self.stored.group_size,
            self.stored.in_features,
            self.stored.out_features,
            rotation,
            permutation,
        )

    def _check_numbers(self, codes: Tensor, scales: Tensor) -> None:
        """Refuse what no kernel looks for while it multiplies."""
        num_bad = int((~(torch.isfinite(scales) & (scales > 0))).sum())
        if num_bad:
            raise ModelError(
                f"The tensor {self.stored.path}.{self.stored.scale_name} has {num_bad} of {scales.numel()} scales "
                "that aren't finite and above 0.",
                hint="Fetch the checkpoint again, or quantize it again.",
            )
        if self.stored.scheme.format == "fp8":
            # a few rows at a time: the largest weights are half a gigabyte
            octets, step = codes.view(torch.uint8), _ROWS_AT_A_TIME
            blocks = (octets[first : first + step] for first in range(0, len(octets), step))
            num_bad = sum(int(((block & 0x7F) == 0x7F).sum()) for block in blocks)
            if num_bad:
                raise ModelError(
                    f"The tensor {self.stored.path}.weight has {num_bad} of {codes.numel()} FP8 codes that are NaN "
                    "(0x7f or 0xff).",
                    hint="Fetch the checkpoint again, or quantize it again.",
                )

    def _from_bitsandbytes(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        state = self._state(parts[NF4_STATE])
        block_size = self._whole_number(state, "blocksize")
        num_weights = self.stored.out_features * self.stored.in_features
        if (
            state.get("shape") != [self.stored.out_features, self.stored.in_features]
            or state.get("quant_type") != "nf4"
        ):
            raise ModelError(
                f"{self.stored.path}.{NF4_STATE} says {_shown(state)}; expected nf4 of shape "
                f"[{self.stored.out_features}, {self.stored.in_features}]."
            )
        if block_size % NF4_GROUP_SIZE or num_weights % block_size:
            raise ModelError(
                f"{self.stored.path}.{NF4_STATE} has blocks of {block_size} weights; "
                f"only multiples of {NF4_GROUP_SIZE} that divide the weight are implemented."
            )
        if not torch.allclose(parts["weight.quant_map"].float(), torch.tensor(NF4_CODE), rtol=0, atol=1e-6):
            raise ModelError(
                f"{self.stored.path}.weight.quant_map isn't the table of NF4, the only one that is implemented."
            )
        absmax = self._absmax(parts, state)
        if absmax.numel() != num_weights // block_size:
            raise ShapeMismatch(
                f"The tensor {self.stored.path}.weight.absmax has {absmax.numel()} scales; "
                f"expected {num_weights // block_size}, one for {block_size} weights."
            )
        if not bool(torch.isfinite(absmax).all()):
            raise ModelError(
                f"The scales of {self.stored.path} (weight.absmax, and what it's nested in) aren't all finite.",
                hint="Fetch the checkpoint again, or quantize it again.",
            )
        scales = absmax.repeat_interleave(block_size // NF4_GROUP_SIZE).view(self.stored.out_features, -1)
        # whatever dtype the bytes are stored as; bitsandbytes has the first of two codes in the
        # high bits
        codes = parts["weight"].reshape(-1).view(torch.uint8)
        codes = (codes << 4 | codes >> 4).view(self.stored.out_features, -1)
        return QuantizedWeight(
            "nf4", codes, scales, None, NF4_GROUP_SIZE, self.stored.in_features, self.stored.out_features
        )

    def _absmax(self, parts: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
        """Read the scales, float32; quantized themselves where the checkpoint is nested."""
        absmax = parts["weight.absmax"]
        if "weight.nested_absmax" not in parts:
            return absmax
        block_size = self._whole_number(state, "nested_blocksize")
        offset = state.get("nested_offset")
        if isinstance(offset, bool) or not isinstance(offset, int | float):
            raise ModelError(f"{self.stored.path}.{NF4_STATE}: nested_offset is {_shown(offset)}; expected a number.")
        nested = parts["weight.nested_absmax"]
        if nested.numel() != -(-absmax.numel() // block_size):
            raise ShapeMismatch(
                f"The tensor {self.stored.path}.weight.nested_absmax has {nested.numel()} scales; "
                f"expected one for {block_size} of {absmax.numel()}."
            )
        scales = nested.repeat_interleave(block_size)[: absmax.numel()]
        return parts["weight.nested_quant_map"][absmax.int()] * scales + float(offset)

    def _state(self, packed: Tensor) -> Mapping[str, Any]:
        if packed.numel() <= _MAX_STATE_BYTES:
            try:
                state = json.loads(packed.numpy().tobytes())
            except (ValueError, RecursionError):
                state = None
            if isinstance(state, dict):
                return state
        raise ModelError(
            f"The tensor {self.stored.path}.{NF4_STATE} isn't a quantization state: expected a JSON object."
        )

    def _whole_number(self, state: Mapping[str, Any], name: str) -> int:
        value = state.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ModelError(
                f"{self.stored.path}.{NF4_STATE}: {name} is {_shown(value)}; expected a whole number above 0."
            )
        return value


def _shown(value: object) -> str:
    return json.dumps(value)[:200]
