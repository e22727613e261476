"""Reference evaluation of a base by transformers' modelling code, in plain float32 PyTorch.

Around the code's own arithmetic, everything is the reference's: products of the resident weights as
they are computed with, adapters by their formulas, and attention sequence by sequence without a
cache. Nothing is shared with what it judges but the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from loraserve.errors import InvariantViolation
from loraserve.model.layers.linears import Linear
from loraserve.model.modelling.attention import Heads, attend_densely
from loraserve.model.modelling.mixers import SequenceGroup, SequenceState
from loraserve.model.modelling.skeleton import Skeleton
from loraserve.model.reference_pass import ReferencePass, ReferenceWeights, Subject
from loraserve.types import BaseSpec


class EvaluatedBase(ReferenceWeights, Protocol):
    """Base as the pass reads it; `ModelledBase` is one."""

    spec: BaseSpec
    embedding_scale: float

    def linear_at(self, layer: int, path: str) -> Linear:
        """Return a layer's linear by its path."""
        ...


class Current:
    """The pass that a reference model's modules compute for.

    Attributes:
        evaluation: None: no pass runs.
    """

    __slots__ = ("evaluation",)

    def __init__(self) -> None:
        self.evaluation: ModelledPass | None = None

    @property
    def running(self) -> ModelledPass:
        if self.evaluation is None:
            raise InvariantViolation("a reference module was called outside of a pass")
        return self.evaluation


class ModelledPass(ReferencePass):
    """Pass of a base by modelling code.

    Args:
        base: the resident base.
        reference: model whose modules are `ReferenceLinear`, `ReferenceEmbedding` and
            `ReferenceHead`; one pass at a time runs in it.
    """

    def __init__(
        self,
        base: EvaluatedBase,
        reference: Skeleton,
        current: Current,
        subjects: Sequence[Subject],
        is_wanted: Callable[[], bool],
        *,
        is_rounding: bool,
    ) -> None:
        # linears that the first layer lacks are rounded as its own are
        modules = [one for one in base.spec.modules if one != "embed_tokens" and base.spec.has_module(0, one)]
        super().__init__(base, subjects, is_wanted, rounding_modules=modules, is_rounding=is_rounding)
        self._base, self._reference, self._current = base, reference, current

    def _logits(self) -> Tensor:
        self._current.evaluation = self._reference.attention.attending = self
        try:
            out = self._reference.model(
                input_ids=self._tokens[None], position_ids=self._positions[None], use_cache=False
            )
        finally:
            self._current.evaluation = self._reference.attention.attending = None
        logits: Tensor = out.logits[0].float()
        return logits

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Return what each row gathers from its own sequence."""
        out = heads.q.new_empty(*heads.q.shape[:2], heads.v.shape[-1])
        for rows in self._sequences:
            out[rows] = attend_densely(heads.q[rows], heads.k[rows], heads.v[rows], heads)
        return out

    def groups(self, layer: int) -> Iterator[tuple[SequenceGroup, SequenceState]]:
        """Yield each whole sequence, with no state before its rows.

        Rows that sequences share are computed with each of them, equally.
        """
        for number, rows in enumerate(self._sequences):
            yield SequenceGroup((number,), rows), SequenceState()

    def linear(self, x: Tensor, layer: int, module: str) -> Tensor:
        """Return the product of a module that adapters may change."""
        return self._linear(x, layer, module)

    def plain(self, x: Tensor, layer: int, path: str) -> Tensor:
        """Return the product of a linear that none changes."""
        linear = self._base.linear_at(layer, path)
        y = self._multiply_by(x, linear)
        return y if linear.bias is None else y + linear.bias.float()

    def expert(self, x: Tensor, linear: Linear, layer: int, names: Sequence[str], number: int, rows: Tensor) -> Tensor:
        """Compute the outputs of an expert's linears that share an input, side by side.

        Args:
            x: what the expert reads, of these rows.
            linear: the base's, of all of them.
            names: of the linears, all of one size.
            number: the expert's.
        """
        y = self._multiply_by(x, linear)
        parts = [
            self._adapt_expert(x, part, layer, f"experts.{name}", number, rows)
            for name, part in zip(names, y.chunk(len(names), dim=1), strict=True)
        ]
        out = torch.cat(parts, dim=1)
        return out if linear.bias is None else out + linear.bias.float()

    def embed(self) -> Tensor:
        """Return the tokens' rows."""
        return self._embed() * self._base.embedding_scale

    def head(self, x: Tensor) -> Tensor:
        """Return the logits of the rows that are wanted."""
        kept = self._keep_wanted(x)
        return self._with_extra(self._linear(kept, 0, "lm_head"), kept)


class ReferenceLinear(nn.Module):
    """Linear of a layer in a reference model."""

    def __init__(
        self, in_features: int, out_features: int, layer: int, path: str, slot: str | None, current: Current
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._layer, self._path, self._slot, self._current = layer, path, slot, current

    def forward(self, x: Tensor) -> Tensor:
        rows, run = x.reshape(-1, x.shape[-1]).float(), self._current.running
        if self._slot is None:
            y = run.plain(rows, self._layer, self._path)
        else:
            y = run.linear(rows, self._layer, self._slot)
        return y.view(*x.shape[:-1], -1)


class ReferenceEmbedding(nn.Module):
    """Embedding in a reference model."""

    def __init__(self, num_embeddings: int, embedding_dim: int, current: Current) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._current = current

    def forward(self, token_ids: Tensor) -> Tensor:
        return self._current.running.embed().view(*token_ids.shape, -1)


class ReferenceHead(nn.Module):
    """Head in a reference model."""

    def __init__(self, in_features: int, out_features: int, current: Current) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._current = current

    def forward(self, x: Tensor) -> Tensor:
        return self._current.running.head(x.reshape(-1, x.shape[-1]))[None]
