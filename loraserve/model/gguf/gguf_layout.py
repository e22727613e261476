"""Architectures of GGUF files, and their tensors by the names of a checkpoint.

Source: llama.cpp's `convert_hf_to_gguf.py`, whose way this goes back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from loraserve.errors import ModelError, UnknownArchitecture
from loraserve.model.config.architecture import Architecture
from loraserve.model.config.architectures import ARCHITECTURES
from loraserve.model.gguf.gguf_file import Gguf, GgufTensor

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensor of the divisors of Llama 3's frequencies, which elsewhere are a part of the config."""
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<name>.+)")
_SUFFIXES = (".weight", ".bias")
_LINEARS: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_EXPERTS: Mapping[str, str] = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
_SHARED: Mapping[str, str] = {"ffn_gate_shexp": "gate", "ffn_up_shexp": "up", "ffn_down_shexp": "down"}


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """Names and changes of a checkpoint's tensors in files of an architecture of llama.cpp.

    Attributes:
        architecture: name of the row of `ARCHITECTURES`; `with_experts` where the file has some,
            `with_window` where it states a sliding window, `with_temperature` where it states how
            queries are scaled by their position.
        names: path inside a layer by the file's name, in addition to those that all have.
        is_permuted: whether the rows of queries and keys are in the order that turns neighbours.
        norm_offset: what was added to the norms' weights.
    """

    architecture: str
    with_experts: str | None = None
    with_window: str | None = None
    with_temperature: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    is_permuted: bool = False
    norm_offset: float = 0.0

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of all rows of `ARCHITECTURES` that such files may be of."""
        names = (self.architecture, self.with_experts, self.with_window, self.with_temperature)
        return tuple(name for name in names if name is not None)


_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_OUT_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYOUTS: Mapping[str, GgufLayout] = {
    "llama": GgufLayout("LlamaForCausalLM", "MixtralForCausalLM", names=_PRE_NORMS, is_permuted=True),
    "mistral3": GgufLayout(
        "MistralForCausalLM", with_temperature="Ministral3ForCausalLM", names=_PRE_NORMS, is_permuted=True
    ),
    "qwen2": GgufLayout("Qwen2ForCausalLM", names=_PRE_NORMS),
    "qwen2vl": GgufLayout("Qwen2ForCausalLM", names=_PRE_NORMS),
    "qwen2moe": GgufLayout("Qwen2MoeForCausalLM", "Qwen2MoeForCausalLM", names=_PRE_NORMS),
    "qwen3": GgufLayout("Qwen3ForCausalLM", names=_PRE_NORMS),
    "qwen3vl": GgufLayout("Qwen3ForCausalLM", names=_PRE_NORMS),
    "qwen3moe": GgufLayout("Qwen3MoeForCausalLM", "Qwen3MoeForCausalLM", names=_PRE_NORMS),
    "granite": GgufLayout("GraniteForCausalLM", names=_PRE_NORMS, is_permuted=True),
    "smollm3": GgufLayout("SmolLM3ForCausalLM", names=_PRE_NORMS, is_permuted=True),
    "olmo2": GgufLayout("Olmo2ForCausalLM", with_window="Olmo3ForCausalLM", names=_OUT_NORMS),
    "olmoe": GgufLayout("OlmoeForCausalLM", "OlmoeForCausalLM", names=_PRE_NORMS),
    "exaone4": GgufLayout("Exaone4ForCausalLM", names=_OUT_NORMS),
    "seed_oss": GgufLayout(
        "SeedOssForCausalLM",
        names={"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    ),
    "ernie4_5": GgufLayout("Ernie4_5ForCausalLM", names=_PRE_NORMS),
    "hunyuan-dense": GgufLayout(
        "HunYuanDenseV1ForCausalLM",
        names={
            **_PRE_NORMS,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "glm4": GgufLayout(
        "Glm4ForCausalLM",
        names={
            **_PRE_NORMS,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "gemma": GgufLayout("GemmaForCausalLM", names=_PRE_NORMS, norm_offset=1.0),
    "gemma2": GgufLayout("Gemma2ForCausalLM", names=_GEMMA, norm_offset=1.0),
    "gemma3": GgufLayout("Gemma3ForCausalLM", names=_GEMMA, norm_offset=1.0),
    "phi3": GgufLayout(
        "Phi3ForCausalLM", names={**_PRE_NORMS, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
}
"""Layouts by `general.architecture`."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """Tensor of a file under its name in a checkpoint.

    Attributes:
        expert: number of the expert whose slice of a tensor of all experts this is; None: it is the
            whole tensor.
        num_heads: whose rows must be put back into their order; 0: they are in it.
        offset: what was added to its numbers.
    """

    name: str
    tensor: GgufTensor
    expert: int | None = None
    num_heads: int = 0
    offset: float = 0.0


def find_layout(gguf: Gguf) -> GgufLayout:
    """Find the layout of a file.

    Raises:
        UnknownArchitecture: none is known for its `general.architecture`.
    """
    name = gguf.architecture
    if name not in LAYOUTS:
        raise UnknownArchitecture(
            f"{gguf.files[0]} has the architecture {name[:200]!r} (general.architecture); expected one of "
            f"{', '.join(LAYOUTS)}.",
            hint="Choose a base model of one of these architectures.",
        )
    return LAYOUTS[name]


def layer_paths(layout: GgufLayout) -> Mapping[str, str]:
    """Map the file's names of the linears and the norms to the paths inside a layer."""
    return {**_LINEARS, **layout.names}


