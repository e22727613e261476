"""config.json's quantization_config as a checked value.

It says how each linear of a checkpoint that is quantized already is stored. Imports no torch.

Read are what compressed-tensors (https://github.com/vllm-project/compressed-tensors) and
transformers' BitsAndBytesConfig write. A method or a setting that would need another computation is
refused by name: nothing is passed over that changes the answers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from loraserve.errors import ModelError
from loraserve.model.gguf.gguf_types import BLOCK_FORMATS
from loraserve_kernels.common.formats import ROTATION_BLOCKS

_HINT = (
    "Supported formats: compressed-tensors with int8 or int4 weights by channel or in groups, "
    "or FP8 weights by channel or tensor, and bitsandbytes NF4. "
    "Otherwise, give the float checkpoint and --quantize int8, int4, nf4 or fp8."
)

_SMALLEST_GROUP = 32

logger = logging.getLogger(__name__)


class Layout(StrEnum):
    """Set of tensors that a weight is stored in."""

    NAIVE = "naive"
    """``weight`` in a dtype of eight bits, ``weight_scale``, and ``weight_zero_point`` where codes
    aren't symmetric.
    """
    PACKED = "packed"
    """``weight_packed``: int32 words of codes, the first in the lowest bits; ``weight_scale``,
    ``weight_shape``, and ``weight_zero_point`` where codes aren't symmetric.
    """
    BITSANDBYTES = "bitsandbytes"
    """``weight`` and what hangs on it: ``weight.absmax``, ``weight.quant_state.bitsandbytes__nf4``
    …
    """
    GGUF = "gguf"
    """``weight``: rows of blocks, as llama.cpp's types have them."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Format in which a linear's weight is stored.

    Attributes:
        format: ``int8``, ``int4``, ``fp8`` or ``nf4``.
        group_size: inputs that share a scale; None: one scale per output channel or per tensor, as
            the tensor's shape says.
        is_symmetric: False: each group has a zero point.
        has_input_scale: the checkpoint has a scale for rounding activations, which isn't used.
        rotation: inputs of an orthogonal Hadamard block by which the weight is rotated, and its
            input must be; 0: neither.
        block_type: name of llama.cpp's type, of `Layout.GGUF`.
    """

    format: str
    layout: Layout
    group_size: int | None = None
    is_symmetric: bool = True
    has_input_scale: bool = False
    rotation: int = 0
    block_type: str = ""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Selection of a checkpoint's linears that are stored quantized, and their formats.

    Attributes:
        method: ``compressed-tensors`` or ``bitsandbytes``.
        targets: (target, scheme) in the order in which they are tried: a module's path, ``re:`` and
            an expression that its path begins with, or ``Linear``.
        ignore: targets whose linears are stored in a float dtype.
        rotations: (target, block) of linears that are rotated by Hadamard blocks of that many
            inputs.
        by_path: scheme of every quantized weight by its path; where it is given, the others aren't
            tried.
    """

    method: str
    targets: tuple[tuple[str, Scheme], ...]
    ignore: tuple[str, ...]
    rotations: tuple[tuple[str, int], ...] = ()
    by_path: Mapping[str, Scheme] | None = None

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding may be quantized, as a linear is."""
        return self.by_path is not None

    def scheme(self, path: str) -> Scheme | None:
        """Return how the weight of the linear at this path is stored; None: in a float dtype.

        A path is ``model.layers.0.self_attn.q_proj``, for example. With bitsandbytes it's the
        answer for a linear that has a quantization state; the config doesn't say which have.
        """
        if self.by_path is not None:
            return self.by_path.get(path)
        if any(_is_match(path, ignored) for ignored in self.ignore):
            return None
        scheme = next((scheme for target, scheme in self.targets if _is_match(path, target)), None)
        rotation = next((block for target, block in self.rotations if _is_match(path, target)), 0)
        return scheme if scheme is None or not rotation else replace(scheme, rotation=rotation)

    def identity(self) -> dict[str, object]:
        """Return the settings that decide how tensors are read; JSON-able."""
        if self.by_path is not None:
            return {"method": self.method, "types": {path: one.block_type for path, one in self.by_path.items()}}
        # rotations stand alone: without any, digests are as they were before there were any
        targets = [
            [target, {name: value for name, value in asdict(scheme).items() if name not in ("rotation", "block_type")}]
            for target, scheme in self.targets
        ]
        rotations = {"rotations": [list(rotation) for rotation in self.rotations]} if self.rotations else {}
        return {"method": self.method, "targets": targets, "ignore": list(self.ignore), **rotations}


def parse_quantization(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Return the checked quantization_config of a config.json; None where it has none.

    Raises:
        ModelError: it isn't an object, or its method or one of its settings isn't supported; the
            message names it.
    """
    # compressed-tensors before 0.8 wrote another key
    key = "quantization_config" if config.get("quantization_config") else "compression_config"
    value = config.get(key)
    if not value:
        return None
    fields = _Fields(key, value)
    method = fields.get("quant_method")
    if method is None and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        # what transformers wrote before it knew of other methods
        method = "bitsandbytes"
    if method == "bitsandbytes":
        return _bitsandbytes(fields)
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    if method == "gguf":
        return _gguf(fields)
    raise fields.refusal("quant_method", "compressed-tensors or bitsandbytes")


