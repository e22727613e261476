"""Formats that a float base can be served in: their bytes, and what they cost a trained base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from loraserve.base_advice import is_low
from loraserve.config import AUTO_DTYPES, EngineConfig
from loraserve.planning.base import BasePlan, plan_base

MEASURED_ON = "SmolLM2-135M-Instruct"
"""Base whose losses are shown; `make bench ARGS='quality --model DIR'` measures another's."""
_FLOAT, _CALIBRATED = "int8, float activations", "int4, calibrated"
_CALIBRATE = "loraserve quantize DIR --out DIR"
_MORE_IF_CALIBRATED = 5 / 4.75
"""Bytes of the layers' weights at most, where keys and values are kept in int8."""
_LOSSES = {
    "float32": (0.0, 1.0),
    "bfloat16": (0.0009, 0.966),
    "int8": (0.0062, 0.939),
    _FLOAT: (0.0048, 0.953),
    "fp8": (0.035, 0.870),
    "nf4": (0.304, 0.653),
    "int4": (0.306, 0.661),
    _CALIBRATED: (0.051, 0.855),
}
"""Mean divergence from float32 in nats, and part of positions with the same likeliest token: over
4,096 tokens of English prose, docs/benchmarks.md.
"""


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """A base in one of the formats that it can be served in.

    Attributes:
        name: of the format, and of its activations where they can be chosen.
        flags: of `serve`; or the command that makes a checkpoint of this format.
        num_bytes: resident.
        token_bytes: of the weights that are read for a token of one request.
        divergence, agreement: measured on `MEASURED_ON`: nats of divergence from float32, and part
            of positions with the same likeliest token.
        is_planned: it's the format of this plan.
        is_recommended: it reads least of those that keep a base's answers.
    """

    name: str
    flags: str
    num_bytes: int
    token_bytes: int
    divergence: float
    agreement: float
    is_planned: bool = False
    is_recommended: bool = False


def plan_formats(config: EngineConfig, base: BasePlan) -> tuple[FormatPlan, ...]:
    """Plan the formats of a base, largest first; none where its checkpoint is rounded already."""
    if base.config.quantization is not None:
        return ()
    planned = _name_of(config, base)
    found = [_plan(name, settings, config, base, planned) for name, settings in _settings(base.device).items()]
    kept = [one for one in found if not is_low(one.agreement, one.divergence)]
    # of two that read as much the first, which multiplies faster
    best = min(kept, key=lambda one: one.token_bytes)
    marked = [replace(one, is_recommended=one is best) for one in found]
    return tuple(sorted(marked, key=lambda one: -one.num_bytes))


def _settings(device: str) -> dict[str, tuple[str, str, str]]:
    """List what is to be set for each format: dtype, quantization, and activations."""
    formats = {
        "float32": ("float32", "none", "auto"),
        "bfloat16": ("bfloat16", "none", "auto"),
        "int8": ("auto", "int8", "auto"),
        _FLOAT: ("auto", "int8", "float"),
        "fp8": ("auto", "fp8", "auto"),
        "nf4": ("auto", "nf4", "auto"),
        "int4": ("auto", "int4", "auto"),
        _CALIBRATED: ("auto", "int4", "auto"),
    }
    if device == "cuda":
        # activations aren't rounded there
        del formats["float32"], formats["int8"]
    return formats


def _name_of(config: EngineConfig, base: BasePlan) -> str:
    """Name the format that is planned."""
    if config.quantize == "none":
        return base.dtype
    is_float = base.device == "cuda" or config.activation_dtype == "float"
    return _FLOAT if config.quantize == "int8" and is_float else config.quantize


def _plan(name: str, settings: tuple[str, str, str], config: EngineConfig, base: BasePlan, planned: str) -> FormatPlan:
    dtype, quantize, activations = settings
    changed = msgspec.structs.replace(config, dtype=dtype, quantize=quantize, activation_dtype=activations)
    found = plan_base(changed, base.device)
    flags = [] if quantize == "none" else [f"--quantize {quantize}"]
    flags += [] if dtype in ("auto", AUTO_DTYPES[base.device]) else [f"--dtype {dtype}"]
    flags += [] if activations == "auto" or base.device == "cuda" else [f"--activation-dtype {activations}"]
    divergence, agreement = _LOSSES[name]
    more = _MORE_IF_CALIBRATED if name == _CALIBRATED else 1.0
    extra_bytes, extra_token_bytes = (
        round((more - 1) * count(found, ("linears", "experts"))) for count in (_bytes_of, token_bytes)
    )
    return FormatPlan(
        name,
        _CALIBRATE if name == _CALIBRATED else " ".join(flags),
        found.num_bytes + extra_bytes,
        token_bytes(found) + extra_token_bytes,
        divergence,
        agreement,
        is_planned=name == planned,
    )


def _bytes_of(base: BasePlan, names: Sequence[str]) -> float:
    return sum(part.num_bytes for part in base.parts if part.name in names)


def token_bytes(base: BasePlan, names: Sequence[str] = ("linears", "experts", "routers", "head", "norms")) -> int:
    """Compute the bytes of the weights that are read for a token: of experts, the chosen ones'."""
    experts = base.config.experts
    chosen = 1.0 if experts is None else experts.share_of_token
    return int(
        sum(part.num_bytes * (chosen if part.name == "experts" else 1) for part in base.parts if part.name in names)
    )
