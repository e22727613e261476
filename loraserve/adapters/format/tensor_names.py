"""Mapping from the tensor names of an adapter's file to modules.

The names are PEFT's, and the base's as its checkpoint has them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loraserve.adapters.format.expert_names import ExpertNames, ExpertPlace
from loraserve.adapters.ir import OUTSIDE_LAYERS, TensorView
from loraserve.adapters.problems import Problems
from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterRejected, AdapterUnsupported
from loraserve.types import BaseSpec

PREFIX = "base_model.model."

Place = tuple[int, str]
"""(layer, name of a linear or of a norm); the layer is 0 for what is in none."""

# What PEFT writes behind a module's name, by the field of `LinearTensors` that it becomes.
_SUFFIXES = {
    "lora_a": r"lora_A\.weight",
    "lora_b": r"lora_B\.weight",
    "lora_bias": r"lora_B\.bias",
    "embedding_a": "lora_embedding_A",
    "embedding_b": "lora_embedding_B",
    "magnitude": r"lora_magnitude_vector(?:\.weight)?",
    "token_rows": r"token_adapter\.trainable_tokens_delta",
    # of the base, apart from what was trained
    "saved_base": r"base_layer\.weight|original_module\.weight|token_adapter\.base_layer\.weight",
    "base_bias": r"base_layer\.bias",
    "original_bias": r"original_module\.bias",
    # what bias="all" and save_embedding_layers=True save a second time
    "weight_copy": r"modules_to_save\.weight",
    "bias_copy": r"modules_to_save\.bias",
    "weight": "weight",
    "bias": "bias",
}
_KEY = re.compile(r"(?P<path>.+?)\.(?:" + "|".join(f"(?P<{part}>{text})" for part, text in _SUFFIXES.items()) + ")")

SAVED_AS = {
    "lora_a": "lora_A",
    "lora_b": "lora_B",
    "lora_bias": "lora_B.bias",
    "magnitude": "lora_magnitude_vector",
    "token_rows": "token_adapter.trainable_tokens_delta",
    "saved_base": "base_layer.weight",
    "base_bias": "base_layer.bias",
    "original_bias": "original_module.bias",
    "weight_copy": "modules_to_save.weight",
    "bias_copy": "modules_to_save.bias",
}
"""PEFT's word for a field of `LinearTensors` where it is another one."""


@dataclass(slots=True)
class LinearTensors:
    """Tensors that the file holds of a linear, as it holds them."""

    lora_a: TensorView | None = None
    lora_b: TensorView | None = None
    lora_bias: TensorView | None = None
    magnitude: TensorView | None = None
    token_rows: TensorView | None = None
    saved_base: TensorView | None = None
    base_bias: TensorView | None = None
    original_bias: TensorView | None = None
    weight_copy: TensorView | None = None
    bias_copy: TensorView | None = None
    weight: TensorView | None = None
    bias: TensorView | None = None

    @property
    def has_lora(self) -> bool:
        return any(t is not None for t in (self.lora_a, self.lora_b, self.lora_bias, self.magnitude))

    @property
    def first(self) -> str:
        """PEFT's word for one of them."""
        part = next(part for part in LinearTensors.__slots__ if getattr(self, part) is not None)
        return SAVED_AS.get(part, part)


@dataclass(frozen=True, slots=True)
class BaseLinear:
    """A linear as the base's checkpoint has it.

    It is one of the base's modules, or several that the checkpoint has fused into one.

    Attributes:
        name: the last component of its path: ``q_proj``, ``qkv_proj``; the path where linears of
            transformers' code share a last component.
        path: inside a layer; of one in no layer, the whole path.
        parts: module → its rows of the linear's output.
    """

    name: str
    path: str
    out_features: int
    in_features: int
    has_bias: bool
    parts: Mapping[str, slice]

    @property
    def is_outside(self) -> bool:
        """Whether it is in no layer."""
        return self.name in OUTSIDE_LAYERS


