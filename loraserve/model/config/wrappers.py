"""Models of images and text, of which the decoder is served.

Their config.json holds the decoder's under ``text_config``; their checkpoints hold its tensors
under a longer path, and those of their encoders next to them. The decoder alone computes what the
wrapper does for text. transformers names the tensors in one way, checkpoints from before its
version 4.52 in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loraserve.adapters.format.wrappers import LANGUAGE_PATHS, is_of_encoder
from loraserve.model.config.config_fields import to_object


@dataclass(frozen=True, slots=True)
class Wrapper:
    """Class of such models.

    Attributes:
        decoders: the text config's model_type → the architecture that it is, where the name differs
            from the architecture's own.
        default: model_type of a text config without one.
        is_tied: whether the head is the embedding where the config is silent.
        is_tied_inside: whether it also is where ``text_config`` sets it.
    """

    decoders: Mapping[str, str] = field(default_factory=dict)
    default: str = "llama"
    is_tied: bool = False
    is_tied_inside: bool = False


WRAPPERS: Mapping[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(default="gemma3_text", is_tied=True),
    "Idefics3ForConditionalGeneration": Wrapper(),
    "InternVLForConditionalGeneration": Wrapper(default="qwen2", is_tied=True),
    "LlavaForConditionalGeneration": Wrapper(is_tied_inside=True),
    "LlavaNextForConditionalGeneration": Wrapper(),
    "LlavaOnevisionForConditionalGeneration": Wrapper(default="qwen2", is_tied_inside=True),
    "Mistral3ForConditionalGeneration": Wrapper(default="mistral", is_tied=True),
    "Qwen2VLForConditionalGeneration": Wrapper(
        {"qwen2_vl_text": "qwen2", "qwen2_vl": "qwen2"}, "qwen2_vl_text", is_tied_inside=True
    ),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(
        {"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2"}, "qwen2_5_vl_text", is_tied_inside=True
    ),
    "Qwen3VLForConditionalGeneration": Wrapper({"qwen3_vl_text": "qwen3"}, "qwen3_vl_text"),
    "SmolVLMForConditionalGeneration": Wrapper(),
}

_DECODER, _HEAD = "model", "lm_head"
_PREFIXES: tuple[tuple[str, str], ...] = tuple(
    (f"{wrapped}.", f"{plain}.")
    for path, head in LANGUAGE_PATHS.items()
    for wrapped, plain in ((path, _DECODER), (head, _HEAD))
    if wrapped != plain
)
"""Beginning of a decoder's names in a wrapper, and in a model of text alone."""

_QWEN_VL: Mapping[str, object] = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131_072,
    },
    "ministral3": {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "max_position_embeddings": 262_144,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 32_768,
    },
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN_VL),
    "qwen3_vl_text": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
}
"""Fields that a text config lacks where they are the defaults of transformers' class, by its
model_type.
"""


def wrapper_of(config: Mapping[str, Any]) -> str | None:
    """Find the class of a wrapper's config.json; None: the model is of text alone."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name in WRAPPERS else None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Extract the decoder's config; the config itself if it isn't a wrapper's.

    Raises:
        ModelError: ``text_config`` isn't an object.
    """
    name = wrapper_of(config)
    if name is None:
        return config
    wrapper = WRAPPERS[name]
    # Qwen2-VL's own files have the decoder's fields outside
    own = to_object(config.get("text_config"), "text_config")
    text = dict(own) if own else {name: value for name, value in config.items() if name != "model_type"}
    model_type = text.get("model_type") or wrapper.default
    if isinstance(model_type, str):
        text = {**DEFAULTS.get(model_type, {}), **text}
        model_type = wrapper.decoders.get(model_type, model_type)
    outside = config.get("tie_word_embeddings", wrapper.is_tied)
    text["tie_word_embeddings"] = (wrapper.is_tied_inside and own.get("tie_word_embeddings") is True) or outside
    for field_name in ("eos_token_id", "quantization_config", "compression_config"):
        if config.get(field_name) is not None and text.get(field_name) is None:
            text[field_name] = config[field_name]
    for field_name in ("rope_scaling", "rope_parameters"):
        rope = to_object(text.get(field_name), field_name)
        if rope.get("mrope_section") is not None:
            # three positions, which are one for text
            text[field_name] = {**rope, **{key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}}
    # an architecture's name inside is that of the decoder, or of the wrapper again
    return {**text, "architectures": None, "model_type": model_type}


def wrapped_names(path: str) -> tuple[str, ...]:
    """List the names that a decoder's linear may have in a wrapper, its own first."""
    full = f"{path}."
    others = (wrapped + full.removeprefix(plain) for wrapped, plain in _PREFIXES if full.startswith(plain))
    return (path, *(name.removesuffix(".") for name in others))


def decoder_name(name: str) -> str | None:
    """Convert a tensor's or linear's name to that in a model of text alone; None if it has none."""
    if is_of_encoder(name):
        return None
    for wrapped, plain in _PREFIXES:
        if name.startswith(wrapped):
            return plain + name.removeprefix(wrapped)
    return name
