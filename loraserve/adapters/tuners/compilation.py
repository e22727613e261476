"""Common part of compiling PEFT's kinds other than LoRA.

It finds tensors by linear, reads the config, and collects all problems.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraserve.adapters.config.patterns import first_matches
from loraserve.adapters.config.peft_config import LoraSettings, read_settings
from loraserve.adapters.config.peft_fields import FieldRule
from loraserve.adapters.format.tensor_names import PREFIX, BaseLinear, BaseTensorNames, Place
from loraserve.adapters.ir import AdapterIR, ModuleIR, TensorView
from loraserve.adapters.problems import Problems
from loraserve.adapters.strict_json import shown
from loraserve.adapters.target_modules import is_name_targeted
from loraserve.adapters.tuners.auxiliary import AuxiliaryTensors, is_auxiliary
from loraserve.adapters.tuners.factors import Factors, as_view, num_bytes
from loraserve.adapters.tuners.fields import number, refusals
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterRejected, AdapterUnsupported
from loraserve.limits import Limits
from loraserve.types import BaseSpec

_AS_IN_LORA = (
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
)
_MAX_R = 1 << 24
"""Limit on a rank that isn't served: LoKr's means, beyond some number, only that there are no
factors.
"""


@dataclass(frozen=True, slots=True)
class FoldedModule:
    """Update of a linear whose factors are still to be computed.

    Attributes:
        make: computes the factors.
    """

    place: Place
    scaling: float
    make: Callable[[], Factors]


@dataclass(frozen=True, slots=True)
class FoldedAdapter:
    """Adapter without problems, of which the factors are still to be computed.

    Attributes:
        num_bytes: bytes of all factors, in float32.
        unfold: computes them.
    """

    num_bytes: int
    unfold: Callable[[], AdapterIR]


class Compilation:
    """Adapter on its way to an `AdapterIR`; problems are collected until `finish`.

    Attributes:
        settings: targets, ranks and alphas; None where the config is malformed.
        places: linear of the base's checkpoint → the kind's name for a tensor (``hada_w1_a``) → the
            tensor; in order of layer, then of the base's linears.
        shared: tensors of the whole adapter, by their names.
        auxiliary: tensors that were trained along with the kind's own.
    """

    def __init__(
        self,
        kind: str,
        table: Mapping[str, FieldRule],
        parts: Sequence[str],
        config: Mapping[str, Any],
        tensors: Mapping[str, TensorView],
        base: BaseSpec,
        limits: Limits,
        *,
        rank: str | None = "r",
        alpha: str | None = "alpha",
        shared: Sequence[str] = (),
    ) -> None:
        """Take the config's names for what LoRA calls r and lora_alpha, `rank` and `alpha`.

        They are None where the kind has none.
        """
        self.kind = kind
        self.config = config
        self.base = base
        self.names = BaseTensorNames(base)
        self.limits = limits
        self._problems = Problems()
        self._bytes = 0
        for message in refusals(config, table):
            self.unsupported(message)
        self.settings = self._read_settings(table, rank, alpha)
        self.shared = {name: tensors[name] for name in shared if name in tensors}
        own = {name: tensor for name, tensor in tensors.items() if name not in self.shared and not is_auxiliary(name)}
        self.places = self._group_tensors(parts, own)
        self.auxiliary = AuxiliaryTensors(tensors, self.places, self.names, self._problems)
        if self.settings is not None:
            self._check_targets(self.settings)
            self.auxiliary.check(self.settings)
        self._ranks, self._alphas = self._match_patterns()

    def linear(self, place: Place) -> BaseLinear:
        return self.names.linears[place[1]]

    def malformed(self, message: str, place: Place | None = None) -> None:
        """Add a problem: the files contradict themselves.

        ``{layers}`` in a message becomes the layers of all places that it is about.
        """
        self._add(AdapterFormatError, message, place)

    def unsupported(self, message: str, place: Place | None = None) -> None:
        self._add(AdapterUnsupported, message, place)

    def mismatch(self, message: str, place: Place | None = None) -> None:
        """Add a problem: the adapter is of another base."""
        self._add(AdapterBaseMismatch, message, place)

    def _add(self, kind: type[AdapterRejected], message: str, place: Place | None) -> None:
        self._problems.add(kind, message, None if place is None else self.names.reported_layer(place))

    def rank(self, place: Place) -> int:
        """Look up the rank by r and rank_pattern, as PEFT reads them.

        It is 1 where the config is malformed.
        """
        if self.settings is None:
            return 1
        name = self.names.of(place)
        return self.settings.rank_pattern[self._ranks[name]][1] if name in self._ranks else self.settings.r

    def scaling(self, place: Place) -> float:
        """Compute alpha / rank by the config; add a problem if it is over the limit."""
        if self.settings is None:
            return 1.0
        name = self.names.of(place)
        alpha = self.settings.lora_alpha
        if name in self._alphas:
            alpha = self.settings.alpha_pattern[self._alphas[name]][1]
        scaling = alpha / self.rank(place)
        if abs(scaling) > self.limits.max_scaling:
            self.malformed(
                f"{place[1]} has scaling {scaling:g} {{layers}} (alpha {alpha:g}, rank {self.rank(place)}); at most "
                f"{self.limits.max_scaling:g} is allowed.",
                place,
            )
        return scaling

    def has_all(self, place: Place, parts: Sequence[str]) -> bool:
        """Check whether the file holds all of these of the module.

        A problem names those missing.
        """
        missing = [part for part in parts if part not in self.places[place]]
        if missing:
            there = ", ".join(self.places[place]) or "nothing"
            self.malformed(f"{place[1]} has {there} and no {', '.join(missing)} {{layers}}.", place)
        return not missing

    def has_shape(self, place: Place, part: str, shape: tuple[int, ...], because: str) -> bool:
        """Check whether the tensor has the shape that the base and the config give it.

        Add a problem if not, with `because`.
        """
        found = self.places[place][part].shape
        if found != shape:
            self.mismatch(
                f"{place[1]}.{part} is {_sizes(found)} {{layers}}; expected {_sizes(shape)} on this base ({because}).",
                place,
            )
        return found == shape

    def has_rank(self, place: Place, part: str, axis: int) -> bool:
        """Check whether that axis of the tensor is as long as the config's rank.

        Add a problem if not.
        """
        shape, rank = self.places[place][part].shape, self.rank(place)
        found = shape[axis] if len(shape) == 2 else 0
        if found != rank and self.settings is not None:
            self.malformed(
                f"{place[1]}.{part} is {_sizes(shape)} {{layers}}; the config gives it rank {rank} (r, rank_pattern).",
                place,
            )
        return found == rank and self.settings is not None

    def has_room(self, place: Place, rank: int, how: str) -> bool:
        """Check whether factors of that rank may be made.

        `how` explains the rank in the refusal.
        """
        if rank > self.limits.max_rank:
            self.unsupported(
                f"{place[1]} would be served as LoRA of rank {rank:,} {{layers}} ({how}); "
                f"at most {self.limits.max_rank} is allowed.",
                place,
            )
            return False
        linear = self.linear(place)
        self._bytes += num_bytes(rank, (linear.out_features, linear.in_features))
        return self._bytes <= self.limits.max_factors_bytes

    def finish(self, modules: Sequence[ModuleIR]) -> AdapterIR:
        """Join the modules into an adapter if there were no problems.

        Raises:
            AdapterFormatError, AdapterUnsupported, AdapterBaseMismatch: as `compile_adapter`.
        """
        self._raise_if_any()
        return self._join(modules)

    def finish_folded(self, modules: Sequence[FoldedModule | None]) -> FoldedAdapter:
        """Defer the adapter's factors if there were no problems: none is computed yet.

        Args:
            modules: None for each that has a problem.

        Raises:
            AdapterFormatError, AdapterUnsupported, AdapterBaseMismatch: as `compile_adapter`.
        """
        self._raise_if_any()
        folded = [module for module in modules if module is not None]
        return FoldedAdapter(
            self._bytes, lambda: self._join([module for one in folded for module in self._unfold(one)])
        )

    def _unfold(self, folded: FoldedModule) -> list[ModuleIR]:
        """Split the update of a linear into updates of the base's modules in it.

        Each has its rows of B, and all of A.
        """
        b, a = folded.make()
        lora_a = as_view(a)
        return [
            ModuleIR(folded.place[0], module, a.shape[0], folded.scaling, lora_a, as_view(b[rows]))
            for module, rows in self.linear(folded.place).parts.items()
        ]

    def _raise_if_any(self) -> None:
        if self._bytes > self.limits.max_factors_bytes:
            self.unsupported(
                f"The adapter would take {self._bytes:,} bytes as LoRA in float32; "
                f"at most {self.limits.max_factors_bytes:,} are "
                "allowed. Train it with a smaller r, or on fewer modules."
            )
        if not self.places and not self._problems.by_message:
            self.malformed(f"The file holds no tensors of {self.kind}.")
        self._problems.raise_if_any()

    def _join(self, modules: Sequence[ModuleIR]) -> AdapterIR:
        """Join these modules with what was trained along with them."""
        modules = self.auxiliary.join(modules)
        dtypes = {t.dtype for m in modules for t in (m.lora_a, m.lora_b, m.weight) if t is not None}
        return AdapterIR(
            modules=tuple(modules),
            dtype=dtypes.pop() if len(dtypes) == 1 else "F32",
            saved_base=self.auxiliary.saved_base,
            norms=self.auxiliary.norms,
            kind=self.kind,
        )

    def _read_settings(
        self, table: Mapping[str, FieldRule], rank: str | None, alpha: str | None
    ) -> LoraSettings | None:
        """Read the kind's config as LoRA's of the same targets."""
        names = [name for name in _AS_IN_LORA if name in table and name in self.config]
        bias = self.config.get("bias", "none") if "bias" in table else "none"
        as_lora = {
            "peft_type": "LORA",
            "r": number(self.kind, self.config, rank) if rank else 1,
            "lora_alpha": number(self.kind, self.config, alpha) if alpha else 1,
            "bias": "lora_only" if bias == f"{self.kind.lower()}_only" else bias,
            **{name: self.config[name] for name in names},
        }
        settings, problems = read_settings(as_lora, dataclasses.replace(self.limits, max_rank=_MAX_R))
        for problem in problems:
            message = problem.message.replace("lora_alpha", alpha or "lora_alpha")
            (self.unsupported if problem.is_unsupported else self.malformed)(message)
        return settings

    def _match_patterns(self) -> tuple[dict[str, int], dict[str, int]]:
        if self.settings is None:
            return {}, {}
        names = [self.names.of(place) for place in self.places]
        return (
            first_matches([p for p, _ in self.settings.rank_pattern], names),
            first_matches([p for p, _ in self.settings.alpha_pattern], names),
        )

    def _group_tensors(
        self, parts: Sequence[str], tensors: Mapping[str, TensorView]
    ) -> dict[Place, dict[str, TensorView]]:
        places: dict[Place, dict[str, TensorView]] = {}
        for name, tensor in tensors.items():
            path, _, part = name.rpartition(".")
            if part not in parts or not path.startswith(PREFIX):
                self._explain(name, parts)
                continue
            place = self._find(name, path.removeprefix(PREFIX))
            if place is not None:
                places.setdefault(place, {})[part] = tensor
        order = {name: index for index, name in enumerate(self.names.linears)}
        return dict(sorted(places.items(), key=lambda item: (item[0][0], order[item[0][1]])))

    def _find(self, name: str, path: str) -> Place | None:
        """Find the place of that path's linear; None and a problem if it has none.

        The base has none there, or PEFT's kind acts on no such.
        """
        layer, inner = self.names.find(path)
        linear = self.names.linear(layer, inner)
        if linear is not None and linear.name != "embed_tokens":
            if layer is None or layer < self.base.num_layers:
                return layer or 0, linear.name
            count = self.base.num_layers
            self.mismatch(
                f"The adapter has tensors {{layers}}; this base has {count} layers (0 to {count - 1}).",
                (layer, linear.name),
            )
        elif layer is None:
            self.mismatch(
                f"{shown(name, 200)} is for {shown(path, 120)}; adapters of kind {self.kind} may change "
                f"{self.base.layers_path}.<layer>.<module> and lm_head."
            )
        else:
            self.mismatch(
                f"The adapter has tensors for {shown(inner, 120)} {{layers}}; "
                f"this base has {self.names.listed(False)}.",
                (layer, ""),
            )
        return None

    def _explain(self, name: str, parts: Sequence[str]) -> None:
        text = shown(name, 200)
        if any(f".{part}." in name for part in parts):
            self.malformed(
                f"{text} has the adapter's name in its key, as in a running model. "
                "Save with PEFT's save_pretrained, which removes it."
            )
        elif name.rpartition(".")[2] in parts:
            self.malformed(f"{text} doesn't begin with \"{PREFIX}\", as PEFT's save_pretrained writes it.")
        else:
            self.unsupported(
                f"{text} isn't one of the tensors of {self.kind}, which are {', '.join(parts)}; only these are served."
            )

    def _check_targets(self, settings: LoraSettings) -> None:
        """Add a problem for each linear whose tensors and targeting disagree.

        It is targeted and has no tensors, or has tensors and isn't targeted.
        """
        for place in self.names.places():
            linear = self.linear(place)
            if linear.name == "embed_tokens":
                continue
            layer = None if linear.is_outside else place[0]
            is_meant = is_name_targeted(settings, self.base, self.names.of(place), layer)
            if is_meant and place not in self.places:
                self.malformed(
                    f"The config targets {place[1]} {{layers}}, and the file holds no tensors for it.", place
                )
            elif place in self.places and not is_meant:
                self.malformed(
                    f"The file holds tensors for {place[1]} {{layers}}, which the config doesn't target.", place
                )


def _sizes(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "a number"
