"""Names of tensors that a wrapper around the model has changed, as PEFT writes them without it.

A training loop wraps a model, or parts of it, in others: torch.compile, FSDP, activation
checkpointing. The decoder of a model of images and text has a longer path. Nothing else of such an
adapter differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from loraserve.adapters.format.tensor_names import PREFIX
from loraserve.adapters.ir import TensorView
from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterFormatError
from loraserve.types import BaseSpec

WRAPPERS: Mapping[str, str] = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
"""Component of a name → the wrapper that adds it, anywhere."""
_PARALLEL = "module."
"""Beginning of the names of a model in DistributedDataParallel."""
_DEFAULT = "default"
"""PEFT's name of an adapter that is given none: in a running model it follows ``lora_A``."""
LANGUAGE_PATHS: Mapping[str, str] = {
    "model.language_model": "lm_head",
    "language_model.model": "language_model.lm_head",
    "model.text_model": "lm_head",
}
"""Path of the decoder in a model of images and text → path of its head."""
_DECODER = "model"
_ENCODERS = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector.", "image_newline")
)
"""Beginnings of the names of what reads images in such a model."""


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """An adapter's tensors by PEFT's names, and the base by the names that the adapter has for it.

    Attributes:
        base: the served one; its paths are those of the model that was trained, so that the
            config's patterns match as they did there.
        notes: what was left out of names or added to them, for people.
    """

    tensors: Mapping[str, TensorView]
    base: BaseSpec
    notes: tuple[str, ...]


def is_of_encoder(name: str) -> bool:
    """Check whether a tensor or linear is of what reads images in a model of images and text."""
    return name.startswith(_ENCODERS)


def unwrap(tensors: Mapping[str, TensorView], base: BaseSpec) -> Unwrapped:
    """Remove what wrappers have added to names from tensors and base.

    Raises:
        AdapterFormatError: two tensors have one name then, or all belong to what reads images.
    """
    found: dict[str, None] = {}
    named: dict[str, TensorView] = {}
    origins: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = _plain(name, found)
        if is_of_encoder(plain.removeprefix(PREFIX)):
            found["left out what reads images, which has no part in text"] = None
            continue
        if plain in named:
            raise AdapterFormatError(
                f"{shown(origins[plain], 200)} and {shown(name, 200)} are one tensor, {shown(plain, 200)}.",
                hint="Save with PEFT's save_pretrained on the model without its wrappers.",
            )
        named[plain], origins[plain] = tensor, name
    if tensors and not named:
        raise AdapterFormatError(
            f"All tensors belong to what reads images, {shown(min(tensors), 200)} for example, and this base is "
            "served for text.",
            hint="Train linears of the language model, with target_modules "
            r"'.*language_model.*\.(q_proj|v_proj)' for example.",
        )
    roots = tuple(f"{path}.layers." for path in (_DECODER, *LANGUAGE_PATHS))
    if any(name.startswith(roots) for name in named) and not any(name.startswith(PREFIX) for name in named):
        named = {PREFIX + name: tensor for name, tensor in named.items()}
        found[f"added {PREFIX[:-1]}"] = None
    alias = _language_path(named, base)
    if alias is not None:
        found[f"left out {_difference(alias)}, the decoder's path in a model of images and text"] = None
        base = _renamed(base, alias)
    return Unwrapped(named, base, tuple(found))


def _plain(name: str, found: dict[str, None]) -> str:
    """Remove wrappers from a name; note what is left out."""
    if name.startswith(_PARALLEL):
        name = name.removeprefix(_PARALLEL)
        found["left out module., DistributedDataParallel's"] = None
    parts, kept = name.split("."), list[str]()
    for i, part in enumerate(parts):
        if part in WRAPPERS:
            found[f"left out {part}, {WRAPPERS[part]}'s"] = None
        elif part == _DEFAULT and i > 0 and _follows_tensor(parts[i - 1], parts[i + 1 :]):
            found[f"left out .{_DEFAULT}, the adapter's name in a running model"] = None
        else:
            kept.append(part)
    return ".".join(kept)


def _follows_tensor(before: str, rest: list[str]) -> bool:
    """Check whether an adapter's name stands where PEFT has it: behind the name of its tensor."""
    return before.startswith(("lora_", "hada_", "lokr_", "ia3_", "vera_")) and rest in ([], ["weight"], ["bias"])


def _language_path(tensors: Mapping[str, TensorView], base: BaseSpec) -> str | None:
    """Find where the decoder is in the model that was trained; None: where this base has it."""
    if base.layers_path != f"{_DECODER}.layers" or any(
        name.startswith(f"{PREFIX}{_DECODER}.layers.") for name in tensors
    ):
        return None
    return next(
        (path for path in LANGUAGE_PATHS if any(name.startswith(f"{PREFIX}{path}.layers.") for name in tensors)), None
    )


def _difference(path: str) -> str:
    """Find the component of a path that the decoder's own lacks."""
    return next(part for part in path.split(".") if part != _DECODER)


def _renamed(base: BaseSpec, path: str) -> BaseSpec:
    """Move the base's decoder to another path."""

    def moved(name: str) -> str:
        return path + name.removeprefix(_DECODER) if name.startswith(f"{_DECODER}.") else name

    paths = {module: moved(name) for module, name in base.module_paths.items()}
    paths["lm_head"] = LANGUAGE_PATHS[path]
    norms = {norm: moved(name) for norm, name in base.norm_paths.items()}
    return msgspec.structs.replace(base, layers_path=moved(base.layers_path), module_paths=paths, norm_paths=norms)
