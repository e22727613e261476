"""A resident base whose layers transformers' modelling code computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from loraserve import faults
from loraserve.errors import InvariantViolation
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.layers.embedding import EmbeddingTable, table_rows
from loraserve.model.layers.linears import Linear, rounding_of_row
from loraserve.model.modelling.attention import PagedAttending
from loraserve.model.modelling.modelled_pass import Current, ModelledPass
from loraserve.model.modelling.modules import RunningStep
from loraserve.model.modelling.skeleton import Skeleton
from loraserve.model.reference_pass import Evaluation, Subject
from loraserve.model.states import StateShapes
from loraserve.progress import Progress
from loraserve.types import BaseSpec
from loraserve_kernels.common.arithmetic import ActivationRounding


class ModelledBase:
    """The base model, resident and immutable. One thread calls `forward`.

    Attributes:
        spec: what others need to know of it.
        kv_shape: (num_layers, num_kv_heads, head_dim) of the cache that `forward` writes; only
            layers that attend are counted.
        state_shapes: of the states that `forward` writes; empty: no layer is recurrent.
        kv_dtype: of that cache.
        device: where it is computed.
    """

    kv_dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self,
        skeleton: Skeleton,
        spec: BaseSpec,
        kv_shape: tuple[int, int, int],
        state_shapes: StateShapes,
        step: RunningStep,
        *,
        embedding: EmbeddingTable,
        embedding_scale: float,
        head: Linear,
        linears: Mapping[tuple[int, str], Linear],
        make_reference: Callable[[Current], Skeleton],
        progress: Progress | None = None,
    ) -> None:
        """Make a base of these weights.

        Args:
            step: what the model's own modules read.
            linears: by layer and path inside it.
            make_reference: returns another model of the same parameters, whose linears, embedding
                and head compute for the pass that runs.
            progress: told of each layer that `forward` has computed; None: nothing reads it.
        """
        self.spec, self.kv_shape, self._skeleton, self._step = spec, kv_shape, skeleton, step
        self.state_shapes = state_shapes
        self._embedding, self.embedding_scale, self._head, self._linears = embedding, embedding_scale, head, linears
        self._make_reference, self._current = make_reference, Current()
        self._reference: Skeleton | None = None
        self._progress = progress or Progress()
        self._paths = {
            slot: path for slot, path in spec.module_paths.items() if slot not in ("lm_head", "embed_tokens")
        }

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, kv: KVTensors) -> Tensor:
        """Return the logits of ``inputs.logits_rows``, as `Decoder.forward` does."""
        return self.forward_pooled(inputs, kv)[0]

    @torch.inference_mode()
    def forward_pooled(self, inputs: ModelInputs, kv: KVTensors) -> tuple[Tensor, Tensor | None]:
        """Return the logits and pooled rows' states, as `Decoder.forward_pooled` does."""
        step, attention = self._step, self._skeleton.attention
        step.inputs, step.hidden = inputs, None
        attention.attending = attending = PagedAttending(inputs, kv, self._between_layers)
        try:
            logits = run_model(self._skeleton.model, inputs.token_ids, inputs.positions)
            attending.commit()
            return logits, step.hidden
        finally:
            step.inputs = step.hidden = attention.attending = None

    def _between_layers(self) -> None:
        self._progress.tick()
        faults.hit("model.layer")

    def weight_rows(self, layer: int, *modules: str) -> Iterator[Tensor]:
        """Yield a module's weight as it is computed with, float32, a block of rows at a time.

        `Decoder.weight_rows` does the same. Any thread may, also while a step runs.
        """
        for module in modules:
            if module == "embed_tokens":
                yield from table_rows(self._embedding)
            else:
                yield from self._linear(layer, module).rows(0, self.spec.modules[module][0])

    def bias(self, layer: int, module: str) -> Tensor | None:
        """Return a linear's bias, [out_features] float32; None where it has none."""
        if module not in self.spec.biased_modules:
            return None
        bias = self._linear(layer, module).bias
        return None if bias is None else bias.float()

    def activation_rounding(self, layer: int, module: str) -> ActivationRounding | None:
        """Return how a module's products round their input; None: to no integers."""
        return rounding_of_row(self._linear(layer, module), 0)

    def linear_at(self, layer: int, path: str) -> Linear:
        """Return a layer's linear by its path."""
        return self._linears[layer, path]

    def _linear(self, layer: int, module: str) -> Linear:
        if module == "lm_head":
            return self._head
        if module not in self._paths:
            raise InvariantViolation(f"{module} of layer {layer} was asked for, which this base doesn't have.")
        return self._linears[layer, self._paths[module]]

    def evaluate(
        self, subjects: Sequence[Subject], is_wanted: Callable[[], bool], *, is_rounding: bool
    ) -> list[Evaluation]:
        """Return the logits of each subject's sequences in plain float32, by modelling code.

        `reference_model.evaluate` says more.
        """
        if self._reference is None:
            self._reference = self._make_reference(self._current)
        run = ModelledPass(self, self._reference, self._current, subjects, is_wanted, is_rounding=is_rounding)
        return run.run()


def run_model(model: nn.Module, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Return a model's logits of a flattened batch, [num_logits, vocab_size] float32."""
    logits: Tensor = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False).logits[0].float()
    return logits
