"""The decoder on a CPU: float32 activations, and weights in float32, 16 bits or quantized."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loraserve.model.backends.backend import DecoderLayer, Norm
from loraserve.model.config.model_config import ActivationFunction, ModelConfig
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.layers.embedding import EmbeddingTable, look_up
from loraserve.model.layers.linears import Linear, check_format, make_linear
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.norms import ResidualNorm, RMSNorm, geglu, swiglu
from loraserve.model.layers.rotary import RotaryEmbedding, rotate
from loraserve.progress import Progress
from loraserve_kernels.cpu.attention.paged import AttentionPlan, make_attention_plan, paged_attention, store_kv
from loraserve_kernels.cpu.lora.apply import HAS_NUMBA

if TYPE_CHECKING:
    from loraserve.model.backends.step_program import StepProgram
    from loraserve_kernels.common.quantized import QuantizedWeight


class CpuBackend:
    """float32 activations, which int8 linears may round.

    Weights are in float32, bfloat16, float16 or quantized.

    Raises:
        ConfigError: weights can't be kept so on this machine.
    """

    device = torch.device("cpu")
    kv_dtype = torch.float32

    def __init__(self, dtype: torch.dtype, quantize: str, *, rounded: Collection[str] = ("int8",)) -> None:
        check_format(quantize, dtype)
        self._dtype, self._quantize, self._rounded = dtype, quantize, rounded

    def linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        return make_linear(
            weight,
            bias,
            quantize=self._quantize,
            dtype=self._dtype,
            rounded=self._rounded,
        )

    def head(self, weight: Tensor | QuantizedWeight) -> Linear:
        return self.linear(weight, None)

    def norm(
        self, weight: Tensor | None, eps: float, *, delta_weight: Tensor | None = None, delta_scale: float = 1.0
    ) -> Norm:
        norm = None if weight is None else RMSNorm(weight, eps)
        if norm is not None and delta_weight is None and delta_scale == 1.0:
            return norm
        delta_norm = None if delta_weight is None else RMSNorm(delta_weight, eps)
        return ResidualNorm(norm, delta_norm=delta_norm, delta_scale=delta_scale)

    def gated(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up)

    def bind(self, config: ModelConfig, *rotaries: RotaryEmbedding) -> None:
        self._config, self._rotaries = config, rotaries
        self._gate = swiglu if config.activation is ActivationFunction.SILU else geglu

    def program(
        self, layers: Sequence[DecoderLayer], norm: Norm, head: LoraLinear | None, progress: Progress
    ) -> StepProgram | None:
        if not HAS_NUMBA:
            return None
        from loraserve.model.backends.step_program import StepProgram

        if not StepProgram.can_run(self._config):
            return None
        return StepProgram(self._config, layers, norm, head, self._rotaries, progress)

    def begin(self, inputs: ModelInputs, kv: KVTensors) -> CpuStep:
        return CpuStep(self._config, self._rotaries, inputs, kv)


class CpuStep:
    """Rotation and attention of a step, and scratch memory for what heads gather."""

    __slots__ = ("_angles", "_attended", "_config", "_inputs", "_plan")

    def __init__(
        self, config: ModelConfig, rotaries: Sequence[RotaryEmbedding], inputs: ModelInputs, kv: KVTensors
    ) -> None:
        self._config, self._inputs = config, inputs
        self._angles = [rotary.at(inputs.positions) for rotary in rotaries]
        self._plan: AttentionPlan = make_attention_plan(
            inputs.query_starts, inputs.context_lens, inputs.block_tables, kv.block_size
        )
        self._attended = torch.empty(inputs.token_ids.shape[0], config.num_heads, config.head_dim)

    def embed(self, embedding: EmbeddingTable) -> Tensor:
        return look_up(embedding, self._inputs.token_ids)

    def store(self, layer: DecoderLayer, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        self._rotate_and_store(layer, qkv, k_cache, v_cache)

    def attend(self, layer: DecoderLayer, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        paged_attention(
            self._rotate_and_store(layer, qkv, k_cache, v_cache),
            k_cache,
            v_cache,
            self._plan,
            self._attended,
            scale=self._config.attention_scale,
            sliding_window=layer.sliding_window,
            soft_cap=self._config.attention_cap,
        )
        return self._attended.view(qkv.shape[0], -1)

    def _rotate_and_store(self, layer: DecoderLayer, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Rotate queries and keys and store keys and values; return the queries.

        They are [num_tokens, num_heads, head_dim].
        """
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = qkv.view(qkv.shape[0], -1, config.head_dim)
        q, k, v = qkv[:, : config.num_heads], qkv[:, config.num_heads : num_rotated], qkv[:, num_rotated:]
        if not config.architecture.is_qk_norm_after_rope:
            self._norm_heads(layer, q, k)
        if layer.rope is not None:
            is_interleaved = config.architecture.is_rope_interleaved
            rotate(qkv[:, :num_rotated], *self._angles[layer.rope], is_interleaved=is_interleaved)
        if config.architecture.is_qk_norm_after_rope:
            self._norm_heads(layer, q, k)
        store_kv(k, v, k_cache, v_cache, self._inputs.slot_mapping)
        return q

    def _norm_heads(self, layer: DecoderLayer, q: Tensor, k: Tensor) -> None:
        """Norm queries and keys in place; no-op for a layer that doesn't."""
        if layer.q_norm is None or layer.k_norm is None:
            return
        normed_q, normed_k = (q.flatten(1), k.flatten(1)) if self._config.architecture.is_qk_norm_whole else (q, k)
        normed_q.copy_(layer.q_norm(normed_q))
        normed_k.copy_(layer.k_norm(normed_k))
