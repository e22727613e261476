"""A LoRA adapter's config, checked.

The fields that decide its arithmetic and its reach are read; all others are ignored or
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraserve.adapters.config.expressions import Budget
from loraserve.adapters.config.patterns import Pattern, parse_pattern
from loraserve.adapters.config.peft_fields import FIELDS as FIELDS
from loraserve.adapters.config.peft_fields import FieldRule as FieldRule
from loraserve.adapters.config.peft_fields import Handling as Handling
from loraserve.adapters.config.peft_fields import refusal
from loraserve.adapters.config.regexes import Regex, compile_regex
from loraserve.adapters.strict_json import shown
from loraserve.limits import LIMITS, Limits

_PLAIN_INITS = {"gaussian", "eva", "orthogonal", "mica"}
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")

DEFAULTS: Mapping[str, int] = {"r": 8, "lora_alpha": 8}
"""PEFT's, of what a config may leave out; a test compares them with the class."""

ALL_LINEAR = "all-linear"
LAYERS_FRAME = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
"""PEFT's, of an entry of layers_pattern: a match gives the layer that a module is in."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Checked fields that decide an adapter's arithmetic and its targets.

    Attributes:
        target_modules: names and suffixes, or a regex for whole names; None: all linears.
        layers_to_transform: None: every layer.
        layers_pattern: names of what holds the layers, or regexes, as `LAYERS_FRAME` frames them.
        bias: "none", "lora_only" or "all".
        modules_to_save: ends of names.
        trained_tokens: end of a module's name → the tokens whose rows of it were trained; None for
            the embedding, whatever its name.
        invocation_token_ids: empty: it's no aLoRA.
        target_parameters: whole names of parameters, or ends of them.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: tuple[tuple[Pattern | Regex, int], ...]
    alpha_pattern: tuple[tuple[Pattern | Regex, float], ...]
    target_modules: tuple[str, ...] | Regex | None
    exclude_modules: tuple[str, ...] | Regex
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[str | Regex, ...]
    ensure_weight_tying: bool
    bias: str
    lora_bias: bool
    modules_to_save: tuple[str, ...]
    trained_tokens: Mapping[str | None, tuple[int, ...]]
    invocation_token_ids: tuple[int, ...]
    target_parameters: tuple[str, ...] = ()

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
    """Read the settings and no problems, or None and every problem."""
    reader = _Reader(config, limits)
    settings = reader.read()
    return (None if reader.problems else settings), reader.problems


class _Reader:
    def __init__(self, config: Mapping[str, Any], limits: Limits) -> None:
        self.config = config
        self.limits = limits
        self.problems: list[ConfigProblem] = []
        self._budget = Budget(limits)

    def read(self) -> LoraSettings:
        self._refuse_what_is_not_implemented()
        self._check_init()
        self._check_combinations()
        return LoraSettings(
            r=self._rank(self.config.get("r", DEFAULTS["r"]), "r"),
            lora_alpha=self._alpha(self.config.get("lora_alpha", DEFAULTS["lora_alpha"]), "lora_alpha"),
            use_rslora=self._flag("use_rslora"),
            use_dora=self._flag("use_dora"),
            rank_pattern=tuple(
                (p, self._rank(v, f"rank_pattern[{shown(key)}]")) for p, key, v in self._pattern("rank_pattern")
            ),
            alpha_pattern=tuple(
                (p, self._alpha(v, f"alpha_pattern[{shown(key)}]")) for p, key, v in self._pattern("alpha_pattern")
            ),
            target_modules=self._targets(),
            exclude_modules=self._names_or_regex("exclude_modules"),
            layers_to_transform=self._layers(),
            layers_pattern=self._layers_pattern(),
            ensure_weight_tying=self._flag("ensure_weight_tying"),
            bias=self._bias(),
            lora_bias=self._flag("lora_bias"),
            modules_to_save=self._modules_to_save(),
            trained_tokens=self._trained_tokens(),
            invocation_token_ids=self._token_ids("alora_invocation_tokens"),
            target_parameters=self._names("target_parameters"),
        )

    def _bad(self, message: str) -> None:
        self.problems.append(ConfigProblem(message, is_unsupported=False))

    def _unsupported(self, message: str) -> None:
        self.problems.append(ConfigProblem(message, is_unsupported=True))

    def _refuse_what_is_not_implemented(self) -> None:
        for name, value in self.config.items():
            why = refusal(name, value, FIELDS)
            if why is not None:
                self._unsupported(why)

    def _check_init(self) -> None:
        init = self.config.get("init_lora_weights", True)
        if init is None or isinstance(init, bool):
            return
        name = init.lower() if isinstance(init, str) else ""
        if name.startswith(_BASE_CHANGING_INITS):
            self._unsupported(
                f"init_lora_weights = {shown(init)} is refused: it changed the base's weights in training, "
                "so the saved "
                "tensors belong to another base. Convert the adapter to plain LoRA: "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...)."
            )
        elif name not in _PLAIN_INITS:
            self._unsupported(
                f"init_lora_weights = {shown(init)}: this value is unknown, and it may change the answers."
            )

    def _check_combinations(self) -> None:
        """Add a problem for each combination that PEFT doesn't do.

        One that it does otherwise than the config reads is a problem too.
        """
        if self.config.get("lora_bias") is True:
            if self.config.get("use_dora") is True:
                self._unsupported("lora_bias is refused together with use_dora: PEFT has no such adapters.")
            if self.config.get("init_lora_weights", True) not in (True, False):
                self._unsupported(
                    "lora_bias is refused with an init_lora_weights other than true or false: "
                    "PEFT has no such adapters."
                )
        beside_mica = [name for name in ("use_dora", "alora_invocation_tokens") if self.config.get(name)]
        if beside_mica and self.config.get("init_lora_weights") == "mica":
            self._unsupported(
                f"{beside_mica[0]} is refused with init_lora_weights = 'mica': PEFT has no such adapters."
            )
        with_parameters = [
            name for name in ("use_dora", "lora_bias", "alora_invocation_tokens") if self.config.get(name)
        ]
        if with_parameters and self.config.get("target_parameters"):
            self._unsupported(
                f"{with_parameters[0]} is refused together with target_parameters: PEFT has no such adapters."
            )
        if not self.config.get("alora_invocation_tokens"):
            return
        if self.config.get("use_dora") is True:
            self._unsupported("alora_invocation_tokens is refused together with use_dora: PEFT has no such adapters.")
        if self.config.get("task_type") != "CAUSAL_LM":
            self._unsupported(
                f"alora_invocation_tokens is refused with task_type = {shown(self.config.get('task_type'))}: "
                "PEFT looks for the tokens only with "
                "CAUSAL_LM, so it would never activate this adapter."
            )
        auxiliary = [name for name in ("modules_to_save", "trainable_token_indices") if self.config.get(name)]
        if self.config.get("bias", "none") not in (None, "none"):
            auxiliary.append("bias")
        for name in auxiliary:
            self._unsupported(
                f"alora_invocation_tokens is refused together with {name}: "
                f"PEFT applies {name} to every token, so the keys and values of "
                "tokens before the invocation would differ from the base's."
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

    def _pattern(self, name: str) -> list[tuple[Pattern | Regex, str, object]]:
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, dict):
            self._bad(f"{name} is {shown(value)}; expected an object of module name → number.")
            return []
        if len(value) > self.limits.max_adapter_patterns:
            self._bad(f"{name} has {len(value):,} keys; at most {self.limits.max_adapter_patterns:,} are allowed.")
            return []
        result: list[tuple[Pattern | Regex, str, object]] = []
        num_regexes = 0
        for key, number in value.items():
            pattern = parse_pattern(key, self.limits, self._budget)
            if isinstance(pattern, str):
                self._unsupported(f"{name}'s key {shown(key)} is refused: {pattern}.")
                continue
            result.append((pattern, key, number))
            num_regexes += isinstance(pattern, Regex)
            if num_regexes > self.limits.max_adapter_regexes:
                self._bad(
                    f"{name} has more than {self.limits.max_adapter_regexes} keys that are regexes; "
                    "list the modules by name instead."
                )
                return []
        return result

    def _targets(self) -> tuple[str, ...] | Regex | None:
        value = self.config.get("target_modules")
        if isinstance(value, str) and value.lower() == ALL_LINEAR:
            return None
        if not value and self.config.get("target_parameters"):
            return ()
        if not value:
            self._bad('target_modules is missing or empty; expected a list of module names, a regex, or "all-linear".')
            return ()
        return self._names_or_regex("target_modules")

    def _names_or_regex(self, name: str) -> tuple[str, ...] | Regex:
        value = self.config.get(name)
        if not isinstance(value, str):
            return self._names(name)
        if not value:
            return ()
        regex = compile_regex(value, limits=self.limits, budget=self._budget)
        if isinstance(regex, str):
            self._unsupported(f"{name} = {shown(value)} is refused: as one string it is a regex, and {regex}.")
            return ()
        return regex

    def _names(self, name: str) -> tuple[str, ...]:
        value = self.config.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            self._bad(f"{name} is {shown(value)}; expected a list of module names.")
            return ()
        if len(value) > self.limits.max_adapter_patterns:
            self._bad(f"{name} has {len(value):,} names; at most {self.limits.max_adapter_patterns:,} are allowed.")
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
        if isinstance(self.config.get("target_modules"), str):
            self._bad("layers_to_transform can't be used when target_modules is a string.")
        return frozenset(layers)

    def _layers_pattern(self) -> tuple[str | Regex, ...]:
        value = self.config.get("layers_pattern")
        if not value:
            return ()
        patterns = value if isinstance(value, list) else [value]
        if not all(isinstance(v, str) and v for v in patterns) or len(patterns) > self.limits.max_adapter_regexes:
            self._bad(f"layers_pattern is {shown(value)}; expected a name such as layers, or a short list of them.")
            return ()
        if self.config.get("layers_to_transform") in (None, []):
            self._bad("layers_pattern is set without layers_to_transform.")
        result: list[str | Regex] = []
        for text in patterns:
            regex = text if _is_plain(text) else compile_regex(text, LAYERS_FRAME, self.limits, has_groups=True)
            if isinstance(regex, str) and regex is not text:
                self._unsupported(f"layers_pattern = {shown(text)} is refused: {regex}.")
            result.append(regex)
        return tuple(result)

    def _bias(self) -> str:
        value = self.config.get("bias")
        if value is None:
            return "none"
        if value not in ("none", "lora_only", "all"):
            self._bad(f'bias is {shown(value)}; expected "none", "lora_only" or "all".')
            return "none"
        return str(value)

    def _modules_to_save(self) -> tuple[str, ...]:
        names = self._names("modules_to_save")
        odd = [name for name in names if not _is_plain(name)]
        if odd:
            self._unsupported(
                f"modules_to_save names {shown(odd[0])}, which PEFT reads as a suffix in one place and as a "
                "regex in another. "
                "Expected plain names such as lm_head."
            )
        return names

    def _trained_tokens(self) -> dict[str | None, tuple[int, ...]]:
        name = "trainable_token_indices"
        value = self.config.get(name)
        if not value:
            return {}
        if not isinstance(value, dict):
            return {None: self._token_ids(name)}
        if not all(key and isinstance(ids, list) and ids for key, ids in value.items()):
            self._bad(
                f"{name} is {shown(value)}; expected a list of token ids, or an object of module name → such a list."
            )
            return {}
        return {key: self._checked_token_ids(name, ids) for key, ids in value.items()}

    def _token_ids(self, name: str) -> tuple[int, ...]:
        value = self.config.get(name)
        return self._checked_token_ids(name, value) if value else ()

    def _checked_token_ids(self, name: str, value: object) -> tuple[int, ...]:
        # a base's vocabulary is the bound that counts; this one keeps a number from being no
        # token's at all
        if not isinstance(value, list) or not all(type(v) is int and 0 <= v < 1 << 31 for v in value):
            self._bad(f"{name} is {shown(value)}; expected a list of token ids.")
            return ()
        return tuple(value)


def _is_plain(name: str) -> bool:
    """Check whether a regex of that text matches that text alone.

    Its dots are excepted: they part names here.
    """
    return name.isascii() and name.replace("_", "a").replace(".", "a").replace("-", "a").isalnum()