class _Fields:
    """An object of the config, with the path that names it."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise ModelError(f"config.json: {path} is {_shown(value)}; expected an object.", hint=_HINT)
        self.path, self.value = path, value

    def get(self, name: str) -> Any:
        return self.value.get(name)

    def refusal(self, name: str, expected: str) -> ModelError:
        return ModelError(
            f"config.json: {self.path}.{name} is {_shown(self.get(name))}; only {expected} is implemented.", hint=_HINT
        )

    def require(self, name: str, allowed: tuple[object, ...], expected: str) -> Any:
        """Return the field, which must be one of `allowed`.

        None among them stands for an absent field too.
        """
        value = self.get(name)
        # 1 == True, and 0 == False
        if not any(value == item and type(value) is type(item) for item in allowed):
            raise self.refusal(name, expected)
        return value

    def require_empty(self, name: str) -> None:
        if self.get(name):
            raise self.refusal(name, "none")

    def strings(self, name: str) -> tuple[str, ...]:
        value = self.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"config.json: {self.path}.{name} is {_shown(value)}; expected a list of strings.")
        for item in value:
            if item.startswith("re:"):
                try:
                    re.compile(item.removeprefix("re:"))
                except (re.error, RecursionError, OverflowError) as error:
                    raise ModelError(
                        f"config.json: {self.path}.{name} has {_shown(item)}, which isn't a regular expression."
                    ) from error
        return tuple(value)


def _bitsandbytes(fields: _Fields) -> QuantizationConfig:
    if fields.get("load_in_8bit") or not fields.get("load_in_4bit"):
        raise fields.refusal("load_in_8bit" if fields.get("load_in_8bit") else "load_in_4bit", "NF4 (load_in_4bit)")
    # absent: what BitsAndBytesConfig begins with
    if fields.get("bnb_4bit_quant_type") != "nf4":
        raise fields.refusal("bnb_4bit_quant_type", '"nf4"')
    return QuantizationConfig("bitsandbytes", (("Linear", Scheme("nf4", Layout.BITSANDBYTES)),), ())


def _gguf(fields: _Fields) -> QuantizationConfig:
    """Return what the config of a GGUF file's directory says, which this package writes."""
    types = _Fields(f"{fields.path}.types", fields.get("types"))
    schemes: dict[str, Scheme] = {}
    for path, name in types.value.items():
        form = BLOCK_FORMATS.get(name) if isinstance(name, str) else None
        if form is None:
            raise ModelError(
                f"The weight of {path} is {_shown(name)}; expected one of {', '.join(BLOCK_FORMATS)}.",
                hint="Quantize the model again to one of these: llama-quantize --allow-requantize FILE OUT Q4_K_M",
            )
        schemes[path] = Scheme(
            form.format, Layout.GGUF, form.group_size, is_symmetric=not form.has_zeros, block_type=name
        )
    return QuantizationConfig("gguf", (), (), by_path=schemes)


def _compressed_tensors(fields: _Fields) -> QuantizationConfig:
    # "frozen": the weights are stored in a float dtype and rounded at each use
    fields.require("quantization_status", (None, "compressed"), '"compressed"')
    for name in ("kv_cache_scheme", "moe_sparsity_config"):
        fields.require_empty(name)
    sparsity = fields.get("sparsity_config")
    if sparsity and _Fields(f"{fields.path}.sparsity_config", sparsity).get("format") != "dense":
        raise fields.refusal("sparsity_config", "none")
    groups = _Fields(f"{fields.path}.config_groups", fields.get("config_groups"))
    schemes: dict[str, Scheme] = {}
    for name, value in groups.value.items():
        if isinstance(value, list):
            raise groups.refusal(name, "a group with its weights' settings")
        group = _Fields(f"{groups.path}.{name}", value)
        scheme = _scheme(group, group.get("format") or fields.get("format"), fields)
        for target in group.strings("targets"):
            if target == "Embedding":
                raise group.refusal("targets", "linears (the embedding in a float dtype)")
            schemes[target] = scheme
    # as the library does: paths first, then expressions, then classes
    names = sorted(
        (target for target in schemes if target != "Linear"), key=lambda name: (name.startswith("re:"), name)
    )
    ordered = [*names, *(["Linear"] if "Linear" in schemes else [])]
    return QuantizationConfig(
        "compressed-tensors",
        tuple((target, schemes[target]) for target in ordered),
        fields.strings("ignore"),
        tuple(_rotations(fields)),
    )


