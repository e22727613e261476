"""A weighted sum of adapters as one adapter: ``base + Σ weight · (adapter − base)``.

Updates add up: the sum's ranks are those of its parts, one after the other, each rank with its own
scaling. Biases' differences from the base's add up too. What multiplies the base's output, stands
in the place of what is the base's, or acts on some tokens alone does not: it's refused by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS
from loraserve.memory.loading.base_weights import module_label
from loraserve.memory.loading.lowering import LoweredAdapter
from loraserve.types import AdapterPart
from loraserve_kernels.common.modules import COLUMNS, EXPERT_MODULES, LoraModule

Place = tuple[int, str, int]
"""Layer, module and expert."""


class Composer:
    """A sum of adapters; a term that can't be added is refused before the next is read."""

    def __init__(self) -> None:
        self._terms: list[tuple[LoweredAdapter, float]] = []
        self._ranks: Counter[Place] = Counter()

    def add(self, part: AdapterPart, lowered: LoweredAdapter) -> None:
        """Add a term to the sum.

        Raises:
            InvalidRequest: it doesn't add up, or the sum has too many ranks. The message names the
                part by its digest: another tenant may have the same sum under other names, and see
                it.
        """
        what = _what_does_not_add_up(lowered)
        name = f"The adapter of digest {part.adapter.digest[:12]}…"
        if what is not None:
            raise InvalidRequest(
                f"{name} can't be part of a sum of adapters: it has {what}, "
                f"which can't be added to another adapter's update.",
                param="model",
                hint="Compose adapters of LoRA without DoRA, LoHa, LoKr, VeRA or AdaLoRA.",
            )
        for m in lowered.modules:
            self._ranks[m.place] += m.lora_a.shape[0]
            if self._ranks[m.place] > LIMITS.max_rank:
                raise InvalidRequest(
                    f"The adapters' ranks add up to {self._ranks[m.place]} or more on {module_label(m)}; "
                    f"at most {LIMITS.max_rank} are served.",
                    param="model",
                    hint="Compose fewer adapters, or adapters of lower ranks.",
                )
            largest = part.weight * float(torch.as_tensor(m.scaling).abs().max()) if m.lora_a.shape[0] else 0.0
            if not math.isfinite(part.weight) or abs(largest) > LIMITS.max_scaling:
                raise InvalidRequest(
                    f"{name}: a weight of {part.weight:g} makes its scaling {largest:g} on {module_label(m)}; "
                    f"at most {LIMITS.max_scaling:g} is allowed.",
                    param="model",
                )
        self._terms.append((lowered, part.weight))

    @property
    def num_bytes(self) -> int:
        """Bytes of the sum's matrices, at most."""
        return sum(4 * (m.lora_a.numel() + m.lora_b.numel()) for lowered, _ in self._terms for m in lowered.modules)

    def compose(self) -> LoweredAdapter:
        """Compute the sum; its matrices are copies.

        They're of the terms' common dtype, or float32 where that differs.
        """
        dtypes = {lowered.stored for lowered, _ in self._terms}
        stored = dtypes.pop() if len(dtypes) == 1 else torch.float32
        by_place: dict[Place, list[tuple[LoraModule, float]]] = {}
        for lowered, weight in self._terms:
            for m in lowered.modules:
                by_place.setdefault(m.place, []).append((m, weight))
        order = {module: index for index, module in enumerate((*COLUMNS, *EXPERT_MODULES))}
        places = sorted(by_place, key=lambda place: (place[0], order[place[1]], place[2]))
        modules = tuple(_sum(by_place[place], stored) for place in places)
        return LoweredAdapter(modules, (), stored, {})


def _what_does_not_add_up(lowered: LoweredAdapter) -> str | None:
    if lowered.invocation_token_ids:
        return "an invocation (aLoRA)"
    if lowered.head is not None:
        return "a classification head (score)"
    if lowered.extra_rows is not None:
        return f"rows of embedding and head beyond the base's ({lowered.extra_rows.num_rows})"
    if lowered.norms:
        return f"a trained norm ({lowered.norms[0].norm})"
    for m in lowered.modules:
        if m.place in lowered.magnitudes:
            return f"magnitudes (DoRA) on {module_label(m)}"
        if m.dora_delta is not None:
            return f"a factor of its own (IA3) on {module_label(m)}"
        if m.row_overrides is not None:
            return f"a trained weight of {module_label(m)} itself"
    return None


def _sum(terms: Sequence[tuple[LoraModule, float]], stored: torch.dtype) -> LoraModule:
    first = terms[0][0]
    return LoraModule(
        first.layer,
        first.module,
        torch.cat([m.lora_a.to(stored) for m, _ in terms]),
        torch.cat([m.lora_b.to(stored) for m, _ in terms], 1),
        torch.cat([weight * _scalings(m) for m, weight in terms]),
        bias_delta=_sum_shifts((m.bias_delta, weight) for m, weight in terms),
        expert=first.expert,
    )


def _scalings(m: LoraModule) -> Tensor:
    return m.scaling if isinstance(m.scaling, Tensor) else torch.full((m.lora_a.shape[0],), m.scaling)


def _sum_shifts(terms: Iterable[tuple[Tensor | None, float]]) -> Tensor | None:
    shifts = [weight * shift for shift, weight in terms if shift is not None]
    return torch.stack(shifts).sum(0) if shifts else None
