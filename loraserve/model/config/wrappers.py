"""Models of images, sound and text, of which the decoder is served.

Their config.json holds the decoder's under ``text_config``; their checkpoints hold its tensors
under a longer path, and those of their encoders next to them. The decoder alone computes what the
wrapper does for text. transformers names the tensors in one way, checkpoints from before its
version 4.52 in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loraserve.model.config.config_fields import to_object


@dataclass(frozen=True, slots=True)
class Wrapper:
    """Class of such models.

    Attributes:
        decoders: the text config's model_type → the architecture that it is, where the name differs
            from the architecture's own.
        default: model_type of a text config without one.
    """

    decoders: Mapping[str, str] = field(default_factory=dict)
    default: str = "llama"


WRAPPERS: Mapping[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(default="gemma3_text"),
    "Idefics3ForConditionalGeneration": Wrapper(),
    "InternVLForConditionalGeneration": Wrapper(default="qwen2"),
    "LlavaForConditionalGeneration": Wrapper(),
    "LlavaNextForConditionalGeneration": Wrapper(),
    "LlavaOnevisionForConditionalGeneration": Wrapper(default="qwen2"),
    "Mistral3ForConditionalGeneration": Wrapper(default="mistral"),
    "Qwen2VLForConditionalGeneration": Wrapper({"qwen2_vl_text": "qwen2", "qwen2_vl": "qwen2"}, "qwen2"),
    "Qwen2_5_VLForConditionalGeneration": Wrapper({"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2"}, "qwen2"),
    "Qwen3VLForConditionalGeneration": Wrapper({"qwen3_vl_text": "qwen3"}, "qwen3"),
    "SmolVLMForConditionalGeneration": Wrapper(),
}

_DECODER_PREFIXES: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
}
"""Beginning of a decoder's names in a wrapper → in a model of text alone."""

_OTHER_PREFIXES = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in (
        "vision_tower.",
        "vision_model.",
        "visual.",
        "multi_modal_projector.",
        "connector.",
        "image_newline",
    )
)
"""Beginnings of the names of what reads images."""

_SIZES: Mapping[str, Mapping[str, object]] = {
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
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
}
"""What a text config without these fields means, by its model_type: it is written without what
transformers' class begins with.
"""


def wrapper_of(config: Mapping[str, Any]) -> str | None:
    """Return the class of a wrapper's config.json; None: the model is of text alone."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name in WRAPPERS else None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's config; the config itself if it isn't a wrapper's.

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
    model_type = wrapper.decoders.get(model_type, model_type) if isinstance(model_type, str) else model_type
    if isinstance(model_type, str):
        text = {**_SIZES.get(model_type, {}), **text}
    for name in ("tie_word_embeddings", "eos_token_id", "quantization_config", "compression_config"):
        if config.get(name) is not None and (name == "tie_word_embeddings" or text.get(name) is None):
            text[name] = config[name]
    for name in ("rope_scaling", "rope_parameters"):
        rope = to_object(text.get(name), name)
        if rope.get("mrope_section") is not None:
            # three positions, which are one for text
            text[name] = {**rope, **{key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}}
    # an architecture's name inside is that of the decoder, or of the wrapper again
    return {**text, "architectures": None, "model_type": model_type}


def decoder_name(name: str) -> str | None:
    """Return what a tensor or linear is called in a model of text alone; None: it isn't in one."""
    if name.startswith(_OTHER_PREFIXES):
        return None
    for prefix, plain in _DECODER_PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name