def has_experts(gguf: Gguf) -> bool:
    """Check whether the layers have mixtures of experts."""
    return any(name.endswith("_exps.weight") for name in gguf.tensors)


def architecture_of(gguf: Gguf) -> Architecture:
    """Find the row of the table that a file's base is.

    Raises:
        UnknownArchitecture: as `find_layout`.
    """
    layout = find_layout(gguf)
    name: str | None = layout.architecture
    if has_experts(gguf):
        name = layout.with_experts
    elif layout.with_window is not None and gguf.value("attention.sliding_window"):
        name = layout.with_window
    elif layout.with_temperature is not None and gguf.value("attention.temperature_scale"):
        name = layout.with_temperature
    if name is None:
        raise UnknownArchitecture(
            f"{gguf.files[0]} has experts, which aren't implemented for {gguf.architecture}.",
            hint="Choose a base without experts.",
        )
    return ARCHITECTURES[name]


def place_tensors(gguf: Gguf) -> Iterator[PlacedTensor]:
    """Yield every tensor under its name in a checkpoint, in the order of the file.

    Raises:
        UnknownArchitecture: as `find_layout`.
        ModelError: a tensor has a name that the architecture doesn't.
    """
    num_heads = gguf.count("attention.head_count")
    num_kv_heads = gguf.count("attention.head_count_kv", num_heads)
    layout, architecture = find_layout(gguf), architecture_of(gguf)
    whole = {"token_embd.weight": architecture.embedding, "output.weight": architecture.head}
    names = layer_paths(layout)
    for tensor in gguf.tensors.values():
        if tensor.name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS):
            continue
        if tensor.name == "output_norm.weight":
            yield PlacedTensor(architecture.norm, tensor, offset=layout.norm_offset)
            continue
        if tensor.name in whole:
            yield PlacedTensor(whole[tensor.name], tensor)
            continue
        match = _BLOCK.fullmatch(tensor.name)
        suffix = next((suffix for suffix in _SUFFIXES if tensor.name.endswith(suffix)), "")
        if match is None or not suffix:
            raise _unknown(tensor)
        name, prefix = match["name"].removesuffix(suffix), f"{architecture.layers}.{match['layer']}."
        if architecture.experts is not None and name in _EXPERTS:
            for expert in range(tensor.shape[0]):
                linear = getattr(architecture.experts, _EXPERTS[name])
                path = f"{prefix}{architecture.experts.experts}.{expert}.{linear}{suffix}"
                yield PlacedTensor(path, tensor, expert)
            continue
        if architecture.experts is not None and name == "ffn_gate_inp":
            yield PlacedTensor(f"{prefix}{architecture.experts.router}{suffix}", tensor)
            continue
        if architecture.experts is not None and architecture.experts.shared is not None:
            if name in _SHARED:
                linear = getattr(architecture.experts, _SHARED[name])
                yield PlacedTensor(f"{prefix}{architecture.experts.shared}.{linear}{suffix}", tensor)
                continue
            if name == "ffn_gate_inp_shexp":
                # the converter leaves out a dimension of 1
                row = replace(tensor, shape=(1, tensor.shape[-1]))
                yield PlacedTensor(f"{prefix}{architecture.experts.shared_gate}{suffix}", row)
                continue
        if name not in names:
            raise _unknown(tensor)
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(name, 0) if layout.is_permuted else 0
        offset = layout.norm_offset if name.endswith("_norm") else 0.0
        yield PlacedTensor(f"{prefix}{names[name]}{suffix}", tensor, None, heads, offset)


def _unknown(tensor: GgufTensor) -> ModelError:
    return ModelError(
        f"{tensor.file} holds the tensor {tensor.name}, which this architecture doesn't have here: ignoring tensors "
        "would change the answers.",
        hint="Give the Hugging Face directory of the base, or convert it again with a current llama.cpp.",
    )
