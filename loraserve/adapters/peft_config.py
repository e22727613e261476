"""What becomes of each field of PEFT's LoraConfig. An allow-list: what isn't in the table is refused, unless it says nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from loraserve.adapters.patterns import Pattern, parse_pattern
from loraserve.adapters.strict_json import shown
from loraserve.limits import LIMITS, Limits


class Handling(Enum):
    IMPLEMENTED = "implemented"
    IGNORED = "ignored: it can't change an answer"
    REFUSED = "refused when set"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """One field. `neutral` are values beside null, false and empty that say nothing; `why` completes "… because"."""

    handling: Handling
    why: str = ""
    neutral: tuple[object, ...] = ()


def _implemented(why: str) -> FieldRule:
    return FieldRule(Handling.IMPLEMENTED, why)


def _ignored(why: str) -> FieldRule:
    return FieldRule(Handling.IGNORED, why)


def _refused(why: str, *neutral: object) -> FieldRule:
    return FieldRule(Handling.REFUSED, why, neutral)


_ONLY_INIT = "it only chose the weights that training began with"

FIELDS: dict[str, FieldRule] = {
    "peft_type": _implemented("only LORA is served"),
    "r": _implemented("the rank where no pattern says otherwise; it must agree with the tensors"),
    "lora_alpha": _implemented("scaling = lora_alpha / r"),
    "use_rslora": _implemented("scaling = lora_alpha / sqrt(r)"),
    "rank_pattern": _implemented("ranks of single modules, by PEFT's rule, first key wins"),
    "alpha_pattern": _implemented("alphas of single modules, by PEFT's rule, first key wins"),
    "target_modules": _implemented(
        'a list of module names or suffixes, or "all-linear"; it must agree with the tensors'
    ),
    "exclude_modules": _implemented("a list of module names or suffixes; it must agree with the tensors"),
    "layers_to_transform": _implemented("it must agree with the tensors"),
    "layers_pattern": _implemented("it must agree with the tensors"),
    "init_lora_weights": _implemented("initialisations that leave the base's weights alone end as plain LoRA"),
    "bias": _refused("trained biases of the base aren't served yet", "none"),
    "lora_bias": _refused("a bias on lora_B isn't served yet"),
    "use_dora": _implemented(
        "each row of the updated weight gets its trained magnitude; it must agree with the tensors"
    ),
    "modules_to_save": _refused("fully trained modules aren't served yet"),
    "trainable_token_indices": _refused("trained token embeddings aren't served yet"),
    "target_parameters": _refused("LoRA on bare parameters (mixture-of-experts weights) isn't served"),
    "layer_replication": _refused("it changes the base's layers"),
    "alora_invocation_tokens": _refused("activated LoRA isn't served yet; it would act on the whole prompt"),
    "fan_in_fan_out": _refused("it means transposed base weights; every base here stores [out, in]"),
    "megatron_config": _refused("Megatron's parallel layers name and split their weights differently"),
    "use_qalora": _refused("QA-LoRA pools its inputs"),
    "use_bdlora": _refused("block-diagonal LoRA isn't served"),
    "kasa_config": _refused("KaSA changes the base's weights"),
    "velora_config": _refused("VeLoRA saves more than lora_A and lora_B"),
    "monteclora_config": _refused("Monte Carlo LoRA samples its weights"),
    "arrow_config": _refused("Arrow routes between adapters"),
    "task_type": _ignored("the tensors say what was trained"),
    "auto_mapping": _ignored("it names Python classes; nothing is ever imported by a config"),
    "peft_version": _ignored("every version of PEFT writes plain LoRA alike"),
    "base_model_name_or_path": _ignored("a name proves nothing; the shapes are checked"),
    "revision": _ignored("a name proves nothing; the shapes are checked"),
    "inference_mode": _ignored("it freezes weights in training"),
    "lora_dropout": _ignored("dropout acts in training only"),
    "megatron_core": _ignored("it means nothing without megatron_config"),
    "qalora_group_size": _ignored("it means nothing without use_qalora"),
    "loftq_config": _ignored('it means nothing without init_lora_weights="loftq", which is refused'),
    "eva_config": _ignored(_ONLY_INIT),
    "corda_config": _ignored('it means nothing without init_lora_weights="corda", which is refused'),
    "lora_ga_config": _ignored('it means nothing without init_lora_weights="lora_ga", which is refused'),
    "runtime_config": _ignored("it says where a trainer computes"),
    "ensure_weight_tying": _implemented("the head's LoRA must then be the embedding's, transposed"),
}
"""Every field of peft.LoraConfig (0.21); a test compares the two."""

_PLAIN_INITS = {"gaussian", "eva", "orthogonal", "mica"}
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The fields that decide an adapter's arithmetic and reach, checked."""

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: tuple[tuple[Pattern, int], ...]
    alpha_pattern: tuple[tuple[Pattern, float], ...]
    target_modules: tuple[str, ...] | None
    """None: all linears."""
    exclude_modules: tuple[str, ...]
    layers_to_transform: frozenset[int] | None
    """None: every layer."""
    layers_pattern: tuple[str, ...]
    ensure_weight_tying: bool

    def scaling(self, alpha: float, rank: int) -> float:
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """`is_unsupported`: the value is good PEFT, only not implemented; otherwise it is malformed."""

    message: str
    is_unsupported: bool


