"""config.json's quantization_config as a checked value.

It states how each linear of a checkpoint that is quantized already is stored. Imports no torch.

A method or a setting that would need another computation is refused by name: nothing is passed over
that changes the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loraserve.errors import ModelError
from loraserve.model.config.compressed_tensors import parse_compressed_tensors
from loraserve.model.config.gguf_types import BLOCK_FORMATS
from loraserve.model.config.packed_formats import parse_auto_round, parse_awq, parse_fp8, parse_gptq
from loraserve.model.config.quantization_fields import QuantizationFields, shown
from loraserve.model.config.quantization_scheme import Layout as Layout
from loraserve.model.config.quantization_scheme import QuantizationConfig as QuantizationConfig
from loraserve.model.config.quantization_scheme import Scheme as Scheme

_QUANTIZE = "Give the float checkpoint and --quantize"

REFUSED: Mapping[str, tuple[str, str]] = {
    "aqlm": ("AQLM's codebooks of several inputs", f"{_QUANTIZE} int4, which is near its size at 4 bits."),
    "bitnet": ("BitNet's ternary weights", f"{_QUANTIZE} int4, if the model has one."),
    "eetq": ("EETQ's int8 weights", f"{_QUANTIZE} int8, which rounds the same way, by channel."),
    "exl2": ("ExLlamaV2's mixed bits", f"{_QUANTIZE} int4, or take a GPTQ or AWQ checkpoint of the model."),
    "exl3": ("ExLlamaV3's trellis codes", f"{_QUANTIZE} int4, or take a GPTQ or AWQ checkpoint of the model."),
    "fp_quant": ("FP-Quant's MXFP4 or NVFP4 weights", f"{_QUANTIZE} int4."),
    "higgs": ("HIGGS's codebooks", f"{_QUANTIZE} int4."),
    "hqq": ("HQQ's weights with zeros in floats", f"{_QUANTIZE} int4, which searches ranges likewise."),
    "modelopt": ("ModelOpt's FP8 or NVFP4 weights", f"{_QUANTIZE} fp8, or take a checkpoint with quant_method fp8."),
    "mxfp8": ("MXFP8's weights with scales that are powers of two", f"{_QUANTIZE} fp8."),
    "nvfp4": ("NVFP4's weights with two levels of scales", f"{_QUANTIZE} int4."),
    "quanto": ("Quanto's weights", f"{_QUANTIZE} int8 or int4."),
    "quark": ("Quark's weights", f"{_QUANTIZE} int8, int4 or fp8."),
    "quip": ("QuIP#'s lattice codes", f"{_QUANTIZE} int4."),
    "spqr": ("SpQR's weights with outliers apart", f"{_QUANTIZE} int4."),
    "torchao": ("torchao's pickled tensors", f"{_QUANTIZE} int8, int4 or fp8."),
    "vptq": ("VPTQ's codebooks", f"{_QUANTIZE} int4."),
}
"""Method that isn't read → what it is, and what to do instead."""


def _gguf(fields: QuantizationFields) -> QuantizationConfig:
    """Parse the config of a GGUF file's directory, which this package writes."""
    types = QuantizationFields(f"{fields.path}.types", fields.get("types"))
    schemes: dict[str, Scheme] = {}
    for path, name in types.value.items():
        form = BLOCK_FORMATS.get(name) if isinstance(name, str) else None
        if form is None:
            raise ModelError(
                f"The weight of {path} is {shown(name)}; expected one of {', '.join(BLOCK_FORMATS)}.",
                hint="Quantize the model again to one of these: llama-quantize --allow-requantize FILE OUT Q4_K_M",
            )
        has_zeros = form.has_zeros
        schemes[path] = Scheme(form.format, Layout.GGUF, form.group_size, not has_zeros, block_type=name)
    return QuantizationConfig("gguf", (), (), by_path=schemes)


def _mxfp4(fields: QuantizationFields) -> QuantizationConfig:
    """Parse the config of a checkpoint whose experts are in MXFP4, as gpt-oss is published.

    The files show which: ``modules_to_not_convert`` isn't needed.
    """
    return QuantizationConfig("mxfp4", (), ())


_PARSERS: Mapping[str, Callable[[QuantizationFields], QuantizationConfig]] = {
    "compressed-tensors": parse_compressed_tensors,
    "gptq": parse_gptq,
    "awq": parse_awq,
    "auto-round": parse_auto_round,
    "fp8": parse_fp8,
    "fbgemm_fp8": parse_fp8,
    "gguf": _gguf,
    "mxfp4": _mxfp4,
}

METHODS = (*_PARSERS, "bitsandbytes")
"""Methods that are read."""

_OTHER_NAMES: Mapping[str, str] = {
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "gptqmodel": "gptq",
    "finegrained_fp8": "fp8",
    "quip#": "quip",
    "quip-sharp": "quip",
}


def parse_quantization(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Parse and check the quantization_config of a config.json; None where it has none.

    Raises:
        ModelError: it isn't an object, or its method or one of its settings isn't supported; the
            message names it.
    """
    # compressed-tensors before 0.8 wrote another key
    key = "quantization_config" if config.get("quantization_config") else "compression_config"
    value = config.get(key)
    if not value:
        return None
    fields = QuantizationFields(key, value)
    method = fields.get("quant_method")
    if method is None and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        # what transformers wrote before it had other methods
        method = "bitsandbytes"
    if isinstance(method, str):
        method = _OTHER_NAMES.get(method.lower(), method.lower())
    if method == "bitsandbytes":
        return _bitsandbytes(fields)
    if isinstance(method, str) and method in _PARSERS:
        return _PARSERS[method](fields)
    if isinstance(method, str) and method in REFUSED:
        what, cure = REFUSED[method]
        raise ModelError(
            f"config.json: {key}.quant_method is {shown(fields.get('quant_method'))}: {what} aren't read.", hint=cure
        )
    raise fields.refusal("quant_method", f"{', '.join(METHODS[:-1])} or {METHODS[-1]}")


def _bitsandbytes(fields: QuantizationFields) -> QuantizationConfig:
    if fields.get("load_in_8bit") or not fields.get("load_in_4bit"):
        raise fields.refusal("load_in_8bit" if fields.get("load_in_8bit") else "load_in_4bit", "NF4 (load_in_4bit)")
    # absent: what BitsAndBytesConfig begins with
    if fields.get("bnb_4bit_quant_type") != "nf4":
        raise fields.refusal("bnb_4bit_quant_type", '"nf4"')
    return QuantizationConfig("bitsandbytes", (("Linear", Scheme("nf4", Layout.BITSANDBYTES)),), ())
