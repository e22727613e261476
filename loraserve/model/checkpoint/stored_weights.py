"""Linears whose weights a checkpoint holds in 8 or 4 bits.

The tables list in which tensors, and what these must be. Reads no weight and imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from loraserve.errors import ModelError, ShapeMismatch
from loraserve.model.checkpoint.headers import FLOATS, ITEM_SIZES, StoredTensor
from loraserve.model.config.formats import kernels_group_size
from loraserve.model.config.gguf_types import BLOCK_FORMATS
from loraserve.model.config.quantization_config import Layout, QuantizationConfig, Scheme
from loraserve_kernels.common.formats import GROUP_SIZES, NF4_GROUP_SIZE, PACKED_FORMATS

NF4_STATE = "weight.quant_state.bitsandbytes__nf4"


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """Requirements on a stored tensor.

    Attributes:
        shapes: one of these; None: any that `prequantized.assemble` accepts.
        dtypes: one of these, by the names of safetensors.
    """

    shapes: tuple[tuple[int, ...], ...] | None
    dtypes: tuple[str, ...] = FLOATS

    def check(self, stored: StoredTensor) -> None:
        """Check a tensor of a file.

        Raises:
            ShapeMismatch, ModelError: it has another shape, or another dtype.
        """
        if self.shapes is not None and stored.shape not in self.shapes:
            shapes_text = " or ".join(str(list(shape)) for shape in self.shapes)
            raise ShapeMismatch(
                f"The tensor {stored.name} has the shape {list(stored.shape)}; expected {shapes_text} from "
                "config.json.",
                hint="Check that config.json belongs to this checkpoint.",
            )
        if stored.dtype not in self.dtypes:
            raise ModelError(
                f"The tensor {stored.name} is stored as {stored.dtype}; expected {' or '.join(self.dtypes)}.",
                hint="Check quantization_config in config.json, or give the float checkpoint.",
            )


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A linear's weight in a checkpoint, quantized.

    Attributes:
        path: the linear's.
        scheme: how it's stored.
        tensors: by what follows the path, each with what it must be.
        unread: tensors next to them, by what follows the path, that aren't used.
        num_scales: scales of each output channel in the checkpoint.
    """

    path: str
    scheme: Scheme
    out_features: int
    in_features: int
    tensors: Mapping[str, ExpectedTensor]
    unread: tuple[str, ...] = ()
    num_scales: int = 1

    def expected(self) -> dict[str, ExpectedTensor]:
        """Map the whole name of each tensor to what it must be."""
        dot = "" if self.scheme.layout is Layout.MXFP4 else "."
        return {f"{self.path}{dot}{suffix}": tensor for suffix, tensor in self.tensors.items()}

    @property
    def has_groups(self) -> bool:
        """Whether an output channel has scales for groups of its inputs, and not one alone."""
        return self.scheme.format in PACKED_FORMATS or self.num_scales > 1 or not self.scheme.is_symmetric

    @property
    def group_size(self) -> int:
        """Inputs that share a scale in memory."""
        if self.scheme.format == "nf4":
            return NF4_GROUP_SIZE
        if self.scheme.layout is Layout.GGUF:
            return self.scheme.group_size or self.in_features
        # the last group of the checkpoint may have fewer inputs
        size = math.gcd(self.scheme.group_size or self.in_features, self.in_features)
        return (kernels_group_size(size) if self.has_groups else None) or self.in_features

    @property
    def scale_name(self) -> str:
        """Name of the tensor of scales, after the path."""
        names = ("weight_scale", "weight_scale_inv", "scales", "weight.absmax")
        return next(name for name in names if name in self.tensors)

    @property
    def order_name(self) -> str | None:
        """Name of the tensor with the group of each input, after the path; None: there's none."""
        return next((name for name in ("g_idx", "weight_g_idx") if name in self.tensors), None)


