"""PEFT's rules for the modules that a config targets, applied to the base's own names."""

from __future__ import annotations

from collections.abc import Iterable

from loraserve.adapters.config.peft_config import LoraSettings
from loraserve.adapters.config.regexes import Regex
from loraserve.adapters.format.tensor_names import BaseTensorNames, Contents
from loraserve.adapters.ir import OUTSIDE_LAYERS
from loraserve.adapters.problems import Problems
from loraserve.errors import AdapterFormatError
from loraserve.types import BaseSpec


def is_name_targeted(settings: LoraSettings, base: BaseSpec, name: str, layer: int | None) -> bool:
    """Check whether the config targets the module of this whole name.

    `layer` is None for one outside the layers.
    """
    if _is_listed(name, settings.exclude_modules) or is_inside_saved(settings, name):
        return False
    targets = settings.target_modules
    if targets is None:
        return layer is not None
    if isinstance(targets, Regex):
        return targets.is_fullmatch(name)
    if name in targets:
        # a full name is taken whatever layers_to_transform is
        return True
    if not _is_listed(name, targets):
        return False
    if settings.layers_to_transform is None:
        return True
    return layer is not None and _layer_by_pattern(settings, base, name, layer) in settings.layers_to_transform


def is_inside_saved(settings: LoraSettings, name: str) -> bool:
    """Check whether a component of the name, or several in a row, are in modules_to_save.

    Then no LoRA comes there.
    """
    dotted = f".{name}."
    return any(f".{saved}." in dotted for saved in settings.modules_to_save)


def is_saved(settings: LoraSettings, name: str) -> bool:
    """Check whether PEFT trains the module fully.

    It does if its name, or that of a module which it is a part of, ends with an entry of
    modules_to_save, be it amid a component.
    """
    ends = settings.modules_to_save
    if not ends:
        return False
    while name:
        if name.endswith(ends):
            return True
        name = name.rpartition(".")[0]
    return False


def ties_saved(settings: LoraSettings, base: BaseSpec) -> bool:
    """Check whether PEFT trains the embedding fully, and the head as the same parameter."""
    return settings.ensure_weight_tying and base.is_head_tied and _names_an_end(settings.modules_to_save)


def ties_lora(settings: LoraSettings, base: BaseSpec) -> bool:
    """Check whether PEFT gives the embedding LoRA, and the head the same, transposed."""
    if not settings.ensure_weight_tying or not base.is_head_tied or ties_saved(settings, base):
        return False
    targets = settings.target_modules
    if isinstance(targets, Regex):
        # PEFT takes the bare names here
        return any(targets.is_fullmatch(module) for module in OUTSIDE_LAYERS)
    return targets is not None and _names_an_end(targets)


def check_targets(settings: LoraSettings, contents: Contents, names: BaseTensorNames, problems: Problems) -> None:
    """Add a problem for each module whose tensors and targeting disagree.

    It is targeted and has no tensors, or has tensors and isn't targeted.
    """
    base = names.base
    is_tied = ties_lora(settings, base)
    for place in names.places():
        layer, module = place
        reported_layer = names.reported_layer(place)
        is_outside = module in OUTSIDE_LAYERS
        is_meant = (is_tied and is_outside) or is_name_targeted(
            settings, base, names.of(place), None if is_outside else layer
        )
        is_there = place in contents.linears and contents.linears[place].has_lora
        if is_meant and not is_there:
            problems.add(
                AdapterFormatError,
                f"The config targets {module} {{layers}}, and the file holds no tensors for it.",
                reported_layer,
            )
        elif is_there and not is_meant:
            why = ""
            if settings.ensure_weight_tying and module == "lm_head" and not base.is_head_tied:
                why = (
                    " ensure_weight_tying means that it was trained on a base with a tied head; "
                    "this base's head isn't tied."
                )
            problems.add(
                AdapterFormatError,
                f"The file holds tensors for {module} {{layers}}, which the config doesn't target.{why}",
                reported_layer,
            )


def absent_targets(settings: LoraSettings, contents: Contents, names: BaseTensorNames) -> tuple[str, ...]:
    """List the targets that this base has no module for, which PEFT leaves untrained.

    A regex gives none: it lists no names.
    """
    if settings.target_modules is None or isinstance(settings.target_modules, Regex):
        return ()
    found: set[str] = set()
    whole = [names.of(place) for place in names.places()]
    if names.experts is not None:
        whole += [names.experts.of(place) for place in contents.experts]
    for name in whole:
        while name:
            found.add(name)
            name = name.partition(".")[2]
    return tuple(target for target in settings.target_modules if target not in found)


def _layer_by_pattern(settings: LoraSettings, base: BaseSpec, name: str, layer: int) -> int | None:
    """Find the layer that PEFT takes the module to be in.

    None where layers_pattern finds none.
    """
    if not settings.layers_pattern:
        return layer
    for pattern in settings.layers_pattern:
        if isinstance(pattern, str):
            if f".{base.layers_path}".endswith(f".{pattern}"):
                return layer
        elif pattern.is_match(name):
            number = pattern.group(name, "idx")
            return None if number is None else int(number)
    return None


def _names_an_end(listed: Iterable[str]) -> bool:
    """Check whether the embedding or the head is listed, in PEFT's rough way.

    PEFT goes by the last component.
    """
    return any(entry.rpartition(".")[2] in OUTSIDE_LAYERS for entry in listed)


def _is_listed(name: str, listed: tuple[str, ...] | Regex) -> bool:
    if isinstance(listed, Regex):
        return listed.is_fullmatch(name)
    while name:
        if name in listed:
            return True
        name = name.partition(".")[2]
    return False
