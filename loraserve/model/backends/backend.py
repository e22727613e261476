"""What the decoder asks of a device: linears, norms, and a step's attention. One object per loaded base; two kinds, this file's for CPUs and `gpu_backend`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.errors import ConfigError
from loraserve.model.config.model_config import Activation, ModelConfig
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.layers.linears import Linear, check_format, make_linear
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.mlp import GatedMlp, Mlp
from loraserve.model.layers.norms import ResidualNorm, RMSNorm, geglu, swiglu
from loraserve.model.layers.rotary import RotaryEmbedding, rotate
from loraserve_kernels.cpu.attention.paged import AttentionPlan, make_attention_plan, paged_attention, store_kv

if TYPE_CHECKING:
    from loraserve_kernels.common.quantized import QuantizedWeight


class Norm(Protocol):
    """An RMSNorm before a layer's linears, and the sum of the residual stream that comes before it, with what is done to the delta first."""

    def __call__(self, hidden: Tensor, /) -> Tensor:
        """Return the normed rows in what linears take; valid until `hidden` changes."""
        ...

    def after_adding(self, hidden: Tensor, delta: Tensor, /) -> Tensor:
        """Add `delta`, which is spent, to `hidden` in place; return the normed sum, valid until `hidden` changes."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights.

    Attributes:
        q_norm, k_norm: of each head, or of all together; None where the architecture has none.
        sliding_window: None: the layer attends to the whole context.
        rope: which of the model's rotary embeddings turns queries and keys; None: none does.
    """

    attention_norm: Norm
    qkv: LoraLinear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: LoraLinear
    mlp_norm: Norm
    mlp: Mlp
    sliding_window: int | None
    rope: int | None = 0

    def linear(self, site: str) -> LoraLinear | None:
        """Return the linears of a site; None where the layer has none: of an MLP, where it has experts."""
        if site in ("qkv", "o"):
            return self.qkv if site == "qkv" else self.o
        if not isinstance(self.mlp, GatedMlp):
            return None
        return self.mlp.gate_up if site == "gate_up" else self.mlp.down


class Step(Protocol):
    """What all layers of one step share."""

    def embed(self, embedding: Tensor) -> Tensor:
        """Return the rows' residual stream before the first layer, [num_tokens, hidden_size] float32."""
        ...

    def store(self, layer: DecoderLayer, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Rotate queries and keys in place, and write keys and values to the cache."""
        ...

    def attend(self, layer: DecoderLayer, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """`store`, then return what the rows' heads gather from the cache, [num_tokens, num_heads * head_dim]; valid until the next call."""
        ...


class Backend(Protocol):
    """How one kind of device keeps the base's weights and computes its steps.

    Attributes:
        device: where weights, cache and logits are.
        kv_dtype: of the cache.
    """

    device: torch.device
    kv_dtype: torch.dtype

    def linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        """Return the linear of these weights; neither is kept."""
        ...

    def head(self, weight: Tensor | QuantizedWeight) -> Linear:
        """Return the linear that makes logits; they're float32."""
        ...

    def norm(
        self, weight: Tensor | None, eps: float, *, delta_weight: Tensor | None = None, delta_scale: float = 1.0
    ) -> Norm:
        """Return the norm with this weight; None: the sum goes on as it is.

        Before they are added, deltas pass the norm with `delta_weight`, where there is one, and are multiplied with `delta_scale`.
        """
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return ``activation(gate) * up`` for gate_up [num_tokens, 2 * size], whose first half is the gate."""
        ...

    def bind(self, config: ModelConfig, *rotaries: RotaryEmbedding) -> None:
        """Take what `begin` needs to know of the model, its layers' rotary embeddings among it; called once."""
        ...

    def begin(self, inputs: Any, kv: KVTensors) -> Step:
        """Make what a step's layers share."""
        ...


def make_backend(device: str, dtype: torch.dtype, quantize: str, *, rounds_activations: bool = True) -> Backend:
    """Return the backend of a kind of device.

    Args:
        rounds_activations: whether a CPU rounds what int8 weights by output channel multiply; a GPU never does.

    Raises:
        ConfigError: there's no such device here, or it can't keep weights so.
    """
    if device == "cpu":
        return CpuBackend(dtype, quantize, rounds_activations=rounds_activations)
    if device == "cuda":
        # Triton is loaded for GPUs alone
        from loraserve.model.backends.gpu_backend import GpuBackend

        # without a GPU only Triton's interpreter brings us here
        return GpuBackend(torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype, quantize)
    raise ConfigError(f"The device {device!r} isn't available; expected cpu or cuda.")


class CpuBackend:
    """float32 activations, which int8 linears may round; weights in float32, bfloat16, float16 or quantized.

    Raises:
        ConfigError: weights can't be kept so on this machine.
    """

    device = torch.device("cpu")
    kv_dtype = torch.float32

    def __init__(self, dtype: torch.dtype, quantize: str, *, rounds_activations: bool = True) -> None:
        check_format(quantize, dtype)
        self._dtype, self._quantize, self._rounds_activations = dtype, quantize, rounds_activations

    def linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        return make_linear(
            weight,
            bias,
            quantize=self._quantize,
            dtype=self._dtype,
            rounds_activations=self._rounds_activations,
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
        self._gate = swiglu if config.activation is Activation.SILU else geglu

    def begin(self, inputs: ModelInputs, kv: KVTensors) -> CpuStep:
        return CpuStep(self._config, self._rotaries, inputs, kv)


class CpuStep:
    """One step's rotation and attention, and scratch memory for what heads gather."""

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

    def embed(self, embedding: Tensor) -> Tensor:
        return F.embedding(self._inputs.token_ids, embedding).float()

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
        """Return the queries, [num_tokens, num_heads, head_dim]."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = qkv.view(qkv.shape[0], -1, config.head_dim)
        q, k, v = qkv[:, : config.num_heads], qkv[:, config.num_heads : num_rotated], qkv[:, num_rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            normed_q, normed_k = (q.flatten(1), k.flatten(1)) if config.architecture.is_qk_norm_whole else (q, k)
            normed_q.copy_(layer.q_norm(normed_q))
            normed_k.copy_(layer.k_norm(normed_k))
        if layer.rope is not None:
            rotate(qkv[:, :num_rotated], *self._angles[layer.rope])
        store_kv(k, v, k_cache, v_cache, self._inputs.slot_mapping)
        return q
