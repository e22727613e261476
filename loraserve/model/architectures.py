"""The architectures that the decoder can be: a table of what sets one apart from the next, not a class each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from loraserve.errors import UnknownArchitecture


class Bias(Enum):
    """Whether a linear adds a bias."""

    NEVER = auto()
    ALWAYS = auto()
    CONFIGURED = auto()
    """As the config's ``attention_bias`` (or ``mlp_bias``) says."""


class Window(Enum):
    """Which layers see only a window of the context."""

    NONE = auto()
    ALL = auto()
    """Every layer, when the config has a ``sliding_window``."""
    LAYERED = auto()
    """Those that ``layer_types`` (or ``use_sliding_window`` and ``max_window_layers``) name."""


@dataclass(frozen=True, slots=True)
class ArchitectureSpec:
    """A decoder of RMSNorm, rotary attention and a gated SiLU MLP, and where it differs.

    Attributes:
        qkv_bias, o_bias, mlp_bias: which linears add a bias.
        has_qk_norm: RMSNorm over each head of q and k before the rotation.
        window: which layers have a sliding window.
        default_window: the window when the config names none.
        explicit_head_dim: the head size when the config names none; None: hidden_size / num_attention_heads.
    """

    qkv_bias: Bias = Bias.NEVER
    o_bias: Bias = Bias.NEVER
    mlp_bias: Bias = Bias.NEVER
    has_qk_norm: bool = False
    window: Window = Window.NONE
    default_window: int | None = None
    explicit_head_dim: int | None = None


ARCHITECTURES: Mapping[str, ArchitectureSpec] = {
    "LlamaForCausalLM": ArchitectureSpec(qkv_bias=Bias.CONFIGURED, o_bias=Bias.CONFIGURED, mlp_bias=Bias.CONFIGURED),
    "MistralForCausalLM": ArchitectureSpec(window=Window.ALL, default_window=4096),
    "Qwen2ForCausalLM": ArchitectureSpec(qkv_bias=Bias.ALWAYS, window=Window.LAYERED, default_window=4096),
    "Qwen3ForCausalLM": ArchitectureSpec(
        qkv_bias=Bias.CONFIGURED,
        o_bias=Bias.CONFIGURED,
        has_qk_norm=True,
        window=Window.LAYERED,
        default_window=4096,
        explicit_head_dim=128,
    ),
}


def find_architecture(config: Mapping[str, Any]) -> tuple[str, ArchitectureSpec]:
    """Return the name and spec of the architecture that a ``config.json`` names.

    Raises:
        UnknownArchitecture: it names none that is in the table.
    """
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    raise UnknownArchitecture(
        f"config.json names the architectures {names!r}; this version serves {', '.join(ARCHITECTURES)}."
    )
