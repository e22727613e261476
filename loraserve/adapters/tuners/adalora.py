"""AdaLoRA: ΔW = alpha / init_r · B (E ⊙ A), whose ranks training has cut down module by module.

It is LoRA with E multiplied into A.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from loraserve.adapters.config.peft_fields import FIELDS as LORA
from loraserve.adapters.config.peft_fields import FieldRule
from loraserve.adapters.format.tensor_names import module_name
from loraserve.adapters.ir import AdapterIR, TensorView
from loraserve.adapters.strict_json import shown
from loraserve.adapters.tuners.factors import as_float32, as_view
from loraserve.adapters.tuners.fields import ignored, implemented, number, refusals, refused
from loraserve.adapters.tuners.lora import compile_lora
from loraserve.errors import AdapterFormatError, AdapterRejected, AdapterUnsupported
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec

_SCHEDULE = ignored("it says how training cut the ranks down")
_NOT_READ = ignored("PEFT's AdaLoRA doesn't read it")

FIELDS: dict[str, FieldRule] = {
    **LORA,
    "peft_type": implemented("AdaLoRA: it says which tensors to expect"),
    "init_r": implemented("scaling = lora_alpha / (init_r + 1e-5); the rank of modules that rank_pattern doesn't name"),
    "lora_alpha": implemented(
        "scaling = lora_alpha / (init_r + 1e-5); a module's rank stands for it where it isn't positive"
    ),
    "rank_pattern": implemented("which ranks of a module are left; it must agree with the tensors"),
    "target_r": _SCHEDULE,
    "tinit": _SCHEDULE,
    "tfinal": _SCHEDULE,
    "deltaT": _SCHEDULE,
    "beta1": _SCHEDULE,
    "beta2": _SCHEDULE,
    "orth_reg_weight": _SCHEDULE,
    "total_step": _SCHEDULE,
    "r": _NOT_READ,
    "alpha_pattern": _NOT_READ,
    "use_rslora": _NOT_READ,
    "lora_bias": _NOT_READ,
    "init_lora_weights": ignored("AdaLoRA only checks whether it is set; every value starts from the same weights"),
    "loftq_config": refused("PEFT's AdaLoRA takes none", {}),
    "use_dora": refused("PEFT has no AdaLoRA with magnitudes"),
    "alora_invocation_tokens": refused("PEFT has no activated AdaLoRA"),
    "ensure_weight_tying": refused("it isn't served with AdaLoRA"),
}
"""Fields of peft.AdaLoraConfig (0.21), most of which are LoraConfig's; a test compares the two."""

_KEY = re.compile(r"(?P<path>base_model\.model\..+)\.lora_(?P<side>[ABE])")


def compile_adalora(
    config: Mapping[str, Any], tensors: Mapping[str, TensorView], base: BaseSpec, limits: Limits = LIMITS
) -> AdapterIR:
    """Compile the adapter into the base's terms.

    It is what `compile_lora` makes of the LoRA with E ⊙ A, computed in float32, for A. Modules of
    which training has left no rank aren't in it.

    Raises:
        AdapterRejected: as `compile_adapter`.
    """
    malformed: list[str] = []
    unsupported = refusals(config, FIELDS)
    init_r, alpha = _numbers(config, limits, malformed)
    kept = _kept_ranks(config, malformed)
    as_lora, ranks = _unfold(tensors, limits, malformed)
    for path, rank in ranks.items():
        meant = kept.get(path, init_r)
        if rank != meant:
            malformed.append(f"{path} has rank {rank}; the config says {meant} (init_r, rank_pattern).")
    malformed += [f"rank_pattern names {path}, which has no tensors." for path in kept if path not in ranks]
    if ranks and not any(ranks.values()):
        malformed.append("Every module has rank 0 after training: the adapter changes nothing.")
    lora_config = {name: value for name, value in config.items() if name in LORA and FIELDS[name] == LORA[name]}
    lora_config |= {
        "peft_type": "LORA",
        "r": init_r,
        "lora_alpha": 1,
        "rank_pattern": {f"^{path}": max(rank, 1) for path, rank in ranks.items() if rank != init_r},
    }
    try:
        ir = compile_lora(lora_config, as_lora, base, limits)
    except AdapterRejected as error:
        # what the config lacks explains more than what its LoRA would lack
        _raise(malformed, unsupported, list(error.problems), type(error))
        raise
    _raise(malformed, unsupported, [], AdapterFormatError)
    if ir.extra_rows is not None:
        # those of the head would hold its LoRA with another scaling
        raise AdapterUnsupported(
            f"The embedding and the head have {ir.extra_rows.num_rows:,} rows beyond the base's, which are served with "
            "LoRA alone.",
            hint="Train it with LoRA, or without resize_token_embeddings.",
        )
    modules = []
    for m in ir.modules:
        if m.module not in base.modules:
            raise AdapterUnsupported(
                f"The adapter has AdaLoRA on a mixture's {m.module}, which isn't served: on experts, LoRA is."
            )
        left = ranks.get(module_name(base, m.layer, m.module))
        if left is None:
            modules.append(m)
        elif left:
            modules.append(dataclasses.replace(m, scaling=(alpha if alpha > 0 else left) / (init_r + 1e-5)))
    return dataclasses.replace(ir, modules=tuple(modules), kind="ADALORA")


