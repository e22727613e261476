"""The quantization_config of GPTQ, AWQ, AutoRound and FP8 checkpoints. Imports no torch.

Which linears are quantized is read from the files: configs name them in several ways, and some name
them wrongly. A setting that changes what the tensors mean is read or refused by name.

Sources: GPTQModel's QuantizeConfig (https://github.com/ModelCloud/GPTQModel), AutoGPTQ's
``quantize_config.json``, AutoAWQ's ``quant_config.json`` (https://github.com/casper-hansen/AutoAWQ),
AutoRound (https://github.com/intel/auto-round), transformers' FineGrainedFP8Config and
FbgemmFp8Config.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from loraserve.model.config.quantization_fields import QuantizationFields, check_block
from loraserve.model.config.quantization_scheme import Layout, QuantizationConfig, Scheme

_SMALLEST_GROUP = 32
_UNQUANTIZED_BITS = 16
_REGEX_SIGNS = frozenset("*+?^$()[]{}|\\")

_AUTO_ROUND_PACKINGS: Mapping[str, tuple[Layout, int]] = {
    "auto_round:auto_gptq": (Layout.GPTQ, 1),
    "auto_round:gptq": (Layout.GPTQ, 1),
    "auto_round:gptqmodel": (Layout.GPTQ, 0),
    "auto_round": (Layout.GPTQ, 0),
    "auto_round:auto_awq": (Layout.AWQ, 0),
    "auto_round:awq": (Layout.AWQ, 0),
}
"""Name of a packing → its layout, and what is added to stored zeros."""

logger = logging.getLogger(__name__)


def parse_gptq(fields: QuantizationFields) -> QuantizationConfig:
    """Parse and check the config of a GPTQ checkpoint, in its first or second format.

    Raises:
        ModelError: one of its settings isn't supported; the message names it.
    """
    if fields.get("is_marlin_format"):
        raise fields.refusal("is_marlin_format", "false (the weights in GPTQ's own layout)")
    name = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    version = fields.require(name, (None, "gptq", "gptq_v2"), '"gptq" or "gptq_v2"')
    fields.require("pack_dtype", (None, "int32"), '"int32"')
    for other in ("rotation", "adapter"):
        fields.require_empty(other)
    scheme = replace(
        _packed_scheme(fields, Layout.GPTQ, (4, 8)),
        zero_offset=0 if version == "gptq_v2" else 1,
        is_reordered=fields.flag("desc_act"),
    )
    return QuantizationConfig("gptq", (*_dynamic(fields, scheme), ("Linear", scheme)), ())


def _dynamic(fields: QuantizationFields, scheme: Scheme) -> Iterator[tuple[str, Scheme]]:
    """Yield the schemes of linears that ``dynamic`` gives other settings, in its order.

    A key is a regular expression that a path begins with, after ``+:``; linears of ``-:`` aren't
    quantized, which their tensors show.
    """
    value = fields.get("dynamic")
    if not value:
        return
    modules = QuantizationFields(f"{fields.path}.dynamic", value)
    for pattern, overrides in modules.value.items():
        _check_pattern(modules, pattern)
        if pattern.startswith("-:"):
            continue
        module = QuantizationFields(f"{modules.path}[{pattern}]", overrides)
        yield f"re:{pattern.removeprefix('+:')}", _overridden(module, scheme)


def parse_awq(fields: QuantizationFields) -> QuantizationConfig:
    """Parse and check the config of an AWQ checkpoint in the ``gemm`` layout.

    Raises:
        ModelError: one of its settings isn't supported; the message names it.
    """
    name = next((key for key in ("version", "checkpoint_format", "format") if fields.get(key) is not None), "version")
    value = fields.get(name)
    if value is not None and (not isinstance(value, str) or value.lower() != "gemm"):
        raise fields.refusal(name, '"gemm"')
    fields.require("backend", (None, "autoawq", "auto"), '"autoawq"')
    scheme = replace(_packed_scheme(fields, Layout.AWQ, (4,)), is_symmetric=not fields.flag("zero_point", default=True))
    return QuantizationConfig("awq", (("Linear", scheme),), ())


def parse_auto_round(fields: QuantizationFields) -> QuantizationConfig:
    """Parse and check the config of an AutoRound checkpoint, packed as GPTQ's or AWQ's.

    Raises:
        ModelError: one of its settings isn't supported; the message names it.
    """
    fields.require("data_type", (None, "int"), '"int"')
    act_bits = fields.get("act_bits")
    if act_bits is not None and (not isinstance(act_bits, int) or act_bits < _UNQUANTIZED_BITS):
        raise fields.refusal("act_bits", "16 (weights alone)")
    for other in ("rotation_config", "super_bits"):
        fields.require_empty(other)
    name = "packing_format" if fields.get("packing_format") is not None else "backend"
    packing = fields.get(name)
    if name == "backend" and (not isinstance(packing, str) or not packing.startswith("auto_round")):
        # what packs isn't named: the library's first packing
        packing = "auto_round:auto_gptq"
    # the kernel that a packing was meant for: it stores the same
    plain = re.sub(r":(exllamav2|marlin|triton|cuda)$", "", packing) if isinstance(packing, str) else None
    if plain is None or plain not in _AUTO_ROUND_PACKINGS:
        raise fields.refusal(name, " or ".join(f'"{known}"' for known in _AUTO_ROUND_PACKINGS))
    layout, zero_offset = _AUTO_ROUND_PACKINGS[plain]
    bits = (4,) if layout is Layout.AWQ else (4, 8)
    scheme = replace(_packed_scheme(fields, layout, bits), zero_offset=zero_offset)
    return QuantizationConfig("auto-round", (*_extra(fields, scheme), ("Linear", scheme)), ())


def _extra(fields: QuantizationFields, scheme: Scheme) -> Iterator[tuple[str, Scheme]]:
    """Yield the schemes of linears that ``extra_config`` gives other settings.

    A key is a path, or a regular expression that a part of one matches; of 16 bits are linears that
    aren't quantized, which their tensors show.
    """
    value = fields.get("extra_config")
    if not value:
        return
    modules = QuantizationFields(f"{fields.path}.extra_config", value)
    # paths go before expressions
    for name in sorted(modules.value, key=lambda key: (bool(_REGEX_SIGNS & set(key)), key)):
        is_pattern = bool(_REGEX_SIGNS & set(name))
        if is_pattern:
            _check_pattern(modules, name)
        module = QuantizationFields(f"{modules.path}[{name}]", modules.value[name])
        bits = module.get("bits")
        if isinstance(bits, int) and bits >= _UNQUANTIZED_BITS:
            continue
        module.require("data_type", (None, "int"), '"int"')
        act_bits = module.get("act_bits")
        if isinstance(act_bits, int) and act_bits < _UNQUANTIZED_BITS:
            raise module.refusal("act_bits", "16 (weights alone)")
        yield f"re:.*(?:{name})" if is_pattern else name, _overridden(module, scheme)


def parse_fp8(fields: QuantizationFields) -> QuantizationConfig:
    """Parse and check the config of an FP8 checkpoint, by block, tensor or channel.

    Raises:
        ModelError: one of its settings isn't supported; the message names it.
    """
    fields.require("fmt", (None, "e4m3", "float8_e4m3fn"), '"e4m3"')
    fields.require("scale_fmt", (None, "float", "ue8m0"), '"float"')
    fields.require("expert_dtype", (None, "fp8"), '"fp8"')
    fields.require_empty("kv_cache_scheme")
    activations = fields.require("activation_scheme", (None, "dynamic", "static"), '"dynamic" or "static"')
    block, rows, columns = fields.get("weight_block_size"), 0, None
    if block is not None:
        if not isinstance(block, list) or len(block) != 2:
            raise fields.refusal("weight_block_size", "[outputs, inputs]")
        rows, columns = check_block(fields, "weight_block_size", block)
    logger.warning(
        "config.json: %s asks for FP8 activations, which this server doesn't round; weights are used as stored",
        fields.path,
    )
    scheme = Scheme("fp8", Layout.FP8, columns, has_input_scale=activations == "static", block_rows=rows)
    return QuantizationConfig(str(fields.get("quant_method")), (("Linear", scheme),), ())


def _packed_scheme(fields: QuantizationFields, layout: Layout, bits: tuple[int, ...]) -> Scheme:
    """Parse the scheme of words of codes, from the names that all libraries share."""
    name = "bits" if fields.get("bits") is not None else "w_bit"
    size_name = "group_size" if fields.get("group_size") is not None else "q_group_size"
    num_bits = fields.whole_number(name, fields.get(name), bits, f"{' or '.join(map(str, bits))} bits")
    # absent: what the libraries begin with
    size = fields.get(size_name)
    size = 128 if size is None else size
    return Scheme(
        f"int{num_bits}",
        layout,
        _group_size(fields, size_name, size),
        is_symmetric=fields.flag("sym", default=True),
    )


def _overridden(module: QuantizationFields, scheme: Scheme) -> Scheme:
    """Parse a linear's scheme where it has other settings than the whole checkpoint."""
    known = {"bits", "group_size", "sym", "desc_act"}
    bits = (4,) if scheme.layout is Layout.AWQ else (4, 8)
    if module.get("bits") is not None:
        num_bits = module.whole_number("bits", module.get("bits"), bits, f"{' or '.join(map(str, bits))} bits")
        scheme = replace(scheme, format=f"int{num_bits}")
    if module.get("group_size") is not None:
        scheme = replace(scheme, group_size=_group_size(module, "group_size", module.get("group_size")))
    ignored = {"data_type", "act_bits", "clip", "scale_dtype", "iters", "lr", "minmax_lr", "damp_percent", "mse"}
    for name in module.value:
        if name not in known | ignored and not name.startswith("act_") and not name.startswith("super_"):
            raise module.refusal(name, ", ".join(sorted(known)))
    return replace(
        scheme,
        is_symmetric=module.flag("sym", default=scheme.is_symmetric),
        is_reordered=module.flag("desc_act", default=scheme.is_reordered),
    )


def _group_size(fields: QuantizationFields, name: str, size: Any) -> int | None:
    """Parse how many inputs share a scale; None: all of an output."""
    if size == -1 and not isinstance(size, bool):
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % _SMALLEST_GROUP:
        raise fields.refusal(name, f"-1 or a multiple of {_SMALLEST_GROUP}")
    return size


def _check_pattern(fields: QuantizationFields, pattern: str) -> None:
    try:
        re.compile(re.sub(r"^[+-]:", "", pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise fields.refusal(pattern, "a regular expression") from error
