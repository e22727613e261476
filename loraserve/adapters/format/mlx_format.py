"""Adapters of mlx-lm, read as PEFT's.

mlx-lm writes ``adapters.safetensors`` and an ``adapter_config.json`` of its own. Its factors are
PEFT's, transposed; its scale multiplies the update as it is, where PEFT divides alpha by the rank;
and its layers are counted from the last one.

Source: mlx-lm's `tuner/lora.py`, `tuner/dora.py` and `tuner/utils.py` (``linear_to_lora_layers``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from loraserve.adapters.format.peft_format import Buffer, read_config, read_tensors
from loraserve.adapters.format.target_fields import LAYER_PATH, target_fields
from loraserve.adapters.format.tensor_names import PREFIX
from loraserve.adapters.ir import TensorView
from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterUnsupported
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec

_TYPES = {"lora": False, "dora": True}
"""``fine_tune_type`` → whether there are magnitudes."""
_PARAMETERS = ("rank", "scale", "dropout", "keys")
_NAME = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_EMBEDDING_PARTS = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
_EMBEDDING = "embed_tokens"


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Settings of an mlx-lm config.

    Attributes:
        num_layers: layers from the last one on that have tensors; None: the config lacks it.
        keys: modules inside a layer, or whole names; None: the config lacks it.
        base: name of the base.
    """

    is_dora: bool
    rank: int
    scale: float
    num_layers: int | None
    keys: tuple[str, ...] | None
    base: str | None


def is_mlx_config(config: Mapping[str, Any]) -> bool:
    """Check whether this is a config that mlx-lm writes."""
    return "peft_type" not in config and ("fine_tune_type" in config or "lora_parameters" in config)


def read_mlx(
    config: bytes, weights: Buffer, base: BaseSpec, limits: Limits = LIMITS
) -> tuple[bytes, dict[str, TensorView], tuple[str, ...]]:
    """Convert an adapter of mlx-lm to PEFT's config and tensors, with notes for people.

    Raises:
        AdapterFormatError: the config or the tensors aren't those that mlx-lm writes.
        AdapterUnsupported: it isn't LoRA or DoRA.
        AdapterBaseMismatch: its layers aren't this base's.
    """
    parameters = _read_parameters(read_config(config, limits))
    tensors: dict[str, TensorView] = {}
    modules: dict[str, set[str]] = {}
    for name, tensor in read_tensors(weights, limits).items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise AdapterFormatError(
                f"{shown(name, 200)} isn't a tensor of mlx-lm's LoRA; expected <module>.lora_a and <module>.lora_b"
                f"{', and <module>.m' if parameters.is_dora else ''}.",
                hint="Send adapters.safetensors as mlx_lm.lora wrote it.",
            )
        module, part = match["module"], match["part"]
        modules.setdefault(module, set()).add(part)
        is_embedding = module.rpartition(".")[2] == _EMBEDDING
        if is_embedding and (parameters.is_dora or base.is_head_tied):
            why = "DoRA" if parameters.is_dora else "LoRA of an embedding that is the head too"
            raise AdapterUnsupported(
                f"{shown(name, 200)} is mlx-lm's {why}, which isn't served.",
                hint=f"Train without {_EMBEDDING} in lora_parameters.keys.",
            )
        suffix = (_EMBEDDING_PARTS if is_embedding else _PARTS)[part]
        tensors[f"{PREFIX}{module}.{suffix}"] = tensor if part == "m" else _transposed(name, tensor)
    _check_parts(modules, parameters)
    _check_layers(modules, parameters, base)
    targets = target_fields(modules, base)
    peft = {
        "peft_type": "LORA",
        "r": parameters.rank,
        "lora_alpha": parameters.scale * parameters.rank,
        "use_dora": parameters.is_dora,
        **targets,
        **({} if parameters.base is None else {"base_model_name_or_path": parameters.base}),
    }
    kind = "dora" if parameters.is_dora else "lora"
    notes = (
        f"mlx-lm's {kind} was read as PEFT's: factors transposed",
        f"scale {parameters.scale:g} as lora_alpha / r = {peft['lora_alpha']:g} / {parameters.rank}",
    )
    return json.dumps(peft).encode(), tensors, notes


