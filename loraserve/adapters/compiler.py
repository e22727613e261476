"""(config, tensors, base) → AdapterIR. The tensors decide, the config must agree, and every tensor is consumed exactly once.

Whatever is wrong is collected and reported at once, so that an upload is mended in one go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loraserve.adapters.ir import OUTSIDE_LAYERS, AdapterIR, ModuleIR, TensorView
from loraserve.adapters.patterns import first_matches
from loraserve.adapters.peft_config import LoraSettings, read_settings
from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterRejected, AdapterUnsupported
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec

PREFIX = "base_model.model."
_MAX_PROBLEMS = 64

_KEY = re.compile(
    r"(?P<name>.+)\.(?:lora_(?P<side>[AB])\.weight|lora_embedding_(?P<row>[AB])"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.weight)?|(?P<base>base_layer)\.weight)"
)

Place = tuple[int, str]
"""(layer, module); the layer is 0 for modules in none."""


@dataclass(slots=True)
class _Problems:
    """Groups of one message with the layers it concerns; a mistake in 28 layers is told once."""

    by_message: dict[tuple[type[AdapterRejected], str], list[int]] = field(default_factory=dict)

    def add(self, kind: type[AdapterRejected], message: str, layer: int | None = None) -> None:
        layers = self.by_message.setdefault((kind, message), [])
        if layer is not None:
            layers.append(layer)

    def raise_if_any(self) -> None:
        if not self.by_message:
            return
        texts = [
            message.replace(" {layers}", f" in {_ranges(layers)}" if layers else "")
            for (_, message), layers in self.by_message.items()
        ]
        kinds = {kind for kind, _ in self.by_message}
        # What is wrong with the files comes before what is wrong with their fit.
        order: tuple[type[AdapterRejected], ...] = (AdapterFormatError, AdapterUnsupported, AdapterBaseMismatch)
        kind = next(k for k in order if k in kinds)
        more = len(texts) - _MAX_PROBLEMS
        if more > 0:
            texts = [*texts[:_MAX_PROBLEMS], f"… and {more} more."]
        summary = (
            texts[0]
            if len(texts) == 1
            else f"{len(texts)} problems: {' '.join(texts[:3])}{' …' if len(texts) > 3 else ''}"
        )
        raise kind(f"The adapter can't be served: {summary}", problems=texts)


@dataclass(slots=True)
class _Pair:
    """What the file holds of one module."""

    lora_a: TensorView | None = None
    lora_b: TensorView | None = None
    magnitude: TensorView | None = None
    saved_base: TensorView | None = None


def compile_adapter(
    config: Mapping[str, Any], tensors: Mapping[str, TensorView], base: BaseSpec, limits: Limits = LIMITS
) -> AdapterIR:
    """The adapter in the base's terms; its arrays are those of `tensors`, not copied.

    Args:
        config: what ``adapter_config.json`` holds.
        tensors: what ``adapter_model.safetensors`` holds, under the names that PEFT's save_pretrained writes.

    Raises:
        AdapterFormatError: malformed config values, tensors missing or unknown, ranks that disagree with the config.
        AdapterUnsupported: a config field that would change the answers and isn't implemented.
        AdapterBaseMismatch: shapes, layers or modules that the base doesn't have.
            With several kinds of problems, the first of these; `problems` lists all.
    """
    problems = _Problems()
    settings, config_problems = read_settings(config, limits)
    for problem in config_problems:
        problems.add(AdapterUnsupported if problem.is_unsupported else AdapterFormatError, problem.message)
    pairs = _pair_up(tensors, base, problems)
    if settings is not None:
        _check_reach(settings, pairs, base, problems)
    modules = _compile_pairs(settings, pairs, base, limits, problems)
    if settings is not None and settings.ensure_weight_tying:
        _check_tying({m.module: m for m in modules if m.module in OUTSIDE_LAYERS}, problems)
    problems.raise_if_any()
    dtypes = {t.dtype for m in modules for t in (m.lora_a, m.lora_b, m.weight, m.token_rows) if t is not None}
    # bfloat16 and float16 hold different numbers; float32 holds both
    return AdapterIR(
        modules=tuple(modules),
        dtype=dtypes.pop() if len(dtypes) == 1 else "F32",
        saved_base={module: pair.saved_base for (_, module), pair in pairs.items() if pair.saved_base is not None},
    )


def module_name(base: BaseSpec, layer: int, module: str) -> str:
    """The module's name in the base model, as PEFT's patterns see it: ``model.layers.3.self_attn.q_proj``, ``lm_head``."""
    if module in OUTSIDE_LAYERS:
        return base.module_paths[module]
    return f"{base.layers_path}.{layer}.{base.module_paths[module]}"


def _pair_up(tensors: Mapping[str, TensorView], base: BaseSpec, problems: _Problems) -> dict[Place, _Pair]:
    """Every tensor in its place, or a problem; in order of layer, then of the base's modules."""
    by_path = {path: module for module, path in base.module_paths.items()}
    pairs: dict[Place, _Pair] = {}
    for name, tensor in tensors.items():
        place = _place(name, base, by_path, problems)
        if place is None:
            continue
        layer, module, part = place
        pair = pairs.setdefault((layer, module), _Pair())
        if getattr(pair, part) is not None:
            problems.add(AdapterFormatError, f"{module} has two magnitudes {{layers}}.", _told(layer, module))
        setattr(pair, part, tensor)
    order = {module: index for index, module in enumerate(base.modules)}
    return dict(sorted(pairs.items(), key=lambda item: (item[0][0], order[item[0][1]])))


