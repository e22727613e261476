"""LoRA with all that PEFT saves with it.

That is DoRA's magnitudes, biases, whole modules, trained tokens, aLoRA's invocation tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from loraserve.adapters.config.patterns import first_matches
from loraserve.adapters.config.peft_config import LoraSettings, read_settings
from loraserve.adapters.format.tensor_names import BaseLinear, BaseTensorNames, Contents, LinearTensors, group_tensors
from loraserve.adapters.ir import OUTSIDE_LAYERS, AdapterIR, ModuleIR, TensorView
from loraserve.adapters.problems import Problems
from loraserve.adapters.saved_modules import check_saved, norms_of, shape_words, vocabulary_problem
from loraserve.adapters.strict_json import shown
from loraserve.adapters.target_modules import absent_targets, check_targets, ties_lora
from loraserve.adapters.trained_tokens import TokenRows, trained_tokens
from loraserve.adapters.tuners.experts import ExpertTensors
from loraserve.adapters.tuners.extra_rows import SplitRows, joined_rows, split_extra_rows, split_tokens
from loraserve.adapters.tuners.factors import slice_rows
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterUnsupported
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec


def compile_lora(
    config: Mapping[str, Any], tensors: Mapping[str, TensorView], base: BaseSpec, limits: Limits = LIMITS
) -> AdapterIR:
    """Compile the adapter into the base's terms, as `compile_adapter` does.

    Raises:
        AdapterRejected: as `compile_adapter`.
    """
    problems = Problems()
    settings, config_problems = read_settings(config, limits)
    for problem in config_problems:
        problems.add(AdapterUnsupported if problem.is_unsupported else AdapterFormatError, problem.message)
    names = BaseTensorNames(base)
    contents = group_tensors(tensors, names, problems)
    rows: dict[str, TokenRows] = {}
    split: SplitRows | None = None
    if settings is not None:
        split = split_extra_rows(settings, contents, names, limits, problems)
        check_targets(settings, contents, names, problems)
        check_saved(settings, contents, names, problems)
        rows = trained_tokens(settings, contents, names, problems, 0 if split is None else split.num_rows)
    rows, beyond = split_tokens(rows, base.vocab_size)
    compiler = _Modules(settings, contents, names, limits, problems)
    modules = [*compiler.compiled()]
    if names.experts is not None:
        experts = ExpertTensors(settings, contents, names.experts, problems)
        experts.check_targets()
        modules = _in_order([*modules, *compiler.compiled_experts(experts)], base)
    elif settings is not None and settings.target_parameters:
        problems.add(
            AdapterUnsupported,
            f"target_parameters = {shown(list(settings.target_parameters))} is refused: on this base, adapters change "
            "no parameters of experts.",
        )
    if settings is not None and ties_lora(settings, base):
        _check_tied_lora(contents, problems)
    problems.raise_if_any()
    extra_rows = None if split is None else joined_rows(split, beyond, modules, base, problems)
    problems.raise_if_any()
    modules = _with_rows(modules, rows, base)
    dtypes = {t.dtype for m in modules for t in (m.lora_a, m.lora_b, m.weight, m.token_rows) if t is not None}
    return AdapterIR(
        modules=tuple(modules),
        # bfloat16 and float16 hold different numbers; float32 holds both
        dtype=dtypes.pop() if len(dtypes) == 1 else "F32",
        saved_base={
            module: stored.saved_base
            for (_, module), stored in contents.linears.items()
            if stored.saved_base is not None
        },
        norms=norms_of(contents),
        extra_rows=extra_rows,
        invocation_token_ids=settings.invocation_token_ids if settings is not None else (),
        absent_targets=absent_targets(settings, contents, names) if settings is not None else (),
    )


class _Modules:
    """Compiler of the file's linears to the base's modules."""

    def __init__(
        self,
        settings: LoraSettings | None,
        contents: Contents,
        names: BaseTensorNames,
        limits: Limits,
        problems: Problems,
    ) -> None:
        self.settings = settings
        self.contents = contents
        self.names = names
        self.limits = limits
        self.problems = problems

    def compiled(self) -> Iterator[ModuleIR]:
        """Yield the modules in order of layer, then of the base's modules.

        Those with a problem may be left out.
        """
        settings, contents, linears = self.settings, self.contents, self.contents.linears
        whole_names = {place: self.names.of(place) for place in linears}
        numbers = _Numbers(settings, whole_names.values())
        has_lora = contents.experts or contents.wrappers or any(stored.has_lora for stored in linears.values())
        if not has_lora and not self.problems.by_message:
            self.problems.add(AdapterFormatError, "The file holds no lora_A and lora_B.")
        if settings is not None:
            self._check_invocation(settings)
        for place, stored in linears.items():
            linear, reported_layer = self.names.linears[place[1]], self.names.reported_layer(place)
            found: tuple[int, float] | None = (0, 1.0)
            if stored.has_lora:
                found = self._rank_and_scaling(linear, stored, whole_names[place], numbers, reported_layer)
            if found is not None and (stored.has_lora or stored.weight is not None or stored.bias is not None):
                yield from _split(place[0], linear, stored, *found)

    def compiled_experts(self, experts: ExpertTensors) -> Iterator[ModuleIR]:
        """Yield the modules of experts, and of what chooses them, in any order.

        Those with a problem may be left out.
        """
        linears = list(experts.linears())
        numbers = _Numbers(self.settings, {name for _, _, name, _ in linears})
        for (layer, _, expert), linear, name, stored in linears:
            found = self._rank_and_scaling(linear, stored, name, numbers, layer)
            if found is not None:
                yield from _split(layer, linear, stored, *found, expert=expert)

    def _rank_and_scaling(
        self, linear: BaseLinear, stored: LinearTensors, name: str, numbers: _Numbers, reported_layer: int | None
    ) -> tuple[int, float] | None:
        """Look up a LoRA's rank and scaling by the config; None and a problem where it has one."""
        settings = self.settings
        if not self._has_both(linear, stored, reported_layer):
            return None
        if settings is not None:
            self._check_magnitude(linear, stored.magnitude, settings, reported_layer)
            self._check_lora_bias(linear, stored.lora_bias, settings, reported_layer)
        assert stored.lora_a is not None and stored.lora_b is not None  # noqa: S101, PT018 (_has_both)
        if not self._fits(linear, stored.lora_a, stored.lora_b, reported_layer) or settings is None:
            return None
        rank = numbers.rank(settings, name)
        if not self._has_rank(linear, stored.lora_a.shape[0], rank, reported_layer):
            return None
        return rank, self._scaling(linear, settings, numbers.alpha(settings, name), rank, reported_layer)

    def _has_both(self, linear: BaseLinear, stored: LinearTensors, reported_layer: int | None) -> bool:
        missing = "lora_A" if stored.lora_a is None else "lora_B" if stored.lora_b is None else None
        if missing is not None:
            self.problems.add(
                AdapterFormatError, f"{linear.name} has {stored.first} and no {missing} {{layers}}.", reported_layer
            )
        return missing is None

    def _fits(self, linear: BaseLinear, a: TensorView, b: TensorView, reported_layer: int | None) -> bool:
        name, base = linear.name, self.names.base
        flat = [side for side, tensor in (("lora_A", a), ("lora_B", b)) if len(tensor.shape) != 2]
        for side in flat:
            self.problems.add(
                AdapterFormatError, f"{name}.{side} isn't a matrix {{layers}}; expected 2 dims.", reported_layer
            )
        if flat:
            return False
        if a.shape[1] != linear.in_features:
            what = "hidden size" if linear.in_features == base.hidden_size else f"{name}'s input size"
            message = (
                f"The adapter was trained for {what} {a.shape[1]} ({name}.lora_A is {shape_words(a)} {{layers}}); "
                f"this base has {linear.in_features}."
            )
            if name == "embed_tokens":
                message = vocabulary_problem(
                    "The table that embed_tokens' LoRA was trained on", a.shape[1], base.vocab_size
                )
            self.problems.add(AdapterBaseMismatch, message, reported_layer)
        if b.shape[0] != linear.out_features:
            message = (
                f"The adapter was trained for {name}'s output size {b.shape[0]} ({name}.lora_B is {shape_words(b)} "
                f"{{layers}}); this base has {linear.out_features}."
            )
            if name == "lm_head":
                message = vocabulary_problem("The head that lm_head's LoRA was trained on", b.shape[0], base.vocab_size)
            self.problems.add(AdapterBaseMismatch, message, reported_layer)
        if a.shape[0] != b.shape[1]:
            self.problems.add(
                AdapterFormatError,
                f"{name}.lora_A has rank {a.shape[0]} and {name}.lora_B has rank {b.shape[1]} {{layers}}; "
                "they must be equal.",
                reported_layer,
            )
        return (a.shape[1], b.shape[0], a.shape[0]) == (linear.in_features, linear.out_features, b.shape[1])

    def _has_rank(self, linear: BaseLinear, found: int, meant: int, reported_layer: int | None) -> bool:
        if found != meant:
            self.problems.add(
                AdapterFormatError,
                f"{linear.name} has rank {found} {{layers}}; the config says {meant} (r, rank_pattern).",
                reported_layer,
            )
        return found == meant

    def _scaling(
        self, linear: BaseLinear, settings: LoraSettings, alpha: float, rank: int, reported_layer: int | None
    ) -> float:
        scaling = settings.scaling(alpha, rank)
        if abs(scaling) > self.limits.max_scaling:
            self.problems.add(
                AdapterFormatError,
                f"{linear.name} has scaling {scaling:g} {{layers}} (alpha {alpha:g}, rank {rank}); "
                f"at most {self.limits.max_scaling:g} is allowed.",
                reported_layer,
            )
        return scaling

    def _check_magnitude(
        self, linear: BaseLinear, magnitude: TensorView | None, settings: LoraSettings, reported_layer: int | None
    ) -> None:
        self._check_vector(linear, "lora_magnitude_vector", magnitude, "use_dora", settings.use_dora, reported_layer)

    def _check_lora_bias(
        self, linear: BaseLinear, bias: TensorView | None, settings: LoraSettings, reported_layer: int | None
    ) -> None:
        if linear.name == "embed_tokens":
            if settings.lora_bias:
                message = "lora_bias is true, and the file has LoRA on embed_tokens; PEFT has no such adapters."
                self.problems.add(AdapterUnsupported, message)
            return
        self._check_vector(linear, "lora_B.bias", bias, "lora_bias", settings.lora_bias, reported_layer)

    def _check_vector(
        self,
        linear: BaseLinear,
        part: str,
        tensor: TensorView | None,
        flag: str,
        is_meant: bool,
        reported_layer: int | None,
    ) -> None:
        name = linear.name
        if tensor is None:
            if is_meant:
                self.problems.add(
                    AdapterFormatError, f"{flag} is true, and {name} has no {part} {{layers}}.", reported_layer
                )
        elif not is_meant:
            message = f"{name} has a {part} {{layers}}; the config's {flag} is false."
            self.problems.add(AdapterFormatError, message, reported_layer)
        elif tensor.shape != (linear.out_features,):
            self.problems.add(
                AdapterBaseMismatch,
                f"{name}.{part} is {shape_words(tensor)} {{layers}}; expected {linear.out_features} numbers "
                "for this base.",
                reported_layer,
            )

    def _check_invocation(self, settings: LoraSettings) -> None:
        """Check that aLoRA's tokens are the base's and that it acts on linears, as PEFT's does."""
        vocab = self.names.base.vocab_size
        beyond = [token_id for token_id in settings.invocation_token_ids if token_id >= vocab]
        if beyond:
            self.problems.add(
                AdapterBaseMismatch,
                f"alora_invocation_tokens has token {beyond[0]:,}; this base has {vocab:,} tokens (0 to "
                f"{vocab - 1:,}).",
            )
        embedding = self.contents.linears.get((0, "embed_tokens"), LinearTensors())
        if settings.invocation_token_ids and embedding.has_lora:
            self.problems.add(
                AdapterUnsupported,
                "alora_invocation_tokens is refused with LoRA on embed_tokens: PEFT's aLoRA acts on linears only.",
            )


