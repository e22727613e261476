"""A model of transformers without weights, and the conditions under which it can be served.

Transformers is imported here, by the engine's process alone, and only when a base needs it. No
code that comes with a checkpoint is ever run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loraserve.errors import UnknownArchitecture
from loraserve.model.config.model_config import read_object
from loraserve.model.modelling import attention
from loraserve.model.modelling.attention import HOLDER, Attention
from loraserve.model.modelling.mixers import MIXERS, divert, find_mixers

_STATEFUL = ("linear_attention", "conv", "mamba", "recurrent", "ssm", "hybrid")
"""Words in ``layer_types`` of layers that keep a recurrent state, which `mixers` may know."""
_UNKNOWN = ("chunked_attention", "compressed")
"""The same of layers whose keys and values are of something else than a context or a window."""
_UNKNOWN_STATE = f"state beside keys and values, and in none of the modules that are known here: {', '.join(MIXERS)}"
_EXTENDING = ("dynamic", "longrope")
"""Ropes that turn all of a batch by its longest context, once that passes the original one."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model of transformers, whose parameters are on the meta device.

    Attributes:
        architecture: name of its class.
        model: buffers that its config decides are filled.
        config: transformers'.
        layers_path: where the layers are in the model.
        num_layers: all layers.
        attention: what its attention modules and mixers hold.
    """

    architecture: str
    model: Any
    config: Any
    layers_path: str
    num_layers: int
    attention: Attention

    def layer_modules(self) -> Iterator[tuple[int, str, nn.Module]]:
        """Yield each layer's modules: (layer, path inside it, module)."""
        for layer, block in enumerate(self.model.get_submodule(self.layers_path)):
            for path, module in block.named_modules():
                yield layer, path, module


def read_modelled_config(model_dir: Path) -> Any:
    """Return transformers' config of a directory.

    Raises:
        UnknownArchitecture: it doesn't know the model.
        ModelError: there is no config, or it isn't a JSON object.
    """
    model_type = read_object(model_dir / "config.json").get("model_type")
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers import __version__ as version
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if model_type not in CONFIG_MAPPING:
        raise UnknownArchitecture(
            f"config.json has the model_type {str(model_type)[:100]!r}, which transformers {version} doesn't have.",
            hint="Install a release that has it, or choose another base model. Code that comes with a checkpoint is "
            "never run.",
        )
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # transformers raises what its readers meet: ValueError, KeyError, TypeError
        raise UnknownArchitecture(
            f"transformers can't read config.json: {str(error).splitlines()[0][:300]}",
            hint="Check config.json.",
        ) from error