def _place(name: str, base: BaseSpec, by_path: Mapping[str, str], problems: _Problems) -> tuple[int, str, str] | None:
    """(layer, module, field of `_Pair`) of a tensor, or None and a problem."""
    match = _KEY.fullmatch(name)
    if not name.startswith(PREFIX) or match is None:
        problems.add(*_explain_key(name))
        return None
    path = match["name"].removeprefix(PREFIX)
    outside = by_path.get(path)
    if outside in OUTSIDE_LAYERS and outside in base.modules:
        return _place_outside(name, match, outside, problems)
    layers_path = base.layers_path + "."
    number, _, module_path = path.removeprefix(layers_path).partition(".")
    if not path.startswith(layers_path) or not number.isdecimal() or str(int(number[:9])) != number:
        problems.add(
            AdapterBaseMismatch,
            f"{shown(name, 200)} is for {shown(path, 120)}; adapters of this base act on "
            f"{', '.join([*_outside_paths(base), layers_path])}<layer>.<module>.",
        )
        return None
    if match["base"] is not None:
        problems.add(*_explain_key(name))
        return None
    if match["row"] is not None:
        problems.add(AdapterFormatError, f"{shown(name, 200)} is for an embedding; linears have lora_A and lora_B.")
        return None
    layer, module = int(number), by_path.get(module_path)
    if module is None or module not in base.modules or module in OUTSIDE_LAYERS:
        problems.add(
            AdapterBaseMismatch,
            f"The adapter has tensors for {shown(module_path, 120)} {{layers}}; this base has "
            f"{', '.join(path for path, module in by_path.items() if module not in OUTSIDE_LAYERS)}.",
            layer,
        )
        return None
    if layer >= base.num_layers:
        problems.add(
            AdapterBaseMismatch,
            f"The adapter has tensors {{layers}}; this base has {base.num_layers} layers (0 to {base.num_layers - 1}).",
            layer,
        )
        return None
    return layer, module, _part(match)


def _place_outside(name: str, match: re.Match[str], module: str, problems: _Problems) -> tuple[int, str, str] | None:
    is_embedding = module == "embed_tokens"
    wrong = match["side"] if is_embedding else match["row"]
    if wrong is not None:
        expected = "lora_embedding_A and lora_embedding_B" if is_embedding else "lora_A and lora_B"
        problems.add(AdapterFormatError, f"{shown(name, 200)}: {module} has {expected} in PEFT's files.")
        return None
    return 0, module, _part(match)


def _part(match: re.Match[str]) -> str:
    if match["magnitude"] is not None:
        return "magnitude"
    if match["base"] is not None:
        return "saved_base"
    return "lora_a" if "A" in (match["side"], match["row"]) else "lora_b"


def _outside_paths(base: BaseSpec) -> list[str]:
    return [base.module_paths[module] for module in OUTSIDE_LAYERS if module in base.modules]


def _told(layer: int, module: str) -> int | None:
    """The layer as problems tell it."""
    return None if module in OUTSIDE_LAYERS else layer


def _explain_key(name: str) -> tuple[type[AdapterRejected], str]:
    """Why a tensor's name isn't one that plain LoRA has."""
    text = shown(name, 200)
    if re.search(r"\.lora_[AB]\.[^.]+\.weight$", name):
        return AdapterFormatError, (
            f"{text} has the adapter's name in its key, as in a running model. Save with PEFT's save_pretrained, which "
            "takes it out."
        )
    if name.endswith(".bias"):
        return AdapterUnsupported, f"{text} is a bias; biases aren't served yet."
    if ".lora_" not in name:
        return AdapterUnsupported, f"{text} is a fully trained weight; only LoRA's own tensors are served yet."
    if not name.startswith(PREFIX):
        return AdapterFormatError, f"{text} doesn't begin with \"{PREFIX}\", as PEFT's save_pretrained writes it."
    return AdapterFormatError, f'{text} isn\'t "{PREFIX}<module>.lora_A.weight" or "….lora_B.weight".'


