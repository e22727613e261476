"""The base model: one decoder for every architecture of the table, over paged KV and mixed adapters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.model.config import ModelConfig
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.lora import lora_linear
from loraserve.model.quantize import Linear
from loraserve.model.rotary import rotate
from loraserve.types import BaseSpec
from loraserve_kernels.attention import AttentionPlan, make_attention_plan, paged_attention, store_kv


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights. Norms are [hidden_size]; q_norm and k_norm [head_dim], where the architecture has them."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Embedding, layers, final norm and head. `forward` reads its inputs and the KV cache, and keeps no state.

    Attributes:
        spec: what other rooms may know of the base.
        dtype: of activations and KV.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: BaseSpec,
        *,
        embedding: Tensor,
        layers: tuple[DecoderLayer, ...],
        final_norm: Tensor,
        head: Linear,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.spec = spec
        self.dtype = dtype
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._cos, self._sin = (table.to(dtype) for table in config.rope.tables(spec.max_model_len))
        self._scale = config.head_dim**-0.5

    @property
    def layers(self) -> tuple[DecoderLayer, ...]:
        return self._layers

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(num_layers, num_kv_heads, head_dim)"""
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.dtype

    def forward(self, inputs: ModelInputs, kv: KVTensors) -> Tensor:
        """Compute every row, write its K and V to its slot, and return the wanted rows' logits, [num_logits, vocab_size] float32."""
        x = F.embedding(inputs.token_ids, self._embedding).to(self.dtype)
        cos = self._cos[inputs.positions][:, None, :]
        sin = self._sin[inputs.positions][:, None, :]
        plan = make_attention_plan(inputs.query_starts, inputs.context_lens, inputs.block_tables, kv.block_size)
        for i, layer in enumerate(self._layers):
            x += self._attention(i, layer, self._norm(x, layer.input_norm), cos, sin, plan, inputs, kv)
            x += self._mlp(i, layer, self._norm(x, layer.post_attention_norm), inputs)
        rows = self._norm(x[inputs.logits_rows], self._final_norm)
        return self._head(rows).float()

    def _attention(
        self,
        i: int,
        layer: DecoderLayer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        plan: AttentionPlan,
        inputs: ModelInputs,
        kv: KVTensors,
    ) -> Tensor:
        config = self.config
        num_q, num_kv, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = lora_linear(layer.qkv, x, inputs.lora, "qkv", i).view(-1, num_q + 2 * num_kv, head_dim)
        qk, v = qkv[:, : num_q + num_kv], qkv[:, num_q + num_kv :]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat((self._norm(qk[:, :num_q], layer.q_norm), self._norm(qk[:, num_q:], layer.k_norm)), dim=1)
        qk = rotate(qk, cos, sin)
        store_kv(qk[:, num_q:], v, kv.k[i], kv.v[i], inputs.slot_mapping)
        out = torch.empty((x.shape[0], num_q, head_dim), dtype=self.dtype)
        paged_attention(qk[:, :num_q], kv.k[i], kv.v[i], plan, out, scale=self._scale, sliding_window=config.windows[i])
        return lora_linear(layer.o, out.view(x.shape[0], -1), inputs.lora, "o", i)

    def _mlp(self, i: int, layer: DecoderLayer, x: Tensor, inputs: ModelInputs) -> Tensor:
        gate, up = lora_linear(layer.gate_up, x, inputs.lora, "gate_up", i).chunk(2, dim=-1)
        return lora_linear(layer.down, F.silu(gate) * up, inputs.lora, "down", i)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)
