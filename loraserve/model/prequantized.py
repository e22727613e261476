"""Weights that a checkpoint holds in 8 or 4 bits: which tensors one is stored in, and what they become together. Codes and scales are taken over as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loraserve.errors import ModelError, ShapeMismatch
from loraserve.model.checkpoint import DTYPES, FLOATS, StoredTensor
from loraserve.model.quantization_config import Layout, QuantizationConfig, Scheme
from loraserve_kernels.quantized import GROUP_SIZES, NF4_CODE, NF4_GROUP_SIZE, QuantizedWeight

_STATE = "weight.quant_state.bitsandbytes__nf4"

_MAX_STATE_BYTES = 1 << 16

_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, slots=True)
class Expected:
    """What a stored tensor must be.

    Attributes:
        shapes: one of these; None: any that `StoredWeight.assemble` accepts.
        dtypes: one of these, by the names of safetensors.
    """

    shapes: tuple[tuple[int, ...], ...] | None
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A linear's weight in a checkpoint, quantized.

    Attributes:
        path: the linear's.
        scheme: how it's stored.
        tensors: by what follows the path, each with what it must be.
        unread: tensors beside them, by what follows the path, that aren't used.
    """

    path: str
    scheme: Scheme
    out_features: int
    in_features: int
    tensors: Mapping[str, Expected]
    unread: tuple[str, ...] = ()

    def assemble(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """Return the weight of these tensors, as many as `tensors` names; codes are copied only where their bits must be moved.

        Raises:
            ModelError: they contradict each other, or hold numbers that no weight can be made of; the message names one.
        """
        if self.scheme.layout is Layout.NAIVE:
            zeros = parts.get("weight_zero_point")
            # kernels have the code that means 0 as a number from 0, in bytes
            zeros = None if zeros is None else (zeros ^ -0x80).view(torch.uint8)
            return self._finish(parts["weight"], parts["weight_scale"], zeros)
        if self.scheme.layout is Layout.PACKED:
            return self._unpack(parts)
        return self._from_bitsandbytes(parts)

    def _unpack(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        shape = (self.out_features, self.in_features)
        found = tuple(parts["weight_shape"].tolist())
        if found != shape:
            raise ShapeMismatch(f"The tensor {self.path}.weight_shape says {list(found)}; expected {list(shape)}.")
        # int32 words hold the codes from the lowest bits up, so that their bytes, in the file's order, do too
        codes = parts["weight_packed"].view(torch.uint8)
        if self.scheme.format == "int8":
            # each code is its value and 128
            codes = (codes[:, : self.in_features] ^ 0x80).view(torch.int8)
        zeros = parts.get("weight_zero_point")
        return self._finish(codes, parts["weight_scale"], None if zeros is None else self._zeros(zeros))

    def _zeros(self, packed: Tensor) -> Tensor:
        """Each group's code for 0, [out_features, groups] uint8, of words that hold the codes of four channels, or of eight for int4."""
        columns = packed.t().contiguous().view(torch.uint8)
        codes = columns
        if self.scheme.format == "int4":
            codes = torch.stack((columns & 15, columns >> 4), dim=-1).view(columns.shape[0], -1)
        return codes[:, : self.out_features].t().contiguous()

    def _finish(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> QuantizedWeight:
        """Bring scales and zeros into groups that kernels have."""
        self._check_numbers(codes, scales)
        # one scale for the whole tensor is the scale of every channel
        scales = scales.float().reshape(-1, scales.shape[-1] if scales.dim() == 2 else 1)
        scales = scales.expand(self.out_features, scales.shape[1])
        group_size = self.in_features
        if self.scheme.format == "int4" or scales.shape[1] > 1 or zeros is not None:
            group_size = _kernels_group_size(self.in_features // scales.shape[1]) or group_size
            num_repeats = self.in_features // group_size // scales.shape[1]
            scales = scales.repeat_interleave(num_repeats, dim=1)
            zeros = None if zeros is None else zeros.repeat_interleave(num_repeats, dim=1)
        return QuantizedWeight(
            self.scheme.format,
            codes.contiguous(),
            scales.contiguous(),
            zeros,
            group_size,
            self.in_features,
            self.out_features,
        )

    def _check_numbers(self, codes: Tensor, scales: Tensor) -> None:
        """Refuse what no kernel looks for while it multiplies."""
        num_bad = int((~(torch.isfinite(scales) & (scales > 0))).sum())
        if num_bad:
            raise ModelError(
                f"The tensor {self.path}.weight_scale has {num_bad} of {scales.numel()} scales that aren't finite and above 0.",
                hint="Fetch the checkpoint again, or quantize it again.",
            )
        if self.scheme.format == "fp8":
            # a few rows at a time: the largest weights are half a gigabyte
            octets, step = codes.view(torch.uint8), _ROWS_AT_A_TIME
            blocks = (octets[first : first + step] for first in range(0, len(octets), step))
            num_bad = sum(int(((block & 0x7F) == 0x7F).sum()) for block in blocks)
            if num_bad:
                raise ModelError(
                    f"The tensor {self.path}.weight has {num_bad} of {codes.numel()} FP8 codes that are NaN (0x7f or 0xff).",
                    hint="Fetch the checkpoint again, or quantize it again.",
                )

    def _from_bitsandbytes(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        state = self._state(parts[_STATE])
        block_size = self._whole_number(state, "blocksize")
        num_weights = self.out_features * self.in_features
        if state.get("shape") != [self.out_features, self.in_features] or state.get("quant_type") != "nf4":
            raise ModelError(
                f"{self.path}.{_STATE} says {_shown(state)}; expected nf4 of shape [{self.out_features}, {self.in_features}]."
            )
        if block_size % NF4_GROUP_SIZE or num_weights % block_size:
            raise ModelError(
                f"{self.path}.{_STATE} has blocks of {block_size} weights; only multiples of {NF4_GROUP_SIZE} that fill the weight are implemented."
            )
        if not torch.allclose(parts["weight.quant_map"].float(), torch.tensor(NF4_CODE), rtol=0, atol=1e-6):
            raise ModelError(f"{self.path}.weight.quant_map isn't NF4's.")
        absmax = self._absmax(parts, state)
        if absmax.numel() != num_weights // block_size:
            raise ShapeMismatch(
                f"The tensor {self.path}.weight.absmax has {absmax.numel()} scales; expected {num_weights // block_size}, one for {block_size} weights."
            )
        if not bool(torch.isfinite(absmax).all()):
            raise ModelError(
                f"The scales of {self.path} (weight.absmax, and what it's nested in) aren't all finite.",
                hint="Fetch the checkpoint again, or quantize it again.",
            )
        scales = absmax.repeat_interleave(block_size // NF4_GROUP_SIZE).view(self.out_features, -1)
        # whatever dtype the bytes are stored as; bitsandbytes has the first of two codes in the high bits
        codes = parts["weight"].reshape(-1).view(torch.uint8)
        codes = (codes << 4 | codes >> 4).view(self.out_features, -1)
        return QuantizedWeight("nf4", codes, scales, None, NF4_GROUP_SIZE, self.in_features, self.out_features)

    def _absmax(self, parts: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
        """The scales, float32; quantized themselves where the checkpoint is nested."""
        absmax = parts["weight.absmax"]
        if "weight.nested_absmax" not in parts:
            return absmax
        block_size = self._whole_number(state, "nested_blocksize")
        offset = state.get("nested_offset")
        if isinstance(offset, bool) or not isinstance(offset, int | float):
            raise ModelError(f"{self.path}.{_STATE}: nested_offset is {_shown(offset)}; expected a number.")
        nested = parts["weight.nested_absmax"]
        if nested.numel() != -(-absmax.numel() // block_size):
            raise ShapeMismatch(
                f"The tensor {self.path}.weight.nested_absmax has {nested.numel()} scales; expected one for {block_size} of {absmax.numel()}."
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
        raise ModelError(f"The tensor {self.path}.{_STATE} isn't a quantization state: expected a JSON object.")

    def _whole_number(self, state: Mapping[str, Any], name: str) -> int:
        value = state.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ModelError(f"{self.path}.{_STATE}: {name} is {_shown(value)}; expected a whole number above 0.")
        return value


def find_stored_weight(
    config: QuantizationConfig | None, path: str, shape: tuple[int, int], stored: Mapping[str, StoredTensor]
) -> StoredWeight | None:
    """Return how the weight of the linear at `path` is stored; None: as one tensor of a float dtype.

    Raises:
        ModelError: it's stored in a way, or has a width, that isn't implemented.
    """
    scheme = None if config is None else config.scheme(path)
    if scheme is None:
        return None
    out_features, in_features = shape
    if scheme.layout is Layout.BITSANDBYTES:
        return _find_bitsandbytes(path, scheme, shape, stored)
    num_groups = _num_groups(path, scheme, in_features)
    scale = Expected(((out_features, num_groups),) if num_groups > 1 else ((out_features, 1), (1,), (), (1, 1)))
    unread = ("input_scale",) if scheme.has_input_scale else ()
    if scheme.layout is Layout.NAIVE:
        codes = Expected((shape,), ("I8",) if scheme.format == "int8" else ("F8_E4M3",))
        tensors = {"weight": codes, "weight_scale": scale}
        if not scheme.is_symmetric:
            tensors["weight_zero_point"] = Expected(((out_features, num_groups),), ("I8",))
        return StoredWeight(path, scheme, out_features, in_features, tensors, unread)
    per_word = 8 if scheme.format == "int4" else 4
    tensors = {
        "weight_packed": Expected(((out_features, -(-in_features // per_word)),), ("I32",)),
        "weight_scale": scale,
        "weight_shape": Expected(((2,),), ("I64", "I32")),
    }
    if not scheme.is_symmetric:
        tensors["weight_zero_point"] = Expected(((-(-out_features // per_word), num_groups),), ("I32",))
    return StoredWeight(path, scheme, out_features, in_features, tensors, unread)


def _num_groups(path: str, scheme: Scheme, in_features: int) -> int:
    """How many scales each output channel has."""
    size = scheme.group_size or in_features
    if in_features % size:
        raise ModelError(f"{path} has {in_features} inputs, which groups of {size} (group_size) don't fill.")
    # one scale for an output channel is any width's with int8 and FP8, but zeros are groups' alone
    is_by_group = scheme.format == "int4" or scheme.group_size is not None or not scheme.is_symmetric
    if is_by_group and _kernels_group_size(size) is None:
        kind = scheme.format if scheme.is_symmetric else f"asymmetric {scheme.format}"
        raise ModelError(
            f"{path} has {size} inputs with a common {kind} scale; only multiples of {min(GROUP_SIZES)} are implemented.",
            hint="Give the float checkpoint and --quantize int8.",
        )
    return in_features // size


def _kernels_group_size(size: int) -> int | None:
    """The largest group that kernels have, of those that cut a stored group evenly."""
    return max((small for small in GROUP_SIZES if size % small == 0), default=None)


def _find_bitsandbytes(
    path: str, scheme: Scheme, shape: tuple[int, int], stored: Mapping[str, StoredTensor]
) -> StoredWeight | None:
    if f"{path}.{_STATE}" not in stored:
        other = next((name for name in stored if name.startswith(f"{path}.weight.quant_state.")), None)
        if other is not None:
            raise ModelError(
                f"{other} says that this weight isn't NF4, which is all that's implemented of bitsandbytes.",
                hint="Give the float checkpoint and --quantize nf4.",
            )
        return None
    out_features, in_features = shape
    if in_features % NF4_GROUP_SIZE:
        raise ModelError(
            f"{path} has {in_features} inputs; NF4 is implemented for multiples of {NF4_GROUP_SIZE}.",
            hint="Give the float checkpoint and --quantize int8.",
        )
    is_nested = f"{path}.weight.nested_absmax" in stored
    # bnb_4bit_quant_storage: the same bytes, as elements of any of these
    dtypes = ("U8", "I8", *FLOATS)
    weight = stored.get(f"{path}.weight")
    item_size = DTYPES[weight.dtype].itemsize if weight is not None and weight.dtype in dtypes else 1
    tensors = {
        "weight": Expected(((out_features * in_features // 2 // item_size, 1),), dtypes),
        "weight.absmax": Expected(None, ("U8",) if is_nested else ("F32",)),
        "weight.quant_map": Expected(((16,),), ("F32",)),
        _STATE: Expected(None, ("U8",)),
    }
    if is_nested:
        tensors["weight.nested_absmax"] = Expected(None, ("F32",))
        tensors["weight.nested_quant_map"] = Expected(((256,),), ("F32",))
    return StoredWeight(path, scheme, out_features, in_features, tensors)


def _shown(value: object) -> str:
    return json.dumps(value)[:200]