class BaseTensorNames:
    """The base's names of what an adapter may change.

    Attributes:
        linears: name → linear, in the order of the base's modules.
        experts: names of its mixtures of experts; None: adapters can't change any.
    """

    def __init__(self, base: BaseSpec) -> None:
        self.base = base
        self.linears: dict[str, BaseLinear] = {}
        fused: dict[str, list[str]] = {}
        for module in base.modules:
            fused.setdefault(checkpoint_path(base, module), []).append(module)
        modelled = modelled_names(base)
        for path, modules in fused.items():
            parts: dict[str, slice] = {}
            stop = 0
            for module in modules:
                start, stop = stop, stop + base.modules[module][0]
                parts[module] = slice(start, stop)
            name = modules[0] if len(modules) == 1 else path.rpartition(".")[2]
            name = modelled.get(modules[0], name)
            has_bias = all(module in base.biased_modules for module in modules)
            self.linears[name] = BaseLinear(name, path, stop, base.modules[modules[0]][1], has_bias, parts)
        self._linear_paths = {linear.path: linear for linear in self.linears.values()}
        self.experts = None if base.experts is None else ExpertNames(base, base.experts)
        self._norm_paths = {path: norm for norm, path in base.norm_paths.items()}

    def of(self, place: Place) -> str:
        """Format the whole name of a linear or of a norm, as PEFT's patterns see it.

        Examples are ``model.layers.3.self_attn.q_proj`` and ``lm_head``.
        """
        layer, name = place
        if name in self.linears:
            path, is_outside = self.linears[name].path, self.linears[name].is_outside
        else:
            path, is_outside = self.base.norm_paths[name], name == "norm"
        return path if is_outside else f"{self.base.layers_path}.{layer}.{path}"

    def places(self) -> list[Place]:
        """Yield the base's linears."""
        linears = self.linears.values()
        places = [
            (layer, x.name)
            for layer in range(self.base.num_layers)
            for x in linears
            if not x.is_outside and self._has(layer, x)
        ]
        return places + [(0, x.name) for x in linears if x.is_outside]

    def norms(self) -> list[Place]:
        """Yield the base's norms that an adapter may replace."""
        layers = range(self.base.num_layers)
        return [(layer, norm) for norm in self.base.norm_paths for layer in (layers if norm != "norm" else (0,))]

    def find(self, path: str) -> tuple[int | None, str]:
        """(layer, rest of the path); None for what is in no layer."""
        layers_path = self.base.layers_path + "."
        number, _, rest = path.removeprefix(layers_path).partition(".")
        if not path.startswith(layers_path) or not number.isdecimal() or str(int(number[:9])) != number:
            return None, path
        return int(number), rest

    def linear(self, layer: int | None, path: str) -> BaseLinear | None:
        linear = self._linear_paths.get(path)
        if linear is None or linear.is_outside != (layer is None):
            return None
        return linear if layer is None or layer >= self.base.num_layers or self._has(layer, linear) else None

    def _has(self, layer: int, linear: BaseLinear) -> bool:
        return all(self.base.has_module(layer, module) for module in linear.parts)

    def norm(self, layer: int | None, path: str) -> str | None:
        norm = self._norm_paths.get(path)
        return norm if norm is not None and (norm == "norm") == (layer is None) else None

    def listed(self, is_outside: bool) -> str:
        """List the paths of the linears, for people."""
        return ", ".join(linear.path for linear in self.linears.values() if linear.is_outside == is_outside)

    def lacking(self, path: str) -> str:
        """Format which layers have a linear that others lack, for people; else an empty string."""
        linear = self._linear_paths.get(path)
        layers = () if linear is None else self.base.module_layers.get(next(iter(linear.parts)), ())
        return f"it in layer {', '.join(map(str, layers))} alone" if layers else ""

    def reported_layer(self, place: Place) -> int | None:
        """Choose the layer that problems name: None for what is in none."""
        return None if place[1] in OUTSIDE_LAYERS or place[1] == "norm" else place[0]


@dataclass(slots=True)
class Contents:
    """An adapter's file, every tensor in its place.

    They are in order of layer, then of the base's linears.

    Attributes:
        experts: linears of a mixture of experts.
        wrappers: (layer, wrappers around it) → what a wrapper of all experts has.
    """

    linears: dict[Place, LinearTensors] = field(default_factory=dict)
    experts: dict[ExpertPlace, LinearTensors] = field(default_factory=dict)
    wrappers: dict[tuple[int, int], LinearTensors] = field(default_factory=dict)
    norms: dict[Place, TensorView] = field(default_factory=dict)


def checkpoint_path(base: BaseSpec, module: str) -> str:
    """Look up the path of the linear that the base's checkpoint has for this module.

    It may be others' too: ``self_attn.qkv_proj[q_proj]`` is a part of one.
    """
    return base.module_paths[module].partition("[")[0]