def _check_reach(settings: LoraSettings, pairs: Mapping[Place, _Pair], base: BaseSpec, problems: _Problems) -> None:
    """The modules that the config would give LoRA must be those that have tensors."""
    places = [(layer, module) for layer in range(base.num_layers) for module in base.modules]
    for layer, module in places:
        if layer and module in OUTSIDE_LAYERS:
            continue
        is_meant = _is_targeted(settings, base, layer, module)
        # PEFT takes a head that it ties to the embedding out of the targets
        is_tied = settings.ensure_weight_tying and module == "lm_head" and (0, "embed_tokens") in pairs
        is_there = (layer, module) in pairs
        if is_meant and not is_there:
            problems.add(
                AdapterFormatError,
                f"The config targets {module} {{layers}}, and the file holds no tensors for it.",
                _told(layer, module),
            )
        elif is_there and not is_meant and not is_tied:
            problems.add(
                AdapterFormatError,
                f"The file holds tensors for {module} {{layers}}, which the config doesn't target.",
                _told(layer, module),
            )


def _check_tying(modules: Mapping[str, ModuleIR], problems: _Problems) -> None:
    """With ensure_weight_tying, PEFT gives a head that is tied to the embedding the embedding's LoRA, whatever a file says."""
    if not modules:
        return
    head, embedding = modules.get("lm_head"), modules.get("embed_tokens")
    if head is None or embedding is None:
        there = "lm_head" if embedding is None else "embed_tokens"
        problems.add(
            AdapterUnsupported,
            f"ensure_weight_tying is true, and the file has LoRA on {there} alone: what PEFT makes of that depends on how the "
            "base ties its head. Train it on this base, or with ensure_weight_tying=False.",
        )
    elif not (_is_transposed(head.lora_a, embedding.lora_b) and _is_transposed(head.lora_b, embedding.lora_a)):
        problems.add(
            AdapterUnsupported,
            "ensure_weight_tying is true, and lm_head's lora_A and lora_B aren't the embedding's, transposed: PEFT would keep "
            "one of the two. Save it from the tied model, or with ensure_weight_tying=False.",
        )


def _is_transposed(a: TensorView | None, b: TensorView | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a.array, b.array.T)


def _is_targeted(settings: LoraSettings, base: BaseSpec, layer: int, module: str) -> bool:
    """PEFT's check_target_module_exists, for lists of names. Its "all-linear" leaves the head out."""
    name = module_name(base, layer, module)
    if _is_listed(name, settings.exclude_modules):
        return False
    if settings.target_modules is None:
        return module not in OUTSIDE_LAYERS
    if name in settings.target_modules:
        # a full name is taken whatever layers_to_transform says
        return True
    if not _is_listed(name, settings.target_modules):
        return False
    if settings.layers_to_transform is None:
        return True
    if module in OUTSIDE_LAYERS:
        return False
    container = base.layers_path.rpartition(".")[2]
    if settings.layers_pattern and container not in settings.layers_pattern:
        return False
    return layer in settings.layers_to_transform


def _is_listed(name: str, listed: Iterable[str]) -> bool:
    return any(name == entry or name.endswith(f".{entry}") for entry in listed)


def _compile_pairs(
    settings: LoraSettings | None,
    pairs: Mapping[Place, _Pair],
    base: BaseSpec,
    limits: Limits,
    problems: _Problems,
) -> list[ModuleIR]:
    names = {place: module_name(base, *place) for place in pairs}
    ranks = first_matches([p for p, _ in settings.rank_pattern], names.values()) if settings else {}
    alphas = first_matches([p for p, _ in settings.alpha_pattern], names.values()) if settings else {}
    modules: list[ModuleIR] = []
    for (layer, module), pair in pairs.items():
        told = _told(layer, module)
        if pair.lora_a is None or pair.lora_b is None:
            present = {
                "lora_A": pair.lora_a,
                "lora_B": pair.lora_b,
                "magnitude": pair.magnitude,
                "weight": pair.saved_base,
            }
            there = next(name for name, tensor in present.items() if tensor is not None)
            missing = "lora_A" if pair.lora_a is None else "lora_B"
            problems.add(AdapterFormatError, f"{module} has {there} and no {missing} {{layers}}.", told)
            continue
        if settings is not None:
            _check_magnitude(module, pair.magnitude, settings, base, problems, told)
        _check_saved_base(module, pair.saved_base, base, problems)
        if not _fits(module, pair.lora_a, pair.lora_b, base, problems, told) or settings is None:
            continue
        rank, name = pair.lora_a.shape[0], names[layer, module]
        meant = settings.rank_pattern[ranks[name]][1] if name in ranks else settings.r
        if rank != meant:
            problems.add(
                AdapterFormatError,
                f"{module} has rank {rank} {{layers}}; the config says {meant} (r, rank_pattern).",
                told,
            )
            continue
        alpha = settings.alpha_pattern[alphas[name]][1] if name in alphas else settings.lora_alpha
        scaling = settings.scaling(alpha, rank)
        if abs(scaling) > limits.max_scaling:
            problems.add(
                AdapterFormatError,
                f"{module} has scaling {scaling:g} {{layers}} (alpha {alpha:g}, rank {rank}); at most {limits.max_scaling:g} is taken.",
                told,
            )
        modules.append(ModuleIR(layer, module, rank, scaling, pair.lora_a, pair.lora_b, pair.magnitude))
    if not pairs and not problems.by_message:
        problems.add(AdapterFormatError, "The file holds no lora_A and lora_B.")
    return modules


