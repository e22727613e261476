"""The quantization_config that compressed-tensors writes. Imports no torch.

Source: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from loraserve.model.config.quantization_fields import QuantizationFields, check_block
from loraserve.model.config.quantization_scheme import Layout, QuantizationConfig, Scheme
from loraserve_kernels.common.formats import ROTATION_BLOCKS

_SMALLEST_GROUP = 32

logger = logging.getLogger(__name__)


def parse_compressed_tensors(fields: QuantizationFields) -> QuantizationConfig:
    """Parse and check the config.

    Raises:
        ModelError: one of its settings isn't supported; the message names it.
    """
    # "frozen": the weights are stored in a float dtype and rounded at each use
    fields.require("quantization_status", (None, "compressed"), '"compressed"')
    for name in ("kv_cache_scheme", "moe_sparsity_config"):
        fields.require_empty(name)
    sparsity = fields.get("sparsity_config")
    if sparsity and QuantizationFields(f"{fields.path}.sparsity_config", sparsity).get("format") != "dense":
        raise fields.refusal("sparsity_config", "none")
    groups = QuantizationFields(f"{fields.path}.config_groups", fields.get("config_groups"))
    schemes: dict[str, Scheme] = {}
    for name, value in groups.value.items():
        if isinstance(value, list):
            raise groups.refusal(name, "a group with its weights' settings")
        group = QuantizationFields(f"{groups.path}.{name}", value)
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


def _rotations(fields: QuantizationFields) -> Iterator[tuple[str, int]]:
    """Yield (target, block) of weights that are rotated and whose inputs must be.

    Raises:
        ModelError: a transform of another kind, or at another place.
    """
    config = fields.get("transform_config")
    if not config:
        return
    path = f"{fields.path}.transform_config"
    groups = QuantizationFields(f"{path}.config_groups", QuantizationFields(path, config).get("config_groups"))
    for name, value in groups.value.items():
        group = QuantizationFields(f"{groups.path}.{name}", value)
        group.require("type", ("hadamard",), '"hadamard"')
        group.require("randomize", (None, False), "false")
        block = group.require("head_dim", ROTATION_BLOCKS, " or ".join(map(str, ROTATION_BLOCKS)))
        places = group.get("apply")
        if not isinstance(places, list) or len(places) != 2:
            raise group.refusal("apply", "input, and weight_input inverted,")
        found = [QuantizationFields(f"{group.path}.apply", place) for place in places]
        at = {place.get("location"): place for place in found}
        if at.keys() != {"input", "weight_input"} or any(place.get("ignore") for place in found):
            raise group.refusal("apply", "input, and weight_input inverted, without exceptions")
        targets = at["input"].strings("targets")
        if targets != at["weight_input"].strings("targets"):
            raise group.refusal("apply", "input and weight_input of the same targets")
        yield from ((target, block) for target in targets)


def _scheme(group: QuantizationFields, form: object, fields: QuantizationFields) -> Scheme:
    """Parse a config group's weights, which are stored in the format `form`."""
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
    weights = QuantizationFields(f"{group.path}.weights", group.get("weights"))
    kind = weights.require("type", ("int", "float"), '"int" or "float"')
    num_bits = weights.require("num_bits", (8,) if kind == "float" else (4, 8), "8 bits, or 4 for integers,")
    weights.require("dynamic", (None, False), "false")
    # "weight" and "static" order the calibration alone; "group" and "dynamic" the inputs' groups
    order = weights.require(
        "actorder", (None, False, "weight", "static", "group", "dynamic"), 'null, "weight" or "group"'
    )
    group.require_empty("output_activations")
    is_symmetric = weights.require("symmetric", (None, True, False), "true or false") is not False
    name = "fp8" if kind == "float" else f"int{num_bits}"
    if (layout is Layout.PACKED and name == "fp8") or (layout is Layout.NAIVE and name == "int4"):
        raise weights.refusal("num_bits", f"int4 or int8 in pack-quantized, int8 or FP8 in {form},")
    if order in ("group", "dynamic") and (
        layout is not Layout.PACKED or not isinstance(weights.get("group_size"), int)
    ):
        raise weights.refusal("actorder", 'null or "weight" without groups in pack-quantized')
    if not is_symmetric and name == "fp8":
        raise weights.refusal("symmetric", f"true with {name}")
    block_rows, size = _block(weights) if name == "fp8" else (0, None)
    if not block_rows:
        weights.require_empty("block_structure")
        size = _group_size(weights, name, is_symmetric)
    has_input_scale, is_rounded = False, False
    if group.get("input_activations"):
        can_round = name == "int4" or (name == "int8" and size is None and is_symmetric)
        has_input_scale, is_rounded = _activations(group, kind, can_round)
    return Scheme(
        name,
        layout,
        size,
        is_symmetric,
        has_input_scale,
        block_rows=block_rows,
        is_reordered=order in ("group", "dynamic"),
        has_rounded_inputs=is_rounded,
    )


def _block(weights: QuantizationFields) -> tuple[int, int | None]:
    """Parse the outputs and inputs of a block that has one scale; 0 and None: there are none."""
    if weights.get("strategy") != "block":
        return 0, None
    block = weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2:
        raise weights.refusal("block_structure", "[outputs, inputs]")
    return check_block(weights, "block_structure", block)


def _group_size(weights: QuantizationFields, name: str, is_symmetric: bool) -> int | None:
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        # what the library infers
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy in ("tensor", "channel"):
        if strategy == "tensor" and (name == "int4" or not is_symmetric):
            raise weights.refusal("strategy", f"channel or group with {name if is_symmetric else f'asymmetric {name}'}")
        return None
    if strategy != "group" or name == "fp8":
        expected = {"int4": "channel or group", "int8": "channel, group or tensor", "fp8": "channel, block or tensor"}[
            name
        ]
        raise weights.refusal("strategy", f"{expected} with {name}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or size % _SMALLEST_GROUP:
        raise weights.refusal("group_size", f"a multiple of {_SMALLEST_GROUP}")
    return size


def _activations(group: QuantizationFields, kind: str, can_round: bool) -> tuple[bool, bool]:
    """Check what the group's activations have: a scale in the checkpoint, and rounding as ours.

    FP8 weights stand in checkpoints whose activations are to be rounded to FP8 too, so that the
    GPU's FP8 products can be used. Here the activations keep their precision, as in vLLM on a GPU
    without FP8. int8 activations by token are what our kernels round too; those with a scale of the
    whole tensor, or with zeros, are treated as if the checkpoint required none.

    Args:
        can_round: whether kernels round rows to int8 with this group's weights.
    """
    activations = QuantizationFields(f"{group.path}.input_activations", group.get("input_activations"))
    if (
        activations.get("type") not in ((kind,) if kind == "float" else ("int", None))
        or activations.get("num_bits") != 8
    ):
        raise group.refusal("input_activations", "null, int8 with integer weights, or FP8 with FP8 weights,")
    strategies = ("token", "tensor", "group") if kind == "float" else ("token", "tensor")
    strategy = activations.require("strategy", strategies, " or ".join(f'"{name}"' for name in strategies))
    is_dynamic = activations.require("dynamic", (None, True, False), "true or false") is True
    is_symmetric = activations.flag("symmetric", default=True)
    if kind == "int" and can_round and (strategy, is_dynamic, is_symmetric) == ("token", True, True):
        return False, True
    logger.warning(
        "config.json: %s asks for %s activations%s, which this server doesn't round so; weights are used as stored",
        activations.path,
        "FP8" if kind == "float" else "int8",
        "" if is_dynamic else " with a stored scale",
    )
    return not is_dynamic, False