def find_stored_weight(
    config: QuantizationConfig | None,
    path: str,
    shape: tuple[int, int],
    stored: Mapping[str, StoredTensor],
    *,
    has_bias: bool = True,
) -> StoredWeight | None:
    """Find how the weight of the linear at `path` is stored.

    None: as one tensor of a float dtype.

    Args:
        has_bias: False: the model has none here. GPTQ files may hold one for every linear, which
            must be zero where the model has none.

    Raises:
        ModelError: it's stored in a way, or has a width, that isn't implemented.
    """
    scheme = None if config is None else config.scheme(path)
    if scheme is None:
        return None
    out_features, in_features = shape
    if scheme.layout is Layout.GGUF:
        row_bytes = BLOCK_FORMATS[scheme.block_type].row_bytes(in_features)
        tensors = {"weight": ExpectedTensor(((out_features, row_bytes),), ("U8",))}
        num_groups = in_features // (scheme.group_size or in_features)
        return StoredWeight(path, scheme, out_features, in_features, tensors, num_scales=num_groups)
    if scheme.layout is Layout.BITSANDBYTES:
        return _find_bitsandbytes(path, scheme, shape, stored)
    if scheme.layout in (Layout.GPTQ, Layout.AWQ):
        return _find_words(path, scheme, shape, stored, has_bias)
    if scheme.layout is Layout.FP8:
        return _find_fp8(path, scheme, shape, stored)
    num_groups = _num_groups(path, scheme, in_features)
    if scheme.rotation and in_features % scheme.rotation:
        raise ModelError(
            f"{path} has {in_features} inputs, which isn't a multiple of its rotation's blocks, {scheme.rotation}."
        )
    scale = _expected_scales(scheme, shape, num_groups)
    unread = ("input_scale", "input_zero_point") if scheme.has_input_scale else ()
    if scheme.layout is Layout.NAIVE:
        codes = ExpectedTensor((shape,), ("I8",) if scheme.format == "int8" else ("F8_E4M3",))
        tensors = {"weight": codes, "weight_scale": scale}
        if not scheme.is_symmetric:
            tensors["weight_zero_point"] = ExpectedTensor(((out_features, num_groups),), ("I8",))
        return StoredWeight(path, scheme, out_features, in_features, tensors, unread, num_groups)
    per_word = 8 if scheme.format == "int4" else 4
    tensors = {
        **({"weight_g_idx": ExpectedTensor(((in_features,),), ("I32", "I64"))} if scheme.is_reordered else {}),
        "weight_packed": ExpectedTensor(((out_features, -(-in_features // per_word)),), ("I32",)),
        "weight_scale": scale,
        "weight_shape": ExpectedTensor(((2,),), ("I64", "I32")),
    }
    if not scheme.is_symmetric:
        tensors["weight_zero_point"] = ExpectedTensor(((-(-out_features // per_word), num_groups),), ("I32",))
    return StoredWeight(path, scheme, out_features, in_features, tensors, unread, num_groups)


def _find_words(
    path: str, scheme: Scheme, shape: tuple[int, int], stored: Mapping[str, StoredTensor], has_bias: bool
) -> StoredWeight | None:
    """Find how words of codes hold a weight, in GPTQ's layout or AWQ's; None: they don't."""
    if f"{path}.qweight" not in stored:
        return None
    out_features, in_features = shape
    num_groups = _num_groups(path, scheme, in_features)
    per_word = 8 if scheme.format == "int4" else 4
    out_words, in_words = -(-out_features // per_word), -(-in_features // per_word)
    codes = (in_words, out_features) if scheme.layout is Layout.GPTQ else (in_features, out_words)
    tensors = {
        "qweight": ExpectedTensor((codes,), ("I32",)),
        "qzeros": ExpectedTensor(((num_groups, out_words),), ("I32",)),
        "scales": ExpectedTensor(((num_groups, out_features),)),
    }
    if scheme.layout is Layout.GPTQ and f"{path}.g_idx" in stored:
        tensors["g_idx"] = ExpectedTensor(((in_features,),), ("I32", "I64"))
    if not has_bias and f"{path}.bias" in stored:
        tensors["bias"] = ExpectedTensor(((out_features,),))
    return StoredWeight(path, scheme, out_features, in_features, tensors, num_scales=num_groups)


def _find_fp8(
    path: str, scheme: Scheme, shape: tuple[int, int], stored: Mapping[str, StoredTensor]
) -> StoredWeight | None:
    """Find how a weight in FP8 is stored; None: in a float dtype, that of its tensor."""
    weight = stored.get(f"{path}.weight")
    if weight is None or weight.dtype != "F8_E4M3":
        return None
    num_groups = _num_groups(path, scheme, shape[1])
    tensors = {
        "weight": ExpectedTensor((shape,), ("F8_E4M3",)),
        "weight_scale_inv" if scheme.block_rows else "weight_scale": _expected_scales(scheme, shape, num_groups),
    }
    return StoredWeight(path, scheme, *shape, tensors, ("input_scale", "input_scale_ub"), num_groups)


def _expected_scales(scheme: Scheme, shape: tuple[int, int], num_groups: int) -> ExpectedTensor:
    out_features = shape[0]
    if scheme.block_rows:
        return ExpectedTensor(((-(-out_features // scheme.block_rows), num_groups),))
    by_channel = ((out_features, 1), (1,), (), (1, 1), *(((out_features,),) if scheme.layout is Layout.FP8 else ()))
    return ExpectedTensor(((out_features, num_groups),) if num_groups > 1 else by_channel)


def _num_groups(path: str, scheme: Scheme, in_features: int) -> int:
    """Count the scales of each output channel."""
    size = scheme.group_size or in_features
    # GPTQ's last group, and the last block, may have fewer inputs
    is_cut = scheme.layout is Layout.GPTQ or scheme.block_rows > 0
    if in_features % size and not is_cut:
        raise ModelError(f"{path} has {in_features} inputs, which isn't a multiple of its group_size, {size}.")
    num_groups = -(-in_features // size)
    size = math.gcd(size, in_features)
    # one scale for an output channel is any width's with int8 and FP8, but zeros are groups' alone
    is_by_group = scheme.format == "int4" or num_groups > 1 or not scheme.is_symmetric
    if is_by_group and kernels_group_size(size) is None:
        kind = scheme.format if scheme.is_symmetric else f"asymmetric {scheme.format}"
        raise ModelError(
            f"{path} has {size} inputs with a common {kind} scale; only multiples of {min(GROUP_SIZES)} are "
            "implemented.",
            hint="Give the float checkpoint and --quantize int8.",
        )
    return num_groups


def _find_bitsandbytes(
    path: str, scheme: Scheme, shape: tuple[int, int], stored: Mapping[str, StoredTensor]
) -> StoredWeight | None:
    if f"{path}.{NF4_STATE}" not in stored:
        other = next((name for name in stored if name.startswith(f"{path}.weight.quant_state.")), None)
        if other is not None:
            raise ModelError(
                f"{other} means that this weight isn't NF4, the only format of bitsandbytes that is implemented.",
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
    item_size = ITEM_SIZES[weight.dtype] if weight is not None and weight.dtype in dtypes else 1
    tensors = {
        "weight": ExpectedTensor(((out_features * in_features // 2 // item_size, 1),), dtypes),
        "weight.absmax": ExpectedTensor(None, ("U8",) if is_nested else ("F32",)),
        "weight.quant_map": ExpectedTensor(((16,),), ("F32",)),
        NF4_STATE: ExpectedTensor(None, ("U8",)),
    }
    if is_nested:
        tensors["weight.nested_absmax"] = ExpectedTensor(None, ("F32",))
        tensors["weight.nested_quant_map"] = ExpectedTensor(((256,),), ("F32",))
    return StoredWeight(path, scheme, out_features, in_features, tensors)