def _raise(malformed: list[str], unsupported: list[str], others: list[str], kind: type[AdapterRejected]) -> None:
    """Raise what is wrong with the config and the tensors, with `others` behind it.

    Return if nothing is.
    """
    own = [*malformed, *unsupported]
    if not own:
        return
    problems = [*own, *others]
    raised: type[AdapterRejected] = (
        AdapterFormatError if malformed or kind is AdapterFormatError else AdapterUnsupported
    )
    summary = problems[0] if len(problems) == 1 else f"{len(problems)} problems: {' '.join(problems[:3])}"
    raise raised(f"The adapter can't be served: {summary}", problems=problems)


def _numbers(config: Mapping[str, Any], limits: Limits, malformed: list[str]) -> tuple[int, float]:
    init_r, alpha = (number("ADALORA", config, name) for name in ("init_r", "lora_alpha"))
    if type(init_r) is not int or not 1 <= init_r <= limits.max_rank:
        malformed.append(f"init_r is {shown(init_r)}; expected a whole number from 1 to {limits.max_rank}.")
        init_r = 1
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or abs(alpha) > limits.max_scaling * init_r:
        malformed.append(
            f"lora_alpha is {shown(alpha)}; expected a number that gives a scaling of at most {limits.max_scaling:g}."
        )
        alpha = 1.0
    return init_r, float(alpha)


def _kept_ranks(config: Mapping[str, Any], malformed: list[str]) -> dict[str, int]:
    """Module's name in the base → how many of its ranks rank_pattern keeps."""
    pattern = config.get("rank_pattern")
    if pattern is None:
        return {}
    if not isinstance(pattern, dict):
        malformed.append(
            f"rank_pattern is {shown(pattern)}; expected an object of module name → list of true and false."
        )
        return {}
    kept: dict[str, int] = {}
    for name, flags in pattern.items():
        path, _, last = name.rpartition(".")
        if last != "lora_E" or not isinstance(flags, list) or not all(isinstance(flag, bool) for flag in flags):
            malformed.append(
                f"rank_pattern[{shown(name)}] is invalid; expected a list of true and false for a module's lora_E."
            )
            continue
        kept[path] = sum(flags)
    return kept


def _unfold(
    tensors: Mapping[str, TensorView], limits: Limits, malformed: list[str]
) -> tuple[dict[str, TensorView], dict[str, int]]:
    """Unfold the tensors into those of LoRA, with the rank of each module by name.

    E is multiplied into A; the names are the base's. A module without a rank gets one of zeros: its
    tensors are there, as the config says. They take bytes that the file doesn't, so they are
    counted before they are made.
    """
    num_bytes = 0
    parts: dict[str, dict[str, TensorView]] = {}
    as_lora: dict[str, TensorView] = {}
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is not None:
            parts.setdefault(match["path"], {})[match["side"]] = tensor
        elif ".lora_" in name:
            malformed.append(
                f"{shown(name, 200)} isn't one of the tensors of AdaLoRA, which are lora_A, lora_B and lora_E."
            )
        else:
            as_lora[name] = tensor
    ranks: dict[str, int] = {}
    for path, sides in parts.items():
        name = path.removeprefix("base_model.model.")
        missing = [f"lora_{side}" for side in "ABE" if side not in sides]
        if missing:
            malformed.append(f"{name} has no {' and no '.join(missing)}.")
            continue
        a, b, e = (sides[side] for side in "ABE")
        rank = e.shape[0] if e.shape else 0
        if e.shape != (rank, 1) or len(a.shape) != 2 or a.shape[0] != rank or len(b.shape) != 2 or b.shape[1] != rank:
            found = ", ".join(f"lora_{side} {'×'.join(map(str, sides[side].shape))}" for side in "ABE")
            malformed.append(f"{name} has {found}; expected the same rank in all three, and one column in lora_E.")
            continue
        ranks[name] = rank
        num_bytes += 4 * (rank * a.shape[1] if rank else a.shape[1] + b.shape[0])
        if num_bytes > limits.max_factors_bytes:
            malformed.append(
                f"The adapter, up to {name}, takes more than {limits.max_factors_bytes:,} bytes as LoRA in "
                "float32, the limit."
            )
            break
        with np.errstate(over="ignore", invalid="ignore"):
            weighted = as_float32(a) * as_float32(e)
        as_lora[f"{path}.lora_A.weight"] = as_view(weighted if rank else np.zeros((1, a.shape[1])))
        as_lora[f"{path}.lora_B.weight"] = b if rank else as_view(np.zeros((b.shape[0], 1)))
    return as_lora, ranks
