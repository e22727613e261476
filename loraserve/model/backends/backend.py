"""Interfaces between the decoder and a device: linears, norms, and a step's attention.

One backend per loaded base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from loraserve.model.config.model_config import ModelConfig
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.layers.embedding import EmbeddingTable
from loraserve.model.layers.experts import MixtureOfExperts
from loraserve.model.layers.linears import Linear
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.mlp import GatedMlp, Mlp
from loraserve.model.layers.norms import RMSNorm
from loraserve.model.layers.rotary import RotaryEmbedding
from loraserve.progress import Progress

if TYPE_CHECKING:
    from loraserve_kernels.common.quantized import QuantizedWeight


class Norm(Protocol):
    """An RMSNorm before a layer's linears, and the sum of the residual stream before it.

    It decides what is done to the delta first.
    """

    def __call__(self, hidden: Tensor, /) -> Tensor:
        """Norm the rows to what linears take; valid until `hidden` changes."""
        ...

    def after_adding(self, hidden: Tensor, delta: Tensor, /) -> Tensor:
        """Add `delta`, which is spent, to `hidden` in place; return the normed sum.

        It is valid until `hidden` changes.
        """
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of a layer.

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
        """Look up the linears of a site; None where the layer has none.

        Of experts, the shared one's are those of an MLP.
        """
        if site in ("qkv", "o"):
            return self.qkv if site == "qkv" else self.o
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp.linear(site)
        if not isinstance(self.mlp, GatedMlp):
            return None
        return self.mlp.gate_up if site == "gate_up" else self.mlp.down


class BackendStep(Protocol):
    """State that all layers of a step share."""

    def embed(self, embedding: EmbeddingTable) -> Tensor:
        """Embed the rows: their residual stream before the first layer.

        It is [num_tokens, hidden_size] float32.
        """
        ...

    def store(self, layer: DecoderLayer, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Rotate queries and keys in place, and write keys and values to the cache."""
        ...

    def attend(self, layer: DecoderLayer, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Store the keys and values, then return what the rows' heads gather from the cache.

        That is [num_tokens, num_heads * head_dim]; valid until the next call.
        """
        ...


class LayersProgram(Protocol):
    """Program of all layers of a step on a CPU. One thread at a time calls its methods."""

    def takes(self, kv: KVTensors) -> bool:
        """Check whether it reads this cache."""
        ...

    def hidden(self, num_rows: int) -> Tensor:
        """Provide the memory from which `run` reads the residual stream of a step's rows.

        It is [num_rows, hidden_size] float32, before the first layer.
        """
        ...

    def run(self, inputs: ModelInputs, kv: KVTensors) -> tuple[Tensor | None, Tensor]:
        """Compute a step from `hidden`; keys and values are in the cache afterwards.

        Returns:
            The logits, [num_kept, vocab_size] float32, in memory of their own, unscaled, with
            adapters' heads; None where the step pools, or keeps no row. And the kept rows after the
            last norm, [num_kept, hidden_size] float32, valid until the next step.
        """
        ...


class Backend(Protocol):
    """Way in which a kind of device keeps the base's weights and computes its steps.

    Attributes:
        device: where weights, cache and logits are.
        kv_dtype: of the cache.
    """

    device: torch.device
    kv_dtype: torch.dtype

    def linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        """Build the linear of these weights; neither is kept."""
        ...

    def head(self, weight: Tensor | QuantizedWeight) -> Linear:
        """Build the linear that makes logits; they're float32."""
        ...

    def norm(
        self, weight: Tensor | None, eps: float, *, delta_weight: Tensor | None = None, delta_scale: float = 1.0
    ) -> Norm:
        """Build the norm with this weight; None: the sum stays as it is.

        Before they are added, deltas pass the norm with `delta_weight`, where there is one, and are
        multiplied with `delta_scale`.
        """
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """Compute ``activation(gate) * up`` for gate_up, whose first half is the gate.

        gate_up is [num_tokens, 2 * size].
        """
        ...

    def bind(self, config: ModelConfig, *rotaries: RotaryEmbedding) -> None:
        """Take what `begin` needs of the model; called once.

        Its layers' rotary embeddings are among it.
        """
        ...

    def program(
        self, layers: Sequence[DecoderLayer], norm: Norm, head: LoraLinear | None, progress: Progress
    ) -> LayersProgram | None:
        """Build all layers of a step as one program; None: they're computed one by one.

        `bind` was called.
        """
        ...

    def begin(self, inputs: Any, kv: KVTensors) -> BackendStep:
        """Make what a step's layers share."""
        ...