def _check_magnitude(
    module: str,
    magnitude: TensorView | None,
    settings: LoraSettings,
    base: BaseSpec,
    problems: _Problems,
    told: int | None,
) -> None:
    size = base.modules[module][0]
    if magnitude is None:
        if settings.use_dora:
            problems.add(
                AdapterFormatError, f"use_dora is true, and {module} has no lora_magnitude_vector {{layers}}.", told
            )
    elif not settings.use_dora:
        problems.add(
            AdapterFormatError,
            f"{module} has a lora_magnitude_vector {{layers}}; the config's use_dora is false.",
            told,
        )
    elif magnitude.shape != (size,):
        shape = "×".join(map(str, magnitude.shape))
        problems.add(
            AdapterBaseMismatch,
            f"{module}.lora_magnitude_vector is {shape} {{layers}}; this base takes {size} numbers.",
            told,
        )


def _check_saved_base(module: str, saved: TensorView | None, base: BaseSpec, problems: _Problems) -> None:
    shape = (base.vocab_size, base.hidden_size)
    if saved is not None and saved.shape != shape:
        problems.add(
            AdapterBaseMismatch,
            f"The file holds a weight of {module} that is {'×'.join(map(str, saved.shape))}; this base has {shape[0]}×{shape[1]}. "
            "Enlarged vocabularies aren't served yet.",
        )


def _fits(module: str, a: TensorView, b: TensorView, base: BaseSpec, problems: _Problems, layer: int | None) -> bool:
    out_features, in_features = base.modules[module]
    flat = [side for side, tensor in (("lora_A", a), ("lora_B", b)) if len(tensor.shape) != 2]
    for side in flat:
        problems.add(AdapterFormatError, f"{module}.{side} isn't a matrix {{layers}}; expected 2 dims.", layer)
    if flat:
        return False
    if a.shape[1] != in_features:
        what = "hidden size" if in_features == base.hidden_size else f"{module}'s input size"
        if module == "embed_tokens":
            what = "vocabulary size"
        problems.add(
            AdapterBaseMismatch,
            f"The adapter was trained for {what} {a.shape[1]} ({module}.lora_A is {a.shape[0]}×{a.shape[1]} {{layers}}); "
            f"this base has {in_features}.",
            layer,
        )
    if b.shape[0] != out_features:
        problems.add(
            AdapterBaseMismatch,
            f"The adapter was trained for {module}'s output size {b.shape[0]} ({module}.lora_B is {b.shape[0]}×{b.shape[1]} "
            f"{{layers}}); this base has {out_features}.",
            layer,
        )
    if a.shape[0] != b.shape[1]:
        problems.add(
            AdapterFormatError,
            f"{module}.lora_A has rank {a.shape[0]} and {module}.lora_B has rank {b.shape[1]} {{layers}}; they must be equal.",
            layer,
        )
    return (a.shape[1], b.shape[0], a.shape[0]) == (in_features, out_features, b.shape[1])


def _ranges(layers: Iterable[int]) -> str:
    """ "layer 3", "layers 0–27", "layers 0, 2, 5–7 and 11 more": at most six ranges."""
    numbers = sorted(set(layers))
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [f"{first}" if first == last else f"{first}–{last}" for first, last in ranges]
    if len(texts) > 6:
        rest = sum(last - first + 1 for first, last in ranges[6:])
        texts = [*texts[:6], f"and {rest} more"]
    return f"layer{'' if len(numbers) == 1 else 's'} {', '.join(texts)}"