class _Numbers:
    """Ranks and alphas of linears by a config's patterns; the first that matches counts."""

    def __init__(self, settings: LoraSettings | None, names: Iterable[str]) -> None:
        names = list(names)
        self._ranks = first_matches([p for p, _ in settings.rank_pattern], names) if settings else {}
        self._alphas = first_matches([p for p, _ in settings.alpha_pattern], names) if settings else {}

    def rank(self, settings: LoraSettings, name: str) -> int:
        return settings.rank_pattern[self._ranks[name]][1] if name in self._ranks else settings.r

    def alpha(self, settings: LoraSettings, name: str) -> float:
        return settings.alpha_pattern[self._alphas[name]][1] if name in self._alphas else settings.lora_alpha


def _split(
    layer: int, linear: BaseLinear, stored: LinearTensors, rank: int, scaling: float, expert: int = 0
) -> Iterator[ModuleIR]:
    """Yield the linear's parts, each with its rows of the linear's output.

    All of them share lora_A.
    """
    bias = stored.bias if stored.base_bias is None else stored.base_bias
    for module, part in linear.parts.items():
        rows = None if len(linear.parts) == 1 else part
        yield ModuleIR(
            layer,
            module,
            rank,
            scaling,
            lora_a=stored.lora_a,
            lora_b=slice_rows(stored.lora_b, rows),
            magnitude=slice_rows(stored.magnitude, rows),
            lora_bias=slice_rows(stored.lora_bias, rows),
            bias=slice_rows(bias, rows),
            weight=slice_rows(stored.weight, rows),
            expert=expert,
        )