def _rotations(fields: _Fields) -> Iterator[tuple[str, int]]:
    """Yield (target, block) of weights that are rotated and whose inputs must be.

    Raises:
        ModelError: a transform of another kind, or at another place.
    """
    config = fields.get("transform_config")
    if not config:
        return
    path = f"{fields.path}.transform_config"
    groups = _Fields(f"{path}.config_groups", _Fields(path, config).get("config_groups"))
    for name, value in groups.value.items():
        group = _Fields(f"{groups.path}.{name}", value)
        group.require("type", ("hadamard",), '"hadamard"')
        group.require("randomize", (None, False), "false")
        block = group.require("head_dim", ROTATION_BLOCKS, " or ".join(map(str, ROTATION_BLOCKS)))
        places = group.get("apply")
        if not isinstance(places, list) or len(places) != 2:
            raise group.refusal("apply", "input, and weight_input inverted,")
        found = [_Fields(f"{group.path}.apply", place) for place in places]
        at = {place.get("location"): place for place in found}
        if at.keys() != {"input", "weight_input"} or any(place.get("ignore") for place in found):
            raise group.refusal("apply", "input, and weight_input inverted, without exceptions")
        targets = at["input"].strings("targets")
        if targets != at["weight_input"].strings("targets"):
            raise group.refusal("apply", "input and weight_input of the same targets")
        yield from ((target, block) for target in targets)


def _scheme(group: _Fields, form: object, fields: _Fields) -> Scheme:
    """Return what a config group says of its weights, which are stored in the format `form`."""
    layouts = {
        "pack-quantized": Layout.PACKED,
        "int-quantized": Layout.NAIVE,
        "float-quantized": Layout.NAIVE,
        "naive-quantized": Layout.NAIVE,
    }
    layout = layouts.get(form) if isinstance(form, str) else None
    if layout is None:
        holder = group if group.get("format") else fields
        raise holder.refusal("format", ", ".join(layouts))
    weights = _Fields(f"{group.path}.weights", group.get("weights"))
    kind = weights.require("type", ("int", "float"), '"int" or "float"')
    num_bits = weights.require("num_bits", (8,) if kind == "float" else (4, 8), "8 bits, or 4 for integers,")
    weights.require("dynamic", (None, False), "false")
    # "weight" and "static" order the calibration alone; "group" needs a g_idx
    weights.require("actorder", (None, False, "weight", "static"), 'null or "weight"')
    weights.require_empty("block_structure")
    group.require_empty("output_activations")
    has_input_scale = _has_input_scale(group, kind)
    is_symmetric = weights.require("symmetric", (None, True, False), "true or false") is not False
    name = "fp8" if kind == "float" else f"int{num_bits}"
    if (layout is Layout.PACKED and name == "fp8") or (layout is Layout.NAIVE and name == "int4"):
        raise weights.refusal("num_bits", f"int4 or int8 in pack-quantized, int8 or FP8 in {form},")
    if not is_symmetric and name == "fp8":
        raise weights.refusal("symmetric", f"true with {name}")
    return Scheme(name, layout, _group_size(weights, name, is_symmetric), is_symmetric, has_input_scale)


def _group_size(weights: _Fields, name: str, is_symmetric: bool) -> int | None:
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        # what the library infers
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy in ("tensor", "channel"):
        if strategy == "tensor" and (name == "int4" or not is_symmetric):
            raise weights.refusal("strategy", f"channel or group with {name if is_symmetric else f'asymmetric {name}'}")
        return None
    if strategy != "group" or name == "fp8":
        expected = {"int4": "channel or group", "int8": "channel, group or tensor", "fp8": "channel or tensor"}[name]
        raise weights.refusal("strategy", f"{expected} with {name}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or size % _SMALLEST_GROUP:
        raise weights.refusal("group_size", f"a multiple of {_SMALLEST_GROUP}")
    return size


def _has_input_scale(group: _Fields, kind: str) -> bool:
    """Return whether the group's activations have a scale in the checkpoint.

    FP8 weights stand in checkpoints whose activations are to be rounded to FP8 too, so that the
    GPU's FP8 products can be used. Here the activations keep their precision, as in vLLM on a GPU
    without FP8. Integer activations are refused.
    """
    if not group.get("input_activations"):
        return False
    activations = _Fields(f"{group.path}.input_activations", group.get("input_activations"))
    if kind != "float" or activations.get("type") != "float" or activations.get("num_bits") != 8:
        raise group.refusal("input_activations", "null (weights alone), or FP8 with FP8 weights,")
    activations.require("strategy", ("token", "tensor"), '"token" or "tensor"')
    is_dynamic = activations.require("dynamic", (None, True, False), "true or false") is True
    logger.warning(
        "config.json: %s asks for FP8 activations, which this server doesn't round; weights are used as stored",
        activations.path,
    )
    return not is_dynamic


def _is_match(path: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), path) is not None
    return target in (path, "Linear")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:199] + "…"
