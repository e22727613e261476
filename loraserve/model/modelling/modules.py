"""Modules in the place of transformers' own: this engine's linears, embedding and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loraserve.errors import InvariantViolation
from loraserve.model.inputs import ModelInputs
from loraserve.model.layers.embedding import EmbeddingTable, look_up
from loraserve.model.layers.extra_rows import has_extra_rows, with_extra_logits, without_extra, write_embeddings
from loraserve.model.layers.linears import Linear
from loraserve_kernels.ops import apply_embedding_lora, apply_lora


@dataclass(slots=True)
class RunningStep:
    """State of the step that runs, as modules read it.

    Attributes:
        inputs: None: no step runs.
        hidden: pooled rows' states after the last norm; None: none are pooled.
    """

    inputs: ModelInputs | None = None
    hidden: Tensor | None = None

    @property
    def rows(self) -> ModelInputs:
        if self.inputs is None:
            raise InvariantViolation("a module was called outside of a step")
        return self.inputs


class AdaptedLinear(nn.Module):
    """Linear of a layer, to which the step's adapters add.

    Attributes:
        slot: the module as adapters know it; None: none changes it.
    """

    def __init__(self, base: Linear, in_features: int, slot: str | None, layer: int, step: RunningStep) -> None:
        super().__init__()
        self.base, self.slot, self._layer, self._step = base, slot, layer, step
        # read by modelling code
        self.in_features, self.out_features = in_features, base.out_features

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        y = self.base(rows)
        lora = self._step.rows.lora if self.slot is not None else None
        if lora is not None and self.slot is not None:
            apply_lora(rows, y, lora, self.slot, self._layer, self.base.bias)
        return y.view(*x.shape[:-1], -1)


class AdaptedEmbedding(nn.Module):
    """The table of tokens, of which adapters may have rows of their own.

    Attributes:
        scale: what rows are multiplied with, after the adapters.
    """

    def __init__(self, table: EmbeddingTable, scale: float, step: RunningStep) -> None:
        super().__init__()
        self.table, self.scale, self._step = table, scale, step
        self.num_embeddings, self.embedding_dim = table.shape

    def forward(self, token_ids: Tensor) -> Tensor:
        rows, inputs = token_ids.reshape(-1), self._step.rows
        within = without_extra(rows, self.num_embeddings) if has_extra_rows(inputs.lora) else rows
        hidden = look_up(self.table, within)
        if inputs.lora is not None:
            apply_embedding_lora(within, hidden, inputs.lora)
            write_embeddings(rows, hidden, inputs.lora, self.num_embeddings)
        if self.scale != 1.0:
            hidden.mul_(self.scale)
        return hidden.view(*token_ids.shape, -1)


class AdaptedHead(nn.Module):
    """The head, of rows whose logits are wanted; what it reads is kept for pooled rows."""

    def __init__(self, base: Linear, in_features: int, step: RunningStep) -> None:
        super().__init__()
        self.base, self._step = base, step
        self.in_features, self.out_features = in_features, base.out_features

    def forward(self, x: Tensor) -> Tensor:
        inputs = self._step.rows
        hidden = x.reshape(-1, x.shape[-1]).float()
        if inputs.kept_rows is not None:
            hidden = hidden[inputs.kept_rows]
        lora = inputs.kept_lora
        if inputs.pooled is not None:
            self._step.hidden = hidden[inputs.pooled.hidden_places]
            hidden, lora = hidden[inputs.pooled.logits_places], inputs.logits_lora
        if hidden.shape[0] == 0:
            return torch.empty(1, 0, self.out_features)
        hidden = hidden.contiguous()
        y = self.base(hidden)
        if lora is not None:
            apply_lora(hidden, y, lora, "lm_head", 0, self.base.bias)
        return with_extra_logits(y, hidden, lora)[None]