def build_skeleton(config: Any) -> Skeleton:
    """Return the model of a config, without weights.

    Args:
        config: what `read_modelled_config` returned; it is changed.

    Raises:
        UnknownArchitecture: it can't be served; the message says what is missing.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface

    config = _text_half(config)
    name = _check_config(config)
    AttentionInterface.register(attention.NAME, attention.attend)
    AttentionMaskInterface.register(attention.NAME, attention.mask)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    _check_class(name, model_class)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention.NAME, trust_remote_code=False
            )
    except Exception as error:
        raise UnknownArchitecture(
            f"{name} can't be built by transformers: {type(error).__name__}: {str(error).splitlines()[0][:300]}",
            hint="Check config.json.",
        ) from error
    model.eval().requires_grad_(False)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    _fill_buffers(name, model)
    layers_path, num_layers, holder = _find_layers(name, model)
    return Skeleton(name, model, model.config, layers_path, num_layers, holder)


def max_position(config: Any) -> int | None:
    """Return the longest context of a config; None: it states none."""
    numbers = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    found = next((number for number in numbers if isinstance(number, int) and number > 0), None)
    original = [_original_context(rope) for rope in _ropes(config) if rope.get("rope_type") in _EXTENDING]
    return min([number for number in (found, *original) if number is not None], default=None)


def _original_context(rope: Mapping[str, Any]) -> int | None:
    number = rope.get("original_max_position_embeddings")
    return number if isinstance(number, int) and number > 0 else None


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    found = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    return nested or [found]


def _text_half(config: Any) -> Any:
    """Return the config of the text decoder, where transformers can build it without images."""
    from transformers import AutoModelForCausalLM

    text = getattr(config, "text_config", None)
    mapping = AutoModelForCausalLM._model_mapping
    if text is None or type(config) not in mapping or mapping[type(config)].config_class is not type(text):
        return config
    text.architectures = config.architectures
    text.tie_word_embeddings = bool(text.tie_word_embeddings or getattr(config, "tie_word_embeddings", False))
    return text


def _check_config(config: Any) -> str:
    """Return the architecture's name.

    Raises:
        UnknownArchitecture: transformers has no causal model for it, or layers need other state.
    """
    from transformers import AutoModelForCausalLM

    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    problem = None
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        problem = "has an encoder, which isn't served"
    elif any(getattr(config, part, None) is not None for part in ("vision_config", "audio_config")):
        problem = "reads images or sound; of such models, only those of the table in docs/bases.md are served"
    elif type(config) not in AutoModelForCausalLM._model_mapping:
        problem = "has no causal language model in transformers"
    unknown = _layer_kinds(config, _UNKNOWN)
    if problem is None and unknown:
        problem = f"has layers with state beside keys and values ({', '.join(unknown)}), which isn't kept here"
    if problem is None and getattr(config, "alibi", False):
        problem = "has positions in its attention's biases (alibi), which isn't implemented"
    if problem is not None:
        raise UnknownArchitecture(f"{name} {problem}.", hint="Choose another base model.")
    return str(name)


def _layer_kinds(config: Any, words: Iterable[str]) -> list[str]:
    """Return the kinds of layers in a config that have one of these words."""
    kinds = getattr(config, "layer_types", None) or ()
    return sorted({kind for kind in kinds if any(word in kind for word in words)})


def _check_class(name: str, model_class: Any) -> None:
    # hybrids don't claim that they take one, but the first batch would show that theirs is unused
    if not MIXERS.keys().isdisjoint(vars(sys.modules[model_class.__module__])):
        return
    problem = None
    if model_class._is_stateful:
        problem = f"keeps {_UNKNOWN_STATE}"
    elif not model_class._supports_attention_backend:
        problem = "doesn't take another attention function in transformers"
    if problem is not None:
        raise UnknownArchitecture(f"{name} {problem}.", hint="Choose another base model.")


def _fill_buffers(name: str, model: Any) -> None:
    """Compute the buffers that no checkpoint holds, as transformers does when it loads one."""
    stored = set(model.state_dict())
    found = [
        (path, module, own)
        for path, module in model.named_modules()
        if (own := [key for key, buffer in module._buffers.items() if buffer is not None])
    ]
    for _, module, own in found:
        for key in own:
            value = torch.empty_like(module._buffers[key], device="cpu")
            module._buffers[key] = value.fill_(torch.nan) if value.is_floating_point() else value.zero_()
    # some are computed by the model that has the module, of all its layers
    owners = {id(owner): owner for path, _, _ in found for owner in (_owner(model, path),)}
    with torch.no_grad():
        for path, module, _ in found:
            _owner(model, path)._init_weights(module)
        for owner in owners.values():
            owner._init_weights(owner)
    for path, module, own in found:
        for key in own:
            whole = f"{path}.{key}" if path else key
            value = module._buffers[key]
            if whole not in stored and value.is_floating_point() and not bool(value.isfinite().all()):
                raise UnknownArchitecture(
                    f"{name} has a buffer {whole} that transformers doesn't compute from the config.",
                    hint="Choose another base model.",
                )


def _owner(model: Any, path: str) -> Any:
    """Return the innermost of transformers' models that has the module."""
    found, current = model, model
    for part in path.split(".") if path else ():
        current = getattr(current, part)
        if hasattr(current, "_init_weights") and hasattr(current, "config"):
            found = current
    return found


def _find_layers(name: str, model: Any) -> tuple[str, int, Attention]:
    """Return where the layers are, how many there are, and what their modules hold.

    Raises:
        UnknownArchitecture: a layer neither attends, once, nor has a mixer that is known.
    """
    attending = {
        path: int(module.layer_idx)
        for path, module in model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and any(hasattr(module, part) for part in ("is_causal", "scaling", "num_key_value_groups"))
    }
    mixers = find_mixers(model)
    stateful = _layer_kinds(model.config, _STATEFUL)
    if stateful and not mixers:
        raise UnknownArchitecture(
            f"{name} has layers ({', '.join(stateful)}) that keep {_UNKNOWN_STATE}.", hint="Choose another base model."
        )
    num_layers = int(getattr(model.config, "num_hidden_layers", 0))
    kept = (*attending, *mixers)
    blocks = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and all(any(inner.startswith(f"{path}.{i}.") for inner in kept) for i in range(num_layers))
    ]
    layers = sorted(attending.values())
    problem = None
    if not attending:
        problem = "has no layer that attends"
    elif not blocks or layers != sorted(set(layers)):
        problem = "has layers without attention, or several in one, which isn't kept here"
    if problem is not None:
        raise UnknownArchitecture(f"{name} {problem}.", hint="Choose another base model.")
    holder = Attention(tuple(layers))
    for path in attending:
        setattr(model.get_submodule(path), HOLDER, holder)
    for mixer in mixers.values():
        divert(mixer, holder.running)
    return min(blocks, key=len), num_layers, holder


def log_versions() -> None:
    """Log which release of transformers computes."""
    import transformers

    logging.getLogger(__name__).info("transformers %s computes the base's layers", transformers.__version__)
