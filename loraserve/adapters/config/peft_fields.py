"""Handling of each field of PEFT's LoraConfig.

It is an allow-list: a field outside the table is refused, unless its value is neutral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from loraserve.adapters.strict_json import shown


class Handling(Enum):
    IMPLEMENTED = "implemented"
    IGNORED = "ignored: it can't change an answer"
    REFUSED = "refused when set"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """Treatment of one field.

    Attributes:
        why: completes "… because".
        neutral: values of a refused field that have no effect, besides null, false, "" and []. An
            empty object is none of these unless it stands here: of most, PEFT builds an object of
            defaults, which is as good as one that was filled.
        is_object: whether a refused field's value is an object in PEFT: then null and false alone
            have no effect.
        parts: of an ignored field that holds an object: the keys that it may have. None: its value
            isn't looked at.
    """

    handling: Handling
    why: str = ""
    neutral: tuple[object, ...] = ()
    is_object: bool = False
    parts: frozenset[str] | None = None


def _implemented(why: str) -> FieldRule:
    return FieldRule(Handling.IMPLEMENTED, why)


def _ignored(why: str) -> FieldRule:
    return FieldRule(Handling.IGNORED, why)


def _ignored_object(why: str, *parts: str) -> FieldRule:
    return FieldRule(Handling.IGNORED, why, parts=frozenset(parts))


def _refused(why: str, *neutral: object) -> FieldRule:
    return FieldRule(Handling.REFUSED, why, neutral)


def _refused_object(why: str) -> FieldRule:
    return FieldRule(Handling.REFUSED, why, is_object=True)


_ONLY_INIT = "it only chose the weights that training began with"

FIELDS: dict[str, FieldRule] = {
    "peft_type": _implemented("LORA here; the other kinds that are served have tables of their own"),
    "r": _implemented("the rank where no pattern says otherwise; it must agree with the tensors"),
    "lora_alpha": _implemented("scaling = lora_alpha / r"),
    "use_rslora": _implemented("scaling = lora_alpha / sqrt(r)"),
    "rank_pattern": _implemented("ranks of single modules, by PEFT's rule, first key wins; keys may be regexes"),
    "alpha_pattern": _implemented("alphas of single modules, by PEFT's rule, first key wins; keys may be regexes"),
    "target_modules": _implemented(
        'a list of module names or suffixes, a regex, or "all-linear"; it must agree with the tensors'
    ),
    "exclude_modules": _implemented("a list of module names or suffixes, or a regex; it must agree with the tensors"),
    "layers_to_transform": _implemented("it must agree with the tensors"),
    "layers_pattern": _implemented("names or regexes; it must agree with the tensors"),
    "init_lora_weights": _implemented("initialisations that leave the base's weights alone end as plain LoRA"),
    "bias": _implemented("trained biases stand in the place of the base's; it must agree with the tensors"),
    "lora_bias": _implemented("a bias on lora_B, scaled as the update is; it must agree with the tensors"),
    "use_dora": _implemented(
        "each row of the updated weight gets its trained magnitude; it must agree with the tensors"
    ),
    "modules_to_save": _implemented(
        "trained weights of the head, the embedding, norms of the layers and of the head, "
        "and linears stand in the place of the base's; "
        "it must agree with the tensors"
    ),
    "trainable_token_indices": _implemented(
        "trained rows stand in the place of the embedding's or the head's, and on both where the base ties them"
    ),
    "alora_invocation_tokens": _implemented("the adapter acts from the last occurrence of these tokens in a prompt on"),
    "ensure_weight_tying": _implemented(
        "on a base with a tied head, what is trained of the head must be what is of the embedding"
    ),
    "target_parameters": _implemented(
        "LoRA on the parameters in which transformers 5 has all experts of a mixture, and on its router; "
        "it must agree with the tensors"
    ),
    "layer_replication": _refused("it changes the base's layers"),
    "fan_in_fan_out": _refused("it means transposed base weights; every base here stores [out, in]"),
    "megatron_config": _refused("Megatron's parallel layers name and split their weights differently", {}),
    "use_qalora": _refused("QA-LoRA pools its inputs"),
    "use_bdlora": _refused_object("block-diagonal LoRA isn't served"),
    "kasa_config": _refused_object("KaSA changes the base's weights"),
    "velora_config": _refused_object("VeLoRA saves more than lora_A and lora_B"),
    "monteclora_config": _refused_object("Monte Carlo LoRA samples its weights"),
    "arrow_config": _refused_object("Arrow routes between adapters"),
    "task_type": _ignored("the tensors say what was trained; with alora_invocation_tokens it must be CAUSAL_LM"),
    "auto_mapping": _ignored("it names Python classes; nothing is ever imported by a config"),
    "peft_version": _ignored("every version of PEFT writes the same names, or they are refused"),
    "base_model_name_or_path": _ignored("a name proves nothing; the shapes are checked"),
    "revision": _ignored("a name proves nothing; the shapes are checked"),
    "inference_mode": _ignored("it freezes weights in training"),
    "lora_dropout": _ignored("dropout acts in training only"),
    "megatron_core": _ignored("it means nothing without megatron_config"),
    "qalora_group_size": _ignored("it means nothing without use_qalora"),
    "loftq_config": _ignored_object(
        'it means nothing without init_lora_weights="loftq", which is refused', "loftq_bits", "loftq_iter"
    ),
    "eva_config": _ignored_object(
        _ONLY_INIT, "rho", "tau", "use_label_mask", "label_mask_value", "whiten", "adjust_scaling_factors"
    ),
    "corda_config": _ignored_object(
        'it means nothing without init_lora_weights="corda", which is refused',
        "cache_file",
        "covariance_file",
        "corda_method",
        "verbose",
        "use_float16_for_covariance",
        "prune_temporary_fields",
    ),
    "lora_ga_config": _ignored_object(
        'it means nothing without init_lora_weights="lora_ga", which is refused', "direction", "scale", "stable_gamma"
    ),
    "runtime_config": _ignored("it says where a trainer computes, and PEFT itself doesn't read it from a file"),
}
"""Fields of peft.LoraConfig (0.21) and keys of the objects that are ignored; a test compares them
with the classes.
"""


def refusal(name: str, value: object, table: Mapping[str, FieldRule]) -> str | None:
    """Explain in a sentence why a config can't be served with this field.

    None where it can, or where the code that implements the field judges its value.
    """
    rule = table.get(name)
    if rule is None:
        # two adjacent fields of a newer PEFT, switched off, are the common case: they have no
        # effect
        if _is_off(value) or value in ("", []):
            return None
        return f"{shown(name)} = {shown(value)}: this field is unknown, and it may change the answers."
    if rule.handling is Handling.IGNORED:
        return None if rule.parts is None else _object_problem(name, value, rule.parts)
    if rule.handling is Handling.IMPLEMENTED or _is_off(value) or (not rule.is_object and value in ("", [])):
        return None
    if any(value == neutral and type(value) is type(neutral) for neutral in rule.neutral):
        return None
    default = ": PEFT fills it with its defaults" if rule.is_object and value == {} else ""
    return f"{name} = {shown(value)} is refused{default}: {rule.why}."


def _is_off(value: object) -> bool:
    return value is None or value is False


def _object_problem(name: str, value: object, parts: frozenset[str]) -> str | None:
    if _is_off(value):
        return None
    if not isinstance(value, dict):
        return f"{name} = {shown(value)} is refused: PEFT expects an object or null."
    unknown = next((key for key in value if key not in parts), None)
    if unknown is None:
        return None
    return f"{name} has {shown(unknown)}: this field is unknown, and it may change the answers."