def modelled_names(base: BaseSpec) -> dict[str, str]:
    """Map the modules of a base that transformers' code computes to its linears' names.

    The module (``q_proj``) is a slot there, and no file has its name: the linear's (``dense``) is
    the last component of its path, or the path where linears share that component. Other bases have
    none.
    """
    if base.implementation == "native":
        return {}
    paths = {module: path for module, path in base.module_paths.items() if module not in OUTSIDE_LAYERS}
    tails = Counter(path.rpartition(".")[2] for path in paths.values())
    named = {module: path.rpartition(".")[2] for module, path in paths.items()}
    return {module: tail if tails[tail] == 1 else paths[module] for module, tail in named.items()}


def shown_modules(base: BaseSpec, modules: Sequence[str]) -> tuple[str, ...]:
    """Convert the modules to the names that users know them by."""
    names = modelled_names(base)
    return tuple(names.get(module, module) for module in modules)


def known_modules(base: BaseSpec, names: Sequence[str]) -> tuple[str, ...]:
    """Convert names from `shown_modules` back to the modules."""
    modules = {name: module for module, name in modelled_names(base).items()}
    return tuple(modules.get(name, name) for name in names)


def module_name(base: BaseSpec, layer: int, module: str) -> str:
    """Format the module's name in the base model, as PEFT's patterns see it.

    Examples are ``model.layers.3.self_attn.q_proj`` and ``lm_head``.
    """
    path = checkpoint_path(base, module)
    return path if module in OUTSIDE_LAYERS else f"{base.layers_path}.{layer}.{path}"


def group_tensors(tensors: Mapping[str, TensorView], names: BaseTensorNames, problems: Problems) -> Contents:
    """Group the tensors by linear and norm; add a problem for each that has no place."""
    contents = Contents()
    for name, tensor in tensors.items():
        _put(name, tensor, names, contents, problems)
    order = {name: index for index, name in enumerate(names.linears)}
    contents.linears = dict(sorted(contents.linears.items(), key=lambda item: (item[0][0], order[item[0][1]])))
    contents.norms = dict(sorted(contents.norms.items()))
    return contents


def _put(name: str, tensor: TensorView, names: BaseTensorNames, contents: Contents, problems: Problems) -> None:
    match = _KEY.fullmatch(name)
    if not name.startswith(PREFIX) or match is None or (match["path"].find(".lora_") >= 0):
        problems.add(*_explain_name(name))
        return
    part = match.lastgroup or ""
    path = match["path"].removeprefix(PREFIX)
    layer, inner = names.find(path)
    if layer is not None and layer < names.base.num_layers and names.experts is not None:
        stored = _of_experts(layer, inner, names.experts, contents, problems)
        if stored is not None:
            _put_factor(name, part, tensor, stored, problems)
            return
    norm = names.norm(layer, inner) if part == "weight" else None
    linear = names.linear(layer, inner)
    if norm is None and linear is None:
        problems.add(*_explain_path(name, path, part, names), layer if part != "weight" else None)
        return
    if layer is not None and layer >= names.base.num_layers:
        count = names.base.num_layers
        message = f"The adapter has tensors {{layers}}; this base has {count} layers (0 to {count - 1})."
        problems.add(AdapterBaseMismatch, message, layer)
        return
    if linear is None:
        contents.norms[layer or 0, norm or ""] = tensor
        return
    place = (layer or 0, linear.name)
    field_name = _field(name, part, linear, problems)
    if field_name is None:
        return
    stored = contents.linears.setdefault(place, LinearTensors())
    if getattr(stored, field_name) is not None:
        what = "magnitudes" if field_name == "magnitude" else f"tensors for its {SAVED_AS.get(field_name, field_name)}"
        problems.add(AdapterFormatError, f"{linear.name} has two {what} {{layers}}.", names.reported_layer(place))
    setattr(stored, field_name, tensor)


def _of_experts(
    layer: int, path: str, names: ExpertNames, contents: Contents, problems: Problems
) -> LinearTensors | None:
    """Find where the tensors of a path inside a mixture of experts go; None: it is in none."""
    depth, found = names.wrapper(path), names.linear(path)
    if depth is not None:
        return contents.wrappers.setdefault((layer, depth), LinearTensors())
    if found is None:
        return None
    module, expert = found
    if module.startswith("experts.") and expert >= names.experts.num_experts:
        count = names.experts.num_experts
        message = f"The adapter has tensors for expert {expert} {{layers}}; this base has {count} (0 to {count - 1})."
        problems.add(AdapterBaseMismatch, message, layer)
        return LinearTensors()
    return contents.experts.setdefault((layer, module, expert), LinearTensors())


