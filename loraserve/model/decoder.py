"""The one decoder of every architecture: token ids in, logits out, keys and values written to the paged cache on the way."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.errors import InvariantViolation
from loraserve.model.config import ModelConfig
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.layers import RMSNorm, swiglu
from loraserve.model.lora import LoraLinear, select_rows
from loraserve.model.quantize import Linear
from loraserve.model.rotary import RotaryEmbedding, rotate
from loraserve.types import BaseSpec
from loraserve_kernels.attention import AttentionPlan, make_attention_plan, paged_attention, store_kv
from loraserve_kernels.plan import LoraPlan


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights.

    Attributes:
        q_norm, k_norm: None where the architecture has none.
        sliding_window: None: the layer attends to the whole context.
    """

    attention_norm: RMSNorm
    qkv: LoraLinear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: LoraLinear
    mlp_norm: RMSNorm
    gate_up: LoraLinear
    down: LoraLinear
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one step share. `attended` is scratch: [num_tokens, num_heads, head_dim]."""

    cos: Tensor
    sin: Tensor
    attention: AttentionPlan
    slot_mapping: Tensor
    attended: Tensor


class Decoder:
    """The base model, resident and immutable. One thread calls `forward`.

    Attributes:
        spec: what others need to know of it.
        kv_shape: (num_layers, num_kv_heads, head_dim) of the cache that `forward` writes.
        kv_dtype: of that cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: BaseSpec,
        *,
        embedding: Tensor,
        layers: tuple[DecoderLayer, ...],
        norm: RMSNorm,
        head: Linear,
        rotary: RotaryEmbedding,
    ) -> None:
        self.spec = spec
        self.kv_shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        self.kv_dtype = torch.float32
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rotary = rotary
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._scale = config.head_dim**-0.5

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, kv: KVTensors) -> Tensor:
        """Return the logits [num_logits, vocab_size] float32 of ``inputs.logits_rows``; every row's keys and values are in the cache afterwards.

        Args:
            inputs: the step's rows; positions and slots below what the model and the cache have, ``logits_rows`` ascending.
            kv: the cache. Slots past a sequence's context are neither read nor written.
        """
        num_tokens, rows = inputs.token_ids.shape[0], inputs.logits_rows
        cos, sin = self._rotary.at(inputs.positions)
        step = _Step(
            cos=cos,
            sin=sin,
            attention=make_attention_plan(inputs.query_starts, inputs.context_lens, inputs.block_tables, kv.block_size),
            slot_mapping=inputs.slot_mapping,
            attended=torch.empty(num_tokens, self._num_heads, self._head_dim),
        )
        hidden = F.embedding(inputs.token_ids, self._embedding).float()
        last = len(self._layers) - 1
        for i in range(last):
            layer = self._layers[i]
            attended = self._attend(layer, hidden, kv.k[i], kv.v[i], step, inputs.lora)
            _finish(layer, hidden, attended, inputs.lora)
        layer, lora = self._layers[last], inputs.lora
        if rows.shape[0] == 0:
            self._write_kv(layer, hidden, kv.k[last], kv.v[last], step, lora)
            return hidden.new_empty(0, self.spec.vocab_size)
        attended = self._attend(layer, hidden, kv.k[last], kv.v[last], step, lora)
        if rows.shape[0] < num_tokens:
            # nobody reads the other rows of the last layer
            hidden, attended, lora = hidden[rows], attended[rows], _select(lora, rows)
        _finish(layer, hidden, attended, lora)
        return self._head(self._norm(hidden))

    def _write_kv(
        self, layer: DecoderLayer, hidden: Tensor, k_cache: Tensor, v_cache: Tensor, step: _Step, lora: LoraPlan | None
    ) -> Tensor:
        """Write the rows' keys and values to the cache and return their queries, [num_tokens, num_heads, head_dim]."""
        qkv = layer.qkv(layer.attention_norm(hidden), lora).view(hidden.shape[0], -1, self._head_dim)
        num_rotated = self._num_heads + self._num_kv_heads
        q, k, v = qkv[:, : self._num_heads], qkv[:, self._num_heads : num_rotated], qkv[:, num_rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q.copy_(layer.q_norm(q))
            k.copy_(layer.k_norm(k))
        rotate(qkv[:, :num_rotated], step.cos, step.sin)
        store_kv(k, v, k_cache, v_cache, step.slot_mapping)
        return q

    def _attend(
        self, layer: DecoderLayer, hidden: Tensor, k_cache: Tensor, v_cache: Tensor, step: _Step, lora: LoraPlan | None
    ) -> Tensor:
        """Return what the rows' heads gather from the cache, [num_tokens, num_heads * head_dim]; valid until the next layer's."""
        q = self._write_kv(layer, hidden, k_cache, v_cache, step, lora)
        paged_attention(
            q,
            k_cache,
            v_cache,
            step.attention,
            step.attended,
            scale=self._scale,
            sliding_window=layer.sliding_window,
        )
        return step.attended.view(hidden.shape[0], -1)


def _finish(layer: DecoderLayer, hidden: Tensor, attended: Tensor, lora: LoraPlan | None) -> None:
    """Add to `hidden`, in place, what the layer computes from what its heads gathered."""
    hidden.add_(layer.o(attended, lora))
    hidden.add_(layer.down(swiglu(layer.gate_up(layer.mlp_norm(hidden), lora)), lora))


def _select(lora: LoraPlan | None, rows: Tensor) -> LoraPlan | None:
    if lora is None:
        return None
    wanted: list[int] = rows.tolist()
    if any(a >= b for a, b in pairwise(wanted)):
        raise InvariantViolation(f"logits_rows must ascend; they are {wanted[:16]}")
    return select_rows(lora, wanted)
