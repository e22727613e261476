"""Weights that a checkpoint holds in words of codes, as GPTQ, AWQ and AutoRound write them.

Codes, scales and zeros are taken over as they are. A weight is ``(code - zero) * scale``, for the
zero and the scale of its input's group.

Sources: QuantLinear.pack of AutoGPTQ (auto_gptq/nn_modules/qlinear/qlinear_cuda.py), conversion of
GPTQ's first format to the second in GPTQModel (gptqmodel/utils/model.py), WQLinear_GEMM of AutoAWQ
(awq/modules/linear/gemm.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from loraserve.errors import ModelError
from loraserve.model.checkpoint.stored_weights import StoredWeight
from loraserve.model.config.formats import kernels_group_size
from loraserve.model.config.quantization_scheme import Layout
from loraserve_kernels.common.quantized import QuantizedWeight, pack_nibbles, unpack_nibbles
from loraserve_kernels.common.row_blocks import row_blocks

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight neighbouring outputs."""

_MIDDLE = {"int4": 8, "int8": 128}
_ONES = {"int4": 0x11111111, "int8": 0x01010101}
"""Word whose codes are all 1."""

_AWQ_WORDS = 64
"""Words of each input that are unpacked at a time."""


def assemble_words(stored: StoredWeight, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """Assemble a weight from these tensors, as many as `stored.tensors` names.

    Raises:
        ModelError: they contradict each other, or hold numbers that no weight can be made of; the
            message names one.
    """
    _check_bias(stored, parts)
    scales = parts["scales"].float()
    num_bad = int((~torch.isfinite(scales)).sum())
    if num_bad:
        raise ModelError(
            f"The tensor {stored.path}.scales has {num_bad} of {scales.numel()} scales that aren't finite.",
            hint="Fetch the checkpoint again, or quantize it again.",
        )
    zeros: Tensor | None = _zeros(stored, parts["qzeros"])
    if stored.scheme.is_symmetric and zeros is not None and bool((zeros == _MIDDLE[stored.scheme.format]).all()):
        # the code that means 0 where a weight has no zeros
        zeros = None
    group_size = _group_size(stored, zeros)
    permutation, groups = input_order(stored, parts.get("g_idx"), group_size)
    codes = _codes(stored, parts["qweight"], permutation)
    return QuantizedWeight(
        stored.scheme.format,
        codes,
        scales.t()[:, groups].contiguous(),
        None if zeros is None else zeros[:, groups].contiguous(),
        group_size,
        stored.in_features,
        stored.out_features,
        permutation=permutation,
    )


def _check_bias(stored: StoredWeight, parts: Mapping[str, Tensor]) -> None:
    """Refuse a bias of a linear that has none in this model, unless it is zero."""
    bias = parts.get("bias")
    if bias is not None and bool((bias != 0).any()):
        raise ModelError(
            f"The tensor {stored.path}.bias isn't zero; this linear has no bias with this config.json: ignoring it "
            "would change the answers.",
            hint="Check the bias flags in config.json (attention_bias, mlp_bias).",
        )


def _group_size(stored: StoredWeight, zeros: Tensor | None) -> int:
    """Choose how many inputs share a scale in memory."""
    if zeros is None or stored.has_groups:
        return stored.group_size
    # the config states that zeros are all in the middle, and they aren't: groups alone have zeros
    size = kernels_group_size(stored.in_features)
    if size is None:
        raise ModelError(
            f"The tensor {stored.path}.qzeros has zeros that aren't {_MIDDLE[stored.scheme.format]}, although the "
            "config says that the weight is symmetric (sym).",
            hint="Check sym in quantization_config.",
        )
    return size


def _zeros(stored: StoredWeight, words: Tensor) -> Tensor:
    """Unpack each group's code for 0, [out_features, groups] uint8.

    GPTQ's first format holds one less. It is added to whole words, as the library that defines the
    format does: a code of 15 carries into the next, from which one was borrowed.
    """
    added = words.long() + stored.scheme.zero_offset * _ONES[stored.scheme.format]
    codes = _output_codes(stored, added.to(torch.int32))
    return codes[:, : stored.out_features].t().contiguous()


def _output_codes(stored: StoredWeight, words: Tensor) -> Tensor:
    """Unpack the codes of words that hold neighbouring outputs, [rows, outputs] uint8."""
    octets = words.contiguous().view(torch.uint8)
    if stored.scheme.format == "int8":
        return octets
    codes = unpack_nibbles(octets)
    if stored.scheme.layout is Layout.AWQ:
        codes = codes.view(len(octets), -1, 8)[:, :, list(_AWQ_PLACES)].reshape(len(octets), -1)
    return codes


def input_order(stored: StoredWeight, g_idx: Tensor | None, group_size: int) -> tuple[Tensor | None, Tensor]:
    """Compute the order in which inputs that share a scale are neighbours, and their groups.

    The order is a `QuantizedWeight.permutation`; None: they do already. The groups are those of the
    file, one for each group in memory.

    Args:
        g_idx: [in_features], the group of each input; None: they're in order.
        group_size: inputs that share a scale in memory.

    Raises:
        ModelError: groups that don't exist, or that aren't filled by groups in memory.
    """
    in_features, num_groups = stored.in_features, stored.num_scales
    size = stored.scheme.group_size or in_features
    if g_idx is None:
        return None, torch.arange(0, in_features, group_size) // size
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= num_groups:
        raise ModelError(
            f"The tensor {stored.path}.{stored.order_name} holds groups from {int(g_idx.min())} to {int(g_idx.max())}; "
            f"expected 0 to {num_groups - 1}."
        )
    groups, order = g_idx.long().sort(stable=True)
    blocks = groups.view(-1, group_size)
    if bool((blocks != blocks[:, :1]).any()):
        counts = g_idx.long().bincount(minlength=num_groups)
        odd = int((counts % group_size != 0).nonzero()[0])
        raise ModelError(
            f"The tensor {stored.path}.{stored.order_name} puts {int(counts[odd])} inputs into group {odd}; only "
            f"multiples of {group_size} are implemented.",
            hint="Quantize again without an order of activations (desc_act, actorder).",
        )
    is_in_order = torch.equal(order, torch.arange(in_features))
    return None if is_in_order else order.to(torch.int32), blocks[:, 0]


def _codes(stored: StoredWeight, words: Tensor, permutation: Tensor | None) -> Tensor:
    """Unpack the codes as a `QuantizedWeight` has them, inputs in the permutation's order."""
    if stored.scheme.layout is Layout.AWQ:
        return _awq_codes(stored, words)
    # words of an output side by side: their bytes, in the file's order, hold its codes in order
    octets = words.t().contiguous().view(torch.uint8)
    if stored.scheme.format == "int8":
        octets = (octets[:, : stored.in_features] ^ 0x80).view(torch.int8)
    return reordered(octets, permutation)


def reordered(codes: Tensor, permutation: Tensor | None) -> Tensor:
    """Reorder codes as a `QuantizedWeight` has them, their inputs in the permutation's order.

    Args:
        codes: [out_features, in_features] int8, or uint8 with two codes in a byte.
    """
    if permutation is None:
        return codes.contiguous()
    if codes.dtype != torch.uint8:
        return codes.index_select(1, permutation)
    out = torch.empty_like(codes)
    for first, last in row_blocks(0, codes.shape[0], 2 * codes.shape[1]):
        block = codes[first:last]
        out[first:last] = pack_nibbles(unpack_nibbles(block).index_select(1, permutation))
    return out


def _awq_codes(stored: StoredWeight, words: Tensor) -> Tensor:
    """Unpack int4's codes, [out_features, in_features / 2] uint8."""
    out = torch.empty(stored.out_features, stored.in_features // 2, dtype=torch.uint8)
    for first in range(0, words.shape[1], _AWQ_WORDS):
        codes = _output_codes(stored, words[:, first : first + _AWQ_WORDS])
        rows = out[8 * first : 8 * (first + _AWQ_WORDS)]
        rows.copy_(pack_nibbles(codes.t()[: len(rows)]))
    return out
