"""The one decoder of every architecture: token ids in, logits out.

Keys and values are written to the paged cache on the way. A stage of a pipeline has some of the
layers: hidden states come in, or go out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from loraserve import faults
from loraserve.errors import InvariantViolation
from loraserve.model.backends.backend import Backend, BackendStep, DecoderLayer, LayersProgram, Norm
from loraserve.model.config.formats import Rotations
from loraserve.model.config.model_config import ModelConfig
from loraserve.model.inputs import GpuInputs, KVTensors, ModelInputs, PooledRows
from loraserve.model.layers.embedding import EmbeddingTable, look_up, table_rows
from loraserve.model.layers.experts import MixtureOfExperts
from loraserve.model.layers.extra_rows import (
    embeddable,
    with_extra_logits,
    write_embeddings,
)
from loraserve.model.layers.linears import Linear, rounding_of_row
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.norms import RMSNorm, cap_softly
from loraserve.model.parallel.rank_part import RankPart
from loraserve.model.parallel.stage import Stage
from loraserve.progress import Progress
from loraserve.types import BaseSpec
from loraserve_kernels.common.arithmetic import ActivationRounding
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.cpu.lora.layout import SITES
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan
from loraserve_kernels.ops import apply_embedding_lora


class Decoder:
    """The base model, resident and immutable. One thread calls `forward`.

    Attributes:
        spec: what others need of it.
        backend: the device that it is on, and how that computes.
        config: its shapes.
        kv_shape: (num_layers, num_kv_heads, head_dim) of the cache that `forward` writes.
        stage: which layers it has.
        rotations: by which its linears were rotated when they were rounded.
        kv_dtype: of that cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: BaseSpec,
        backend: Backend,
        *,
        embedding: EmbeddingTable | None,
        layers: tuple[DecoderLayer, ...],
        norm: Norm,
        head: Linear | None,
        norm_weights: Mapping[str, Tensor] | None = None,
        progress: Progress | None = None,
        part: RankPart | None = None,
        stage: Stage | None = None,
        rotations: Rotations | None = None,
    ) -> None:
        """Make a decoder of these weights.

        Args:
            embedding: None: the stage isn't the first.
            norm: the last one; of a stage before the last what adds the last delta.
            head: None: the stage isn't the last.
            progress: notified of each part of a layer that `forward` has computed; None: nothing
                reads it.
            part: the rank's part of each linear that these weights are; None: all of it.
            stage: the pipeline's stage whose layers these are; None: all layers are.
            rotations: by which the linears were rotated when they were rounded; None: by none.
        """
        self._progress = progress or Progress()
        # what the layers have: heads and inner features
        local = config if part is None else part.shard.config
        self._vocab = None if part is None or embedding is None else part.embedding
        self.config = config
        self.spec = spec
        self.backend = backend
        self.rotations = rotations or Rotations()
        self.stage = stage or Stage(0, 1, config)
        self.kv_shape = (len(layers), local.num_kv_heads, config.head_dim)
        self.kv_dtype = backend.kv_dtype
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._norm_weights = norm_weights or {}
        self._head: LoraLinear | None = None
        if head is not None:
            self._head = LoraLinear(head, "lm_head", 0) if part is None else part.head(head)
        # a program has no end between two layers, where ranks exchange what they have
        self._program = backend.program(layers, norm, self._head, self._progress) if part is None else None

    @property
    def device(self) -> torch.device:
        """Device of `weight_rows`."""
        return self.backend.device

    def weight_rows(self, layer: int, *modules: str) -> Iterator[Tensor]:
        """Yield modules' weights as they are computed with, a block of rows at a time, in order.

        They are float32. Any thread may, also while a step runs.

        Args:
            modules: a linear's short name, whose blocks are [n, in_features], or several that
                follow each other in one (q, k and v; gate and up), which is unpacked once then; or
                ``embed_tokens``, whose are [n, hidden_size], a row for each token.
        """
        if modules == ("embed_tokens",):
            yield from table_rows(self._embedding_of())
            return
        if modules == ("lm_head",):
            yield from self._head_of().base.rows(0, self.spec.vocab_size)
            return
        linear, start = self._linear(layer, modules[0])
        end = start
        for module in modules:
            if self._linear(layer, module) != (linear, end):
                raise InvariantViolation(
                    f"{module} doesn't follow the modules before it in the linear of {modules[0]}."
                )
            end += self.spec.modules[module][0]
        yield from linear.rows(start, end)

    def bias(self, layer: int, module: str) -> Tensor | None:
        """Read a linear's bias, [out_features] float32; None where it has none."""
        if module not in self.spec.biased_modules:
            return None
        linear, start = self._linear(layer, module)
        return None if linear.bias is None else linear.bias[start : start + self.spec.modules[module][0]].float()

    def activation_rounding(self, layer: int, module: str) -> ActivationRounding | None:
        """Look up how a module's products round their input; None: to no integers."""
        if module == "lm_head":
            return rounding_of_row(self._head_of().base, 0)
        return rounding_of_row(*self._linear(layer, module))

    def norm_weight(self, name: str) -> Tensor:
        """Look up what a norm multiplies with, by the name of its tensor in the checkpoint.

        It is float32 in the host's memory.
        """
        return self._norm_weights[name]

    def experts(self, layer: int) -> MixtureOfExperts | None:
        """Look up what stands in the place of a layer's MLP."""
        mlp = self._layers[layer].mlp
        return mlp if isinstance(mlp, MixtureOfExperts) else None

    def _linear(self, layer: int, module: str) -> tuple[Linear, int]:
        """Find the site's linear that a layer's module is a part of, and its first row."""
        site, modules = next((site, modules) for site, modules in SITES.items() if module in modules)
        start = sum(self.spec.modules[before][0] for before in modules[: modules.index(module)])
        linear = self._layers[layer].linear(site)
        if linear is None:
            raise InvariantViolation(f"{module} of layer {layer} was asked for, which this base doesn't have.")
        return linear.base, start

    def _embedding_of(self) -> EmbeddingTable:
        if self._embedding is None:
            raise InvariantViolation("the embedding was asked for, which only the first stage has")
        return self._embedding

    def _head_of(self) -> LoraLinear:
        if self._head is None:
            raise InvariantViolation("the head was asked for, which only the last stage has")
        return self._head

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs | GpuInputs, kv: KVTensors) -> Tensor:
        """Compute the logits of ``inputs.logits_rows``, [num_logits, vocab_size] float32.

        Where adapters of these rows have rows beyond the base's, there are more columns:
        `with_extra_logits`. Every row's keys and values are in the cache afterwards.

        Args:
            inputs: the step's rows; positions and slots below what the model and the cache have,
                ``logits_rows`` ascending.
            kv: the cache. Slots past a sequence's context are neither read nor written.
        """
        return self.forward_pooled(inputs, kv)[0]

    @torch.inference_mode()
    def forward_pooled(
        self, inputs: ModelInputs | GpuInputs, kv: KVTensors, received: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the logits, as `forward` does, and the hidden states of the pooled rows.

        These have passed the last norm, with adapters' own weights of it: [num_pooled, hidden_size]
        in the dtype of the activations; None where nothing is pooled.

        Args:
            received: the rows' residual stream from the stage before, which is spent; None: this is
                the first.
        """
        if self._program is not None and isinstance(inputs, ModelInputs) and self._program.takes(kv):
            return self._run(self._program, inputs, kv, received)
        if self._vocab is not None:
            inputs = replace(inputs, token_ids=self._vocab.local(inputs.token_ids))
        tokens, inputs = inputs.token_ids, embeddable(inputs, self.spec.vocab_size)
        step = self.backend.begin(inputs, kv)
        hidden = received
        if hidden is None:
            hidden = self._adapted_embedding(step.embed(self._embedding_of()), inputs, tokens)
        last = len(self._layers) - 1
        x = self._layers[0].attention_norm(hidden)
        for i in range(last):
            layer = self._layers[i]
            x = self._with_own_norms(x, hidden, inputs.lora, i, "attention_norm")
            qkv = layer.qkv(x, inputs.lora)
            self._progress.tick()
            attended = step.attend(layer, qkv, kv.k[i], kv.v[i])
            delta = self._finish(i, hidden, attended, inputs.lora)
            x = self._add(self._layers[i + 1].attention_norm, hidden, delta, inputs.lora, i, "mlp_out_norm")
        return self._last_layer(step, hidden, x, inputs, kv)

    @torch.inference_mode()
    def pass_on(self, inputs: ModelInputs, kv: KVTensors, received: Tensor | None) -> Tensor:
        """Compute the residual stream for the next stage, [num_tokens, hidden_size] float32.

        It is in memory of its own.

        Args:
            received: as `forward_pooled`'s.
        """
        rows = torch.arange(inputs.token_ids.shape[0])
        inputs = replace(inputs, logits_rows=rows[:0], pooled=PooledRows(rows, rows[:0], rows))
        hidden = self.forward_pooled(inputs, kv, received)[1]
        if hidden is None:
            raise InvariantViolation("a stage gave no hidden states")
        return hidden

    def _run(
        self, program: LayersProgram, inputs: ModelInputs, kv: KVTensors, received: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a step as one program."""
        hidden = program.hidden(inputs.token_ids.shape[0])
        if received is None:
            embedding, tokens = self._embedding_of(), inputs.token_ids
            inputs = embeddable(inputs, self.spec.vocab_size)
            if isinstance(embedding, Tensor) and embedding.dtype == hidden.dtype:
                torch.index_select(embedding, 0, inputs.token_ids, out=hidden)
            else:
                hidden.copy_(look_up(embedding, inputs.token_ids))
            self._adapted_embedding(hidden, inputs, tokens)
        else:
            hidden.copy_(received)
        logits, x = program.run(inputs, kv)
        if logits is not None:
            return self._finish_logits(with_extra_logits(logits, x, inputs.kept_lora)), None
        return self._pooled(x, inputs)

    def _adapted_embedding(self, hidden: Tensor, inputs: ModelInputs | GpuInputs, tokens: Tensor) -> Tensor:
        """Add the adapters' part to embedded rows, scale them, and return them.

        Args:
            tokens: the rows' tokens, also those that the base's table lacks.
        """
        if inputs.lora is not None:
            apply_embedding_lora(inputs.token_ids, hidden, inputs.lora)
            write_embeddings(tokens, hidden, inputs.lora, self.spec.vocab_size)
        if self._vocab is not None:
            hidden = self._vocab.whole(hidden)
        if self.config.embedding_scale != 1.0:
            hidden.mul_(self.config.embedding_scale)
        return hidden

    def _last_layer(
        self, step: BackendStep, hidden: Tensor, x: Tensor, inputs: ModelInputs | GpuInputs, kv: KVTensors
    ) -> tuple[Tensor, Tensor | None]:
        layer, rows, lora = self._layers[-1], inputs.kept_rows, inputs.lora
        qkv = layer.qkv(self._with_own_norms(x, hidden, lora, len(self._layers) - 1, "attention_norm"), lora)
        self._progress.tick()
        if rows is not None and rows.shape[0] == 0:
            step.store(layer, qkv, kv.k[-1], kv.v[-1])
            return hidden.new_empty(0, self.spec.vocab_size), None
        attended = step.attend(layer, qkv, kv.k[-1], kv.v[-1])
        if rows is not None and rows.shape[0] < hidden.shape[0]:
            # nobody reads the other rows from here on
            hidden, attended, lora = hidden[rows], attended[rows], inputs.kept_lora
        last = len(self._layers) - 1
        delta = self._finish(last, hidden, attended, lora)
        x = self._add(self._norm, hidden, delta, lora, last, "mlp_out_norm")
        x = self._with_own_norms(x, hidden, lora, 0, "norm")
        if inputs.pooled is None:
            return self._finish_logits(with_extra_logits(self._head_of()(x, lora), x, lora)), None
        return self._pooled(x, inputs)

    def _pooled(self, x: Tensor, inputs: ModelInputs | GpuInputs) -> tuple[Tensor, Tensor | None]:
        """Compute the logits, and the pooled states, of kept rows after the last norm."""
        pooled = inputs.pooled
        states = None if pooled is None else x[pooled.hidden_places]
        if pooled is None or pooled.logits_places.shape[0] == 0:
            return x.new_empty(0, self.spec.vocab_size, dtype=torch.float32), states
        x, lora = x[pooled.logits_places], inputs.logits_lora
        return self._finish_logits(with_extra_logits(self._head_of()(x, lora), x, lora)), states

    def _finish_logits(self, logits: Tensor) -> Tensor:
        if self.config.logits_scale != 1.0:
            logits.mul_(self.config.logits_scale)
        return logits if self.config.logits_cap is None else cap_softly(logits, self.config.logits_cap)

    def _finish(self, index: int, hidden: Tensor, attended: Tensor, lora: LoraPlan | GpuLoraPlan | None) -> Tensor:
        """Add a layer's attention's output to `hidden` in place, and return the MLP's.

        The latter is still to be added.
        """
        layer, progress = self._layers[index], self._progress
        progress.tick()
        faults.hit("model.layer")
        x = self._add(layer.mlp_norm, hidden, layer.o(attended, lora), lora, index, "attention_out_norm")
        progress.tick()
        out = layer.mlp(self._with_own_norms(x, hidden, lora, index, "mlp_norm"), lora)
        progress.tick()
        return out

    def _with_own_norms(
        self, x: Tensor, hidden: Tensor, lora: LoraPlan | GpuLoraPlan | None, layer: int, norm: str
    ) -> Tensor:
        """Norm those rows of `hidden` again whose adapter has a norm of its own.

        Rows whose adapter has a weight of its own for this norm are normed by that. On GPUs none
        has.
        """
        for rows, own in self._own_norms(lora, layer, norm):
            x[rows] = own(hidden[rows])
        return x

    def _add(
        self,
        norm: Norm,
        hidden: Tensor,
        delta: Tensor,
        lora: LoraPlan | GpuLoraPlan | None,
        layer: int,
        out_norm: str,
    ) -> Tensor:
        """Add `delta`, which is spent, to `hidden` in place; return what `norm` makes of the sum.

        It is normed by what adapters have in the place of `out_norm`.
        """
        # the sum of such rows is made before the base's norm spends their delta
        sums = [
            (rows, hidden[rows] + own(delta[rows]).mul_(self.config.residual_scale))
            for rows, own in self._own_norms(lora, layer, out_norm)
        ]
        x = norm.after_adding(hidden, delta)
        for rows, added in sums:
            hidden[rows] = added
            x[rows] = norm(hidden[rows])
        return x

    def _own_norms(self, lora: LoraPlan | GpuLoraPlan | None, layer: int, norm: str) -> Iterator[tuple[slice, RMSNorm]]:
        """Yield the rows of adapters that have this norm's weight of their own, and the norm.

        On GPUs none has.
        """
        if isinstance(lora, LoraPlan) and lora.has_norms:
            for segment in lora.segments:
                weight = segment.adapter.norms.get((layer, norm))
                if weight is not None:
                    yield slice(segment.row_start, segment.row_end), RMSNorm(weight, self.config.rms_norm_eps)