def _with_rows(modules: list[ModuleIR], rows: Mapping[str, TokenRows], base: BaseSpec) -> list[ModuleIR]:
    """Add trained tokens to the modules, and modules for those that have nothing else."""
    if not rows:
        return modules
    by_place = {m.place: m for m in modules}
    for module, trained in rows.items():
        found = by_place.get((0, module, 0), ModuleIR(0, module))
        by_place[0, module, 0] = replace(found, token_ids=trained.ids, token_rows=trained.rows)
    return _in_order(by_place.values(), base)


def _in_order(modules: Iterable[ModuleIR], base: BaseSpec) -> list[ModuleIR]:
    """Sort the modules by layer, then in the order of the base's modules, then by expert."""
    order = {module: index for index, module in enumerate(base.module_shapes)}
    return sorted(modules, key=lambda m: (m.layer, order[m.module], m.expert))


def _check_tied_lora(contents: Contents, problems: Problems) -> None:
    """Check a tied head's LoRA.

    With ensure_weight_tying PEFT gives the head the embedding's, whatever a file has.
    """
    head, embedding = (contents.linears.get((0, module), LinearTensors()) for module in OUTSIDE_LAYERS)
    is_one = _is_transposed(head.lora_a, embedding.lora_b) and _is_transposed(head.lora_b, embedding.lora_a)
    if head.has_lora and embedding.has_lora and not is_one:
        problems.add(
            AdapterUnsupported,
            "ensure_weight_tying is true, and lm_head's lora_A and lora_B aren't the embedding's, "
            "transposed: PEFT would keep "
            "only one pair. Save the adapter from the tied model, or with ensure_weight_tying=False.",
        )


def _is_transposed(a: TensorView | None, b: TensorView | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a.array, b.array.T)
