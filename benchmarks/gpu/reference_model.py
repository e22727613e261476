"""A whole model in plain torch, one sequence at a time, in the dtype of its weights; each adapter
added as W x + scaling · B (A x).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.model.config.model_config import ModelConfig
from loraserve_kernels.cpu.lora.layout import LoraModule

Adapter = Mapping[tuple[int, str], LoraModule]


class ReferenceModel:
    """Llama and Qwen3 with default rotary positions and no sliding window.

    Args:
        weights: by their names in a checkpoint.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        self._weights = {name: tensor.double() for name, tensor in weights.items()}

    def logits(self, token_ids: Sequence[int], adapter: Adapter | None) -> Tensor:
        """[num_tokens, vocab_size] float64."""
        config, architecture = self._config, self._config.architecture
        embedding = self._weights[architecture.embedding]
        hidden = embedding[torch.tensor(token_ids, device=embedding.device)]
        for layer in range(config.num_layers):
            hidden = hidden + self._attention(
                layer, self._norm(self._name(layer, architecture.attention_norm), hidden), adapter
            )
            x = self._norm(self._name(layer, architecture.mlp_norm), hidden)
            gate, up = (self._linear(layer, module, x, adapter) for module in ("gate_proj", "up_proj"))
            hidden = hidden + self._linear(layer, "down_proj", F.silu(gate) * up, adapter)
        return self._norm(architecture.norm, hidden) @ self._weights[architecture.head].T

    def _attention(self, layer: int, x: Tensor, adapter: Adapter | None) -> Tensor:
        config, architecture = self._config, self._config.architecture
        q, k, v = (
            self._linear(layer, module, x, adapter).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
            for module in ("q_proj", "k_proj", "v_proj")
        )
        if architecture.has_qk_norm:
            q = self._norm(self._name(layer, architecture.q_norm), q)
            k = self._norm(self._name(layer, architecture.k_norm), k)
        group = config.num_heads // config.num_kv_heads
        k, v = self._rotated(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        attended = F.scaled_dot_product_attention(self._rotated(q), k, v, is_causal=True)
        return self._linear(layer, "o_proj", attended.transpose(0, 1).flatten(1), adapter)

    def _rotated(self, heads: Tensor) -> Tensor:
        size = self._config.head_dim
        frequencies = self._config.rope.theta ** -(torch.arange(0, size, 2, device=heads.device).double() / size)
        angles = torch.arange(heads.shape[1], device=heads.device).double()[:, None] * frequencies
        first, second = heads.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _linear(self, layer: int, module: str, x: Tensor, adapter: Adapter | None) -> Tensor:
        name = self._name(layer, self._config.architecture.module_paths[module])
        y = F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))
        lora = adapter.get((layer, module)) if adapter is not None else None
        return y if lora is None else y + lora.scaling * (x @ lora.lora_a.T) @ lora.lora_b.T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).sqrt() * self._weights[name]

    def _name(self, layer: int, name: str) -> str:
        return f"{self._config.architecture.layers}.{layer}.{name}"
