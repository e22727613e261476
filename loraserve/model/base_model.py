"""Interface of a resident base, whichever code computes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.types import BaseSpec
from loraserve_kernels.common.arithmetic import ActivationRounding


class BaseModel(Protocol):
    """A base on a CPU; `decoder.Decoder` is one, `modelling.modelled_base.ModelledBase` another."""

    @property
    def spec(self) -> BaseSpec: ...

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(num_layers, num_kv_heads, head_dim) of the cache that `forward` writes."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, inputs: ModelInputs, kv: KVTensors) -> Tensor:
        """Compute the logits of ``inputs.logits_rows``, [num_logits, vocab_size] float32."""
        ...

    def forward_pooled(self, inputs: ModelInputs, kv: KVTensors) -> tuple[Tensor, Tensor | None]:
        """Compute the logits, and the pooled rows' hidden states; None where there are none."""
        ...

    def weight_rows(self, layer: int, *modules: str) -> Iterator[Tensor]:
        """Yield modules' weights as they are computed with, float32, a block of rows at a time."""
        ...

    def bias(self, layer: int, module: str) -> Tensor | None:
        """Read a linear's bias, [out_features] float32; None where it has none."""
        ...

    def activation_rounding(self, layer: int, module: str) -> ActivationRounding | None:
        """Look up how a module's products round their input; None: to no integers."""
        ...