def _transposed(name: str, tensor: TensorView) -> TensorView:
    if len(tensor.shape) != 2:
        raise AdapterFormatError(f"{shown(name, 200)} has {len(tensor.shape)} dims; expected 2.")
    return TensorView(tensor.dtype, tensor.shape[::-1], tensor.array.T)


def _read_parameters(config: Mapping[str, Any]) -> _Parameters:
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise AdapterUnsupported(
            "fine_tune_type is full: mlx-lm has saved whole weights of the base, which are no adapter.",
            hint="Fuse them with mlx_lm.fuse and serve the result as a base, or train with --fine-tune-type lora.",
        )
    if not isinstance(kind, str) or kind not in _TYPES:
        raise AdapterUnsupported(f"fine_tune_type is {shown(kind)}; of mlx-lm's, lora and dora are served.")
    given = config.get("lora_parameters")
    if not isinstance(given, dict):
        raise AdapterFormatError(f"lora_parameters is {shown(given)}; expected mlx-lm's object with rank and scale.")
    unknown = [name for name in given if name not in _PARAMETERS]
    if "alpha" in unknown:
        raise AdapterUnsupported(
            "lora_parameters has alpha: older releases of mlx-lm multiply it with scale, newer ones ignore it.",
            hint="Write scale · alpha / rank into scale, if an older one trained it, and remove alpha.",
        )
    if unknown:
        raise AdapterUnsupported(
            f"lora_parameters has {shown(unknown[0])}, which isn't implemented; known are {', '.join(_PARAMETERS)}."
        )
    rank, scale = given.get("rank"), given.get("scale")
    if type(rank) is not int or rank < 1:
        raise AdapterFormatError(f"lora_parameters.rank is {shown(rank)}; expected a number above 0.")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise AdapterFormatError(f"lora_parameters.scale is {shown(scale)}; expected a finite number.")
    keys = given.get("keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise AdapterFormatError(f"lora_parameters.keys is {shown(keys)}; expected names of modules.")
    num_layers = config.get("num_layers", config.get("lora_layers"))
    if num_layers is not None and type(num_layers) is not int:
        raise AdapterFormatError(f"num_layers is {shown(num_layers)}; expected a number.")
    model = config.get("model")
    return _Parameters(
        _TYPES[kind],
        rank,
        float(scale),
        num_layers,
        None if keys is None else tuple(keys),
        model if isinstance(model, str) else None,
    )


def _check_parts(modules: Mapping[str, set[str]], parameters: _Parameters) -> None:
    """Check that each module has the tensors of its kind."""
    expected = {"lora_a", "lora_b", "m"} if parameters.is_dora else {"lora_a", "lora_b"}
    for module, parts in modules.items():
        if parts != expected:
            missing, other = sorted(expected - parts), sorted(parts - expected)
            what = f"has no {missing[0]}" if missing else f"has {other[0]}, which fine_tune_type lora doesn't train"
            raise AdapterFormatError(f"{shown(module, 200)} {what}.")


def _check_layers(modules: Collection[str], parameters: _Parameters, base: BaseSpec) -> None:
    """Check that the modules are those that the config means."""
    found = {int(match["layer"]) for module in modules if (match := LAYER_PATH.fullmatch(module)) is not None}
    # 0 and less are all layers, as in a slice from its end on
    num_layers = parameters.num_layers
    if num_layers is not None and found:
        first = 0 if num_layers <= 0 else max(0, base.num_layers - num_layers)
        if (outside := sorted(found - set(range(first, base.num_layers)))) or len(found) != base.num_layers - first:
            what = f"tensors for layer {outside[0]}" if outside else f"tensors for {len(found)} layers"
            raise AdapterBaseMismatch(
                f"num_layers is {num_layers}, which on this base of {base.num_layers} layers means {first} to "
                f"{base.num_layers - 1}; the file holds {what}."
            )
    if parameters.keys is not None:
        for module in modules:
            match = LAYER_PATH.fullmatch(module)
            if module not in parameters.keys and (match is None or match["inner"] not in parameters.keys):
                raise AdapterFormatError(
                    f"The file holds tensors for {shown(module, 200)}, which lora_parameters.keys doesn't name."
                )
