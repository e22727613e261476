"""Linears whose weights a checkpoint holds in 8 or 4 bits.

The tables say in which tensors, and what these must be. Reads no weight and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loraserve.errors import ModelError
from loraserve.model.checkpoint.headers import FLOATS, ITEM_SIZES, StoredTensor
from loraserve.model.config.formats import kernels_group_size
from loraserve.model.config.quantization_config import Layout, QuantizationConfig, Scheme
from loraserve.model.gguf.gguf_types import BLOCK_FORMATS
from loraserve_kernels.common.formats import GROUP_SIZES, NF4_GROUP_SIZE

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
    tensors: Mapping[str, ExpectedTensor]
    unread: tuple[str, ...] = ()

    def group_size(self, num_scales: int) -> int:
        """Return how many inputs share a scale in memory.

        In the checkpoint each output channel has `num_scales` of them.
        """
        is_by_group = self.scheme.format == "int4" or num_scales > 1 or not self.scheme.is_symmetric
        return (kernels_group_size(self.in_features // num_scales) if is_by_group else None) or self.in_features


def find_stored_weight(
    config: QuantizationConfig | None, path: str, shape: tuple[int, int], stored: Mapping[str, StoredTensor]
) -> StoredWeight | None:
    """Return how the weight of the linear at `path` is stored.

    None: as one tensor of a float dtype.

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
        return StoredWeight(path, scheme, out_features, in_features, tensors)
    if scheme.layout is Layout.BITSANDBYTES:
        return _find_bitsandbytes(path, scheme, shape, stored)
    num_groups = _num_groups(path, scheme, in_features)
    if scheme.rotation and in_features % scheme.rotation:
        raise ModelError(
            f"{path} has {in_features} inputs, which isn't a multiple of its rotation's blocks, {scheme.rotation}."
        )
    scale = ExpectedTensor(((out_features, num_groups),) if num_groups > 1 else ((out_features, 1), (1,), (), (1, 1)))
    unread = ("input_scale",) if scheme.has_input_scale else ()
    if scheme.layout is Layout.NAIVE:
        codes = ExpectedTensor((shape,), ("I8",) if scheme.format == "int8" else ("F8_E4M3",))
        tensors = {"weight": codes, "weight_scale": scale}
        if not scheme.is_symmetric:
            tensors["weight_zero_point"] = ExpectedTensor(((out_features, num_groups),), ("I8",))
        return StoredWeight(path, scheme, out_features, in_features, tensors, unread)
    per_word = 8 if scheme.format == "int4" else 4
    tensors = {
        "weight_packed": ExpectedTensor(((out_features, -(-in_features // per_word)),), ("I32",)),
        "weight_scale": scale,
        "weight_shape": ExpectedTensor(((2,),), ("I64", "I32")),
    }
    if not scheme.is_symmetric:
        tensors["weight_zero_point"] = ExpectedTensor(((-(-out_features // per_word), num_groups),), ("I32",))
    return StoredWeight(path, scheme, out_features, in_features, tensors, unread)


def _num_groups(path: str, scheme: Scheme, in_features: int) -> int:
    """Return the number of scales of each output channel."""
    size = scheme.group_size or in_features
    if in_features % size:
        raise ModelError(f"{path} has {in_features} inputs, which isn't a multiple of its group_size, {size}.")
    # one scale for an output channel is any width's with int8 and FP8, but zeros are groups' alone
    is_by_group = scheme.format == "int4" or scheme.group_size is not None or not scheme.is_symmetric
    if is_by_group and kernels_group_size(size) is None:
        kind = scheme.format if scheme.is_symmetric else f"asymmetric {scheme.format}"
        raise ModelError(
            f"{path} has {size} inputs with a common {kind} scale; only multiples of {min(GROUP_SIZES)} are "
            "implemented.",
            hint="Give the float checkpoint and --quantize int8.",
        )
    return in_features // size


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