def read_settings(
    config: Mapping[str, Any], limits: Limits = LIMITS
) -> tuple[LoraSettings | None, list[ConfigProblem]]:
    """The settings and no problems, or None and every problem."""
    reader = _Reader(config, limits)
    settings = reader.read()
    return (None if reader.problems else settings), reader.problems


class _Reader:
    def __init__(self, config: Mapping[str, Any], limits: Limits) -> None:
        self.config = config
        self.limits = limits
        self.problems: list[ConfigProblem] = []

    def read(self) -> LoraSettings:
        self._refuse_what_is_not_implemented()
        self._check_type_and_init()
        return LoraSettings(
            r=self._rank(self.config.get("r"), "r"),
            lora_alpha=self._alpha(self.config.get("lora_alpha"), "lora_alpha"),
            use_rslora=self._flag("use_rslora"),
            use_dora=self._flag("use_dora"),
            rank_pattern=tuple(
                (p, self._rank(v, f"rank_pattern[{shown(p.key)}]")) for p, v in self._pattern("rank_pattern")
            ),
            alpha_pattern=tuple(
                (p, self._alpha(v, f"alpha_pattern[{shown(p.key)}]")) for p, v in self._pattern("alpha_pattern")
            ),
            target_modules=self._targets(),
            exclude_modules=self._names("exclude_modules"),
            layers_to_transform=self._layers(),
            layers_pattern=self._layers_pattern(),
            ensure_weight_tying=self._flag("ensure_weight_tying"),
        )

    def _bad(self, message: str) -> None:
        self.problems.append(ConfigProblem(message, is_unsupported=False))

    def _unsupported(self, message: str) -> None:
        self.problems.append(ConfigProblem(message, is_unsupported=True))

    def _refuse_what_is_not_implemented(self) -> None:
        for name, value in self.config.items():
            rule = FIELDS.get(name)
            # Two adjacent fields of a newer PEFT, switched off, are the common case: they say nothing.
            if _says_nothing(value) or (rule is not None and rule.handling is not Handling.REFUSED):
                continue
            if rule is None:
                self._unsupported(
                    f"{shown(name)} = {shown(value)}: this server doesn't know the field, and it may change the answers."
                )
            elif not any(value == neutral and type(value) is type(neutral) for neutral in rule.neutral):
                self._unsupported(f"{name} = {shown(value)} is refused: {rule.why}.")

    def _check_type_and_init(self) -> None:
        peft_type = self.config.get("peft_type")
        if peft_type != "LORA":
            self._unsupported(f"peft_type is {shown(peft_type)}; only LORA is served.")
        init = self.config.get("init_lora_weights", True)
        if init is None or isinstance(init, bool):
            return
        name = init.lower() if isinstance(init, str) else ""
        if name.startswith(_BASE_CHANGING_INITS):
            self._unsupported(
                f"init_lora_weights = {shown(init)} is refused: it changed the base's weights in training, so that the saved "
                "tensors belong to another base. Convert it to plain LoRA: "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...)."
            )
        elif name not in _PLAIN_INITS:
            self._unsupported(
                f"init_lora_weights = {shown(init)}: this server doesn't know it, and it may change the answers."
            )

    def _flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            self._bad(f"{name} is {shown(value)}; expected true or false.")
        return value is True

    def _rank(self, value: object, name: str) -> int:
        if type(value) is not int or not 1 <= value <= self.limits.max_rank:
            self._bad(f"{name} is {shown(value)}; expected a whole number from 1 to {self.limits.max_rank}.")
            return 1
        return value

    def _alpha(self, value: object, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > self.limits.max_scaling * 1e4:
            self._bad(f"{name} is {shown(value)}; expected a number.")
            return 1.0
        return float(value)

    def _pattern(self, name: str) -> list[tuple[Pattern, object]]:
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, dict):
            self._bad(f"{name} is {shown(value)}; expected an object of module name → number.")
            return []
        if len(value) > self.limits.max_adapter_patterns:
            self._bad(f"{name} has {len(value):,} keys; at most {self.limits.max_adapter_patterns:,} are taken.")
            return []
        result: list[tuple[Pattern, object]] = []
        for key, number in value.items():
            pattern = parse_pattern(key)
            if isinstance(pattern, str):
                self._unsupported(f"{name}'s key {shown(key)} is refused: {pattern}.")
            else:
                result.append((pattern, number))
        return result

    def _targets(self) -> tuple[str, ...] | None:
        value = self.config.get("target_modules")
        if value == ALL_LINEAR:
            return None
        if isinstance(value, str):
            self._unsupported(
                f"target_modules = {shown(value)} is refused: as one string PEFT takes it for a regex, which this server "
                "doesn't run. Write a list of module names."
            )
            return ()
        if not value:
            self._bad('target_modules is missing or empty; expected a list of module names, or "all-linear".')
            return ()
        return self._names("target_modules")

    def _names(self, name: str) -> tuple[str, ...]:
        value = self.config.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            self._unsupported(f"{name} = {shown(value)} is refused: a regex isn't run. Write a list of module names.")
            return ()
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            self._bad(f"{name} is {shown(value)}; expected a list of module names.")
            return ()
        if len(value) > self.limits.max_adapter_patterns:
            self._bad(f"{name} has {len(value):,} names; at most {self.limits.max_adapter_patterns:,} are taken.")
            return ()
        return tuple(value)

    def _layers(self) -> frozenset[int] | None:
        value = self.config.get("layers_to_transform")
        if value is None or value == []:
            return None
        layers = value if isinstance(value, list) else [value]
        if not all(type(v) is int and v >= 0 for v in layers):
            self._bad(f"layers_to_transform is {shown(value)}; expected a layer's number or a list of them.")
            return None
        if self.config.get("target_modules") == ALL_LINEAR:
            self._bad("layers_to_transform can't be used when target_modules is a string.")
        return frozenset(layers)

    def _layers_pattern(self) -> tuple[str, ...]:
        value = self.config.get("layers_pattern")
        if not value:
            return ()
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(v, str) and v.isascii() and v.isidentifier() for v in names):
            self._unsupported(f"layers_pattern = {shown(value)} is refused: expected plain names such as layers.")
            return ()
        if self.config.get("layers_to_transform") in (None, []):
            self._bad("layers_pattern is set without layers_to_transform.")
        return tuple(names)


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})