def _put_factor(name: str, part: str, tensor: TensorView, stored: LinearTensors, problems: Problems) -> None:
    """Put a tensor of a mixture's LoRA in its place, or add a problem that it isn't one."""
    if part not in ("lora_a", "lora_b", "lora_bias"):
        text = shown(name, 200)
        problems.add(
            AdapterUnsupported,
            f"{text} is for a mixture's experts, of which LoRA without magnitudes is served: lora_A, lora_B and "
            "lora_B.bias.",
        )
    elif getattr(stored, part) is not None:
        problems.add(AdapterFormatError, f"{shown(name, 200)} is there twice, under two names of its module.")
    else:
        setattr(stored, part, tensor)


def _field(name: str, part: str, linear: BaseLinear, problems: Problems) -> str | None:
    """Choose the field of `LinearTensors` that the part is for this linear.

    Or return None and add a problem.
    """
    text = shown(name, 200)
    is_embedding = linear.name == "embed_tokens"
    if part in ("embedding_a", "embedding_b"):
        if is_embedding:
            return "lora_" + part[-1]
        message = f"{text} is for an embedding; PEFT saves lora_A and lora_B of {linear.name}."
        if not linear.is_outside:
            message = f"{text} is for an embedding; linears have lora_A and lora_B."
        problems.add(AdapterFormatError, message)
        return None
    if is_embedding and part in ("lora_a", "lora_b", "lora_bias"):
        problems.add(
            AdapterFormatError,
            f"{text} isn't expected: PEFT saves lora_embedding_A and lora_embedding_B of {linear.name}, "
            "and no lora_bias.",
        )
        return None
    if part == "saved_base" and not linear.is_outside:
        problems.add(
            AdapterUnsupported,
            f"{text} is a weight of the base beside the trained one; PEFT saves it for the head and the "
            "embedding only.",
        )
        return None
    return part


def _explain_name(name: str) -> tuple[type[AdapterRejected], str]:
    """Add a problem that explains why PEFT gives no tensor of LoRA's this name."""
    text = shown(name, 200)
    if re.search(r"\.lora_[AB]\.[^.]+\.weight$", name):
        return AdapterFormatError, (
            f"{text} has the adapter's name in its key, as in a running model. Save with PEFT's save_pretrained, which "
            "removes it."
        )
    if not name.startswith(PREFIX):
        return AdapterFormatError, f"{text} doesn't begin with \"{PREFIX}\", as PEFT's save_pretrained writes it."
    return (
        AdapterFormatError,
        f'{text} isn\'t the name of a tensor; expected "{PREFIX}<module>.lora_A.weight" or "….lora_B.weight".',
    )


def _explain_path(name: str, path: str, part: str, names: BaseTensorNames) -> tuple[type[AdapterRejected], str]:
    """Add a problem that explains why there's no such module to adapt."""
    text = shown(name, 200)
    layer, inner = names.find(path)
    if re.search(r"\.experts?(\.|$)", path):
        reach = f"adapters may change {names.listed(False)} only."
        if names.experts is not None:
            of_mixture = [*names.experts.experts.module_paths.values(), *names.experts.parameter_paths]
            reach = f"adapters may change {', '.join(of_mixture)}."
        return AdapterUnsupported, f"{text} is for a mixture's experts; on this base, {reach}"
    if part == "weight":
        norms = ", ".join(names.base.norm_paths.values())
        return AdapterUnsupported, (
            f"{text} is a fully trained weight of {shown(path, 120)}, which this server doesn't replace. "
            "It replaces those of "
            f"{names.listed(False)}, {names.listed(True)}{', ' + norms if norms else ''}."
        )
    if layer is None:
        outside = names.listed(True)
        return AdapterBaseMismatch, (
            f"{text} is for {shown(path, 120)}; adapters of this base may change {outside + ', ' if outside else ''}"
            f"{names.base.layers_path}.<layer>.<module>."
        )
    lacking = names.lacking(inner)
    return AdapterBaseMismatch, (
        f"The adapter has tensors for {shown(inner, 120)} {{layers}}; this base has {lacking or names.listed(False)}."
    )
