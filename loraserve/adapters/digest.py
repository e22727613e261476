"""Identity of an adapter version: SHA-256 over its canonical config and its tensors.

They are framed so that no two contents read alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from loraserve.adapters.config.peft_config import DEFAULTS
from loraserve.adapters.extra_files import ExtraFiles
from loraserve.adapters.ir import TensorView
from loraserve.adapters.tuners.fields import number
from loraserve.types import Digest

Fields = list[tuple[str, str]]
"""Names and values of a config's fields, as the digest frames them."""

_TAG = b"loraserve adapter v1"
_VERSION_TAG = b"loraserve version with extra files v1"
_NUMBERS = ("r", "lora_alpha")
_PATTERNS = ("rank_pattern", "alpha_pattern")
_FLAGS = ("use_rslora",)
# Framed only where they are set, so that what was uploaded before they were known keeps its
# digest.
_TOKENS = ("trainable_token_indices", "alora_invocation_tokens")
# They list which of all experts' parameters a tensor is for, in any order.
_PARAMETERS = "target_parameters"


def adapter_digest(
    config: Mapping[str, Any], tensors: Mapping[str, TensorView], *, pause: Callable[[], object] = lambda: None
) -> Digest:
    """Hash the identity of an adapter that `compile_adapter` has accepted.

    Two uploads have the same digest exactly if they hold the same tensors (names, dtypes, shapes,
    bytes) and the same config fields that decide the arithmetic; the trainer, the dropout and the
    order of tensors in the file don't matter. The order of a pattern's keys does, since the first
    match wins. Fields such as target_modules, bias or modules_to_save don't: the tensors must agree
    with them.

    Args:
        pause: called between tensors.
    """
    sha = hashlib.sha256()

    def frame(data: bytes | memoryview) -> None:
        sha.update(len(data).to_bytes(8, "big"))
        sha.update(data)

    frame(_TAG)
    for name, value in _canonical_config(config):
        frame(name.encode())
        frame(value.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        frame(b"tensor")
        frame(name.encode())
        frame(tensor.dtype.encode())
        frame(",".join(map(str, tensor.shape)).encode())
        frame(np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data)
        pause()
    return Digest(sha.hexdigest())


def version_digest(adapter: Digest, extras: ExtraFiles) -> Digest:
    """Hash the identity of a version: of the adapter alone if it has no extra files.

    Otherwise it covers the extra files' bytes and the parsers' names too, each framed.
    """
    given = extras.as_bytes()
    if not given:
        return adapter
    sha = hashlib.sha256()
    fields = [part for name, data in sorted(given.items()) for part in (name.encode(), data)]
    for part in (_VERSION_TAG, adapter.encode(), *fields):
        sha.update(len(part).to_bytes(8, "big"))
        sha.update(part)
    return Digest(sha.hexdigest())


def _canonical_config(config: Mapping[str, Any]) -> Fields:
    kind = config.get("peft_type")
    tokens = [(name, json.dumps(config[name], sort_keys=True)) for name in _TOKENS if config.get(name)]
    if config.get(_PARAMETERS):
        tokens.append((_PARAMETERS, json.dumps(sorted(config[_PARAMETERS]))))
    if isinstance(kind, str) and kind in CANONICAL:
        return [("peft_type", kind), *CANONICAL[kind](config), *tokens]
    fields = [(name, _number(config.get(name, DEFAULTS[name]))) for name in _NUMBERS]
    fields += [(name, str(bool(config.get(name))).lower()) for name in _FLAGS]
    for name in _PATTERNS:
        pattern = config.get(name) or {}
        fields.append((name, str(len(pattern))))
        for key, value in pattern.items():
            fields += [("key", key), ("value", _number(value))]
    return fields + tokens


def _number(value: int | float) -> str:
    # 16 and 16.0 are one alpha; hex keeps every bit of any other
    return float(value).hex()


def _no_fields(config: Mapping[str, Any]) -> Fields:
    """Return no fields: the tensors of these kinds (IA3, VeRA) decide everything."""
    return []


def _lycoris_fields(config: Mapping[str, Any]) -> Fields:
    """Collect ranks and alphas of LoHa and LoKr, in the order of their keys.

    The first match wins, so the order counts.
    """
    fields = [(name, _number(number(config["peft_type"], config, name))) for name in ("r", "alpha")]
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        fields.append((name, str(len(pattern))))
        for key, value in pattern.items():
            fields += [("key", key), ("value", _number(value))]
    return fields


def _adalora_fields(config: Mapping[str, Any]) -> Fields:
    """Collect what AdaLoRA's scaling is made of; the ranks are the tensors'."""
    return [(name, _number(number("ADALORA", config, name))) for name in ("init_r", "lora_alpha")]


CANONICAL: Mapping[str, Callable[[Mapping[str, Any]], Fields]] = {
    "LOHA": _lycoris_fields,
    "LOKR": _lycoris_fields,
    "IA3": _no_fields,
    "VERA": _no_fields,
    "ADALORA": _adalora_fields,
}
"""PEFT's name of a kind → the fields of an accepted config that decide the arithmetic, as an
adapter's digest frames them behind the kind's name.
"""
