"""What becomes of each field of PEFT's LoraConfig. An allow-list: what isn't in the table is refused, unless it says nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
        "trained weights of the head, the embedding, norms that a layer or the head reads, and linears stand in the place of the base's; "
        "it must agree with the tensors"
    ),
    "trainable_token_indices": _implemented(
        "trained rows stand in the place of the embedding's or the head's, and on both where the base ties them"
    ),
    "alora_invocation_tokens": _implemented("the adapter acts from the last occurrence of these tokens in a prompt on"),
    "ensure_weight_tying": _implemented(
        "on a base with a tied head, what is trained of the head must be what is of the embedding"
    ),
    "target_parameters": _refused("LoRA on bare parameters (mixture-of-experts weights) isn't served"),
    "layer_replication": _refused("it changes the base's layers"),
    "fan_in_fan_out": _refused("it means transposed base weights; every base here stores [out, in]"),
    "megatron_config": _refused("Megatron's parallel layers name and split their weights differently"),
    "use_qalora": _refused("QA-LoRA pools its inputs"),
    "use_bdlora": _refused("block-diagonal LoRA isn't served"),
    "kasa_config": _refused("KaSA changes the base's weights"),
    "velora_config": _refused("VeLoRA saves more than lora_A and lora_B"),
    "monteclora_config": _refused("Monte Carlo LoRA samples its weights"),
    "arrow_config": _refused("Arrow routes between adapters"),
    "task_type": _ignored("the tensors say what was trained; with alora_invocation_tokens it must be CAUSAL_LM"),
    "auto_mapping": _ignored("it names Python classes; nothing is ever imported by a config"),
    "peft_version": _ignored("every version of PEFT writes the same names, or they are refused"),
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
}
"""Every field of peft.LoraConfig (0.21); a test compares the two."""
