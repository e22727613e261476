"""The kernels of a base's steps, and the buffers that they work on, for up to a number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraserve.errors import InvariantViolation
from loraserve.model.backends.adapter_places import LORA_KERNELS, AdapterPlaces
from loraserve.model.backends.backend import DecoderLayer, Norm
from loraserve.model.backends.step_buffers import InputRows, OutputRows, RowRounding, code_words, rounding_of
from loraserve.model.config.model_config import ActivationFunction, ModelConfig
from loraserve.model.layers.linears import JoinedLinear, Linear, OwnWeight, own_weight
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.mlp import GatedMlp
from loraserve.model.layers.norms import ResidualNorm, RMSNorm
from loraserve.model.layers.quantized_linears import G32Linear
from loraserve.model.layers.rotary import RotaryEmbedding
from loraserve_kernels.common.modules import COLUMNS, MODULE_INDEX, SITES
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.linear import g32_dot
from loraserve_kernels.cpu.linear.decoded import GROUP, DotWeight, GroupDotWeight, full_bias_of
from loraserve_kernels.cpu.linear.g32_dot import G32Weight
from loraserve_kernels.cpu.program.program import Program, kernel

_NO_WINDOW = 1 << 40


@dataclass(frozen=True, slots=True)
class OwnNorm:
    """Norm that adapters may have weights of their own for.

    Attributes:
        number: of the kernel.
        word: of its argument block, where the table of the rows' weights goes.
        layer, name: of the norm.
        base: address of the base's weight.
        is_kept: whether the kernel works on the kept rows.
    """

    number: int
    word: int
    layer: int
    name: str
    base: int
    is_kept: bool


Call = Callable[[int, int], None]
"""Computes what no kernel does, for the step's rows and for those that are kept."""

Item = tuple[int, int] | Call
"""Kernels from the first to before the second, or a call between kernels."""


class _Schedule:
    """Items of a program in order, as they are added, and where its ends are."""

    def __init__(self, program: Program) -> None:
        self._program, self._first = program, 0
        self._items: list[Item] = []
        self._ends: dict[str, int] = {}

    def call(self, call: Call) -> None:
        """Add a call after the kernels so far."""
        self.cut()
        self._items.append(call)

    def cut(self) -> None:
        """End the range of kernels here: the next layer begins."""
        if len(self._program) > self._first:
            self._items.append((self._first, len(self._program)))
            self._first = len(self._program)

    def end(self, name: str) -> None:
        """Name a place where a step may end."""
        self.cut()
        self._ends[name] = len(self._items)

    def finished(self) -> tuple[dict[str, list[Item]], dict[str, list[Item]]]:
        """Group the items up to each end by layer, and join their ranges."""
        by_layer = {name: self._items[:count] for name, count in self._ends.items()}
        return by_layer, {name: _joined(items) for name, items in by_layer.items()}


def _joined(items: Sequence[Item]) -> list[Item]:
    joined: list[Item] = []
    for item in items:
        last = joined[-1] if joined else None
        if isinstance(item, tuple) and isinstance(last, tuple):
            joined[-1] = (last[0], item[1])
        else:
            joined.append(item)
    return joined


class StepKernels:
    """Kernels of a base's steps of up to `capacity` rows, in order, with their buffers.

    Attributes:
        program: the kernels.
        schedules: end of a step → its items, by layer, and with neighbours joined. ``stored``: keys
            and values are in the cache; ``normed``: the kept rows have passed the last norm;
            ``head``: their logits are there.
        hidden: [capacity, hidden_size] float32, the residual stream.
        x: rows that have passed a norm.
        all_rows, kept_rows: word of an argument block → kernels that have the number of rows there:
            of all, or of those that the last layer continues with.
        rotary, attention: each layer's kernel.
        gathers: kernels that pick the kept rows.
        adapters: places of the adapters' kernels.
        own_norms: norms that adapters may have weights of their own for.
        head: (kernel, word, bytes) for each part of the head: where the address of the logits goes,
            that many bytes behind their start. Empty: the head isn't among the kernels.
        head_width: columns of a row of logits.
        num_weights: weights that a row is multiplied with.
        plans: the running step's adapters, of all rows and of the kept ones, for mixtures of
            experts, which aren't among the kernels.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: LoraLinear | None,
        rotaries: Sequence[RotaryEmbedding],
        capacity: int,
    ) -> None:
        self._config, self._layers, self._norm, self._head_linear = config, layers, norm, head
        self._rotaries, self.capacity = rotaries, capacity
        self.program = Program()
        self._schedule = _Schedule(self.program)
        # whatever the kernels' arguments have the address of
        self._alive: list[object] = []
        self.num_weights = 0
        self.plans: tuple[LoraPlan | None, LoraPlan | None] = (None, None)
        counted: tuple[dict[int, list[int]], dict[int, list[int]]] = {}, {}
        self._all, self._kept = counted
        self._counted = self._all
        self.own_norms: list[OwnNorm] = []
        self._lora: dict[tuple[str, bool], list[list[int]]] = {}
        self._rotary: list[int] = []
        self._attention: list[int] = []
        self._gathers: list[int] = []
        self.head: list[tuple[int, int, int]] = []
        self.head_width = 0
        self._make_buffers(config, capacity)
        self._add_layers(layers)
        self.program.freeze()
        self.schedules = self._schedule.finished()
        self.all_rows, self.kept_rows = (
            {word: np.array(numbers) for word, numbers in rows.items()} for rows in counted
        )
        self.rotary, self.attention = np.array(self._rotary), np.array(self._attention)
        self.gathers = np.array(self._gathers)
        places = {site: np.array(numbers) for site, numbers in self._lora.items()}
        self.adapters = AdapterPlaces(self.program, places)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        inputs = [self.x, self._attended, self._kept_attended]
        outputs = [self._qkv, self._delta]
        if self._gate_up is not None:
            inputs.append(self._gated)
            outputs.append(self._gate_up)
        streams = self.hidden.nbytes + self._kept_hidden.nbytes
        return streams + sum(rows.num_bytes for rows in inputs) + sum(rows.values.nbytes for rows in outputs)

    def _make_buffers(self, config: ModelConfig, capacity: int) -> None:
        hidden_size, size = config.hidden_size, config.num_heads * config.head_dim
        self.hidden = torch.zeros(capacity, hidden_size)
        self._kept_hidden, self._kept_attended = torch.zeros(capacity, hidden_size), InputRows.make(capacity, size)
        self.x, self._attended = InputRows.make(capacity, hidden_size), InputRows.make(capacity, size)
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._qkv, self._delta = OutputRows.make(capacity, width), OutputRows.make(capacity, hidden_size)
        self._gate_up: OutputRows | None = None

    def _add_layers(self, layers: Sequence[DecoderLayer]) -> None:
        last, hidden = len(layers) - 1, self.hidden
        for index, layer in enumerate(layers):
            delta = (index - 1, "mlp_out_norm") if index else None
            rounding = rounding_of(layer.qkv.base)
            self._add_norm(layer.attention_norm, hidden, (index, "attention_norm"), delta, rounding)
            self._add_site(layer.qkv, self.x, self._qkv)
            self._add_rotary(layer)
            if index == last:
                self._schedule.end("stored")
            self._add_attention(layer)
            attended = self._attended
            if index == last:
                self._counted, hidden, attended = self._kept, self._kept_hidden, self._kept_attended
                self._add_gather(self.hidden, hidden)
                self._add_gather(self._attended.values, attended.values)
            self._add_quantize(attended, rounding_of(layer.o.base))
            self._add_site(layer.o, attended, self._delta)
            rounding = rounding_of(layer.mlp.gate_up.base) if isinstance(layer.mlp, GatedMlp) else None
            self._add_norm(layer.mlp_norm, hidden, (index, "mlp_norm"), (index, "attention_out_norm"), rounding)
            self._add_mlp(layer, index == last)
            if index < last:
                self._schedule.cut()
        head = None if self._head_linear is None else self._head_linear.base
        rounding = None if head is None else rounding_of(head)
        self._add_norm(self._norm, hidden, (0, "norm"), (last, "mlp_out_norm"), rounding)
        self._schedule.end("normed")
        if head is not None:
            self._add_head(head)
            self._schedule.end("head")

    def _add(self, name: str, rows_word: int, words: dict[int, int]) -> int:
        """Append a kernel that works on the rows that are counted here."""
        number = self.program.add(kernel(name), words)
        self._counted.setdefault(rows_word, []).append(number)
        return number

    def _add_norm(
        self,
        norm: Norm,
        hidden: Tensor,
        place: tuple[int, str],
        delta: tuple[int, str] | None,
        rounding: RowRounding | None,
    ) -> None:
        """Append the sum of `hidden` and the delta, and the norm of it.

        Args:
            place: layer and name of the norm, as adapters name their own.
            delta: layer and name of the norm that the delta passes; None: there is no delta.
            rounding: how the linears behind it read the rows.
        """
        from loraserve_kernels.cpu.program import norm_kernel as k

        inner, delta_norm, scale = _norm_parts(norm)
        eps = self._config.rms_norm_eps
        weight = 0 if inner is None else self._keep(inner.weight)
        words = {
            k.WIDTH: hidden.shape[1],
            k.HIDDEN: hidden.data_ptr(),
            k.WEIGHT: weight,
            k.OUT: self.x.values.data_ptr(),
            k.EPS: _float_word(eps),
            k.DELTA_SCALE: _float_word(scale),
            **code_words(self.x, rounding),
        }
        if delta is not None:
            words |= {
                k.DELTA: self._delta.values.data_ptr(),
                k.DELTA_STRIDE: self._delta.values.stride(0),
                k.DELTA_WEIGHT: 0 if delta_norm is None else self._keep(delta_norm.weight),
            }
        number, is_kept = self._add("norm", k.NUM_ROWS, words), self._counted is self._kept
        self.own_norms.append(OwnNorm(number, k.WEIGHTS, *place, weight, is_kept))
        if delta is not None and delta_norm is not None:
            self.own_norms.append(OwnNorm(number, k.DELTA_WEIGHTS, *delta, words[k.DELTA_WEIGHT], is_kept))

    def _add_site(self, linear: LoraLinear, source: InputRows, out: OutputRows) -> None:
        """Append a site's linears, and places for the kernels of its adapters."""
        self._add_linear(linear.base, source, out, 0, rounding_of(linear.base))
        self._add_lora(linear, source, out)

    def _add_linear(
        self, linear: Linear, source: InputRows, out: OutputRows, column: int, rounding: RowRounding | None
    ) -> None:
        """Append a linear, or the parts of one, whose rows were rounded so."""
        if isinstance(linear, JoinedLinear):
            for part in linear.parts:
                self._add_linear(part, source, out, column, rounding)
                column += part.out_features
            return
        weight = own_weight(linear)
        if weight is None or rounding_of(linear) not in (None, rounding):
            takes_kept, end = self._counted is self._kept, column + linear.out_features
            self.num_weights += source.width * linear.out_features

            def call(num_rows: int, num_kept: int) -> None:
                count = num_kept if takes_kept else num_rows
                out.values[:count, column:end] = linear(source.values[:count])

            self._schedule.call(call)
            return
        self._add_product(linear, weight, source, out.values.data_ptr() + 4 * column, out.values.stride(0))

    def _add_product(self, linear: Linear, weight: OwnWeight, source: InputRows, y: int, y_stride: int) -> int:
        from loraserve_kernels.cpu.linear.tiles import tile as k

        num_channels = weight.scales.shape[-1]
        full_bias = full_bias_of(linear.bias, num_channels)
        self._alive += [weight, full_bias]
        self.num_weights += weight.codes.numel()
        words = {
            k.Y: y,
            k.Y_STRIDE: y_stride,
            k.CODES: weight.codes.data_ptr(),
            k.SCALES: weight.scales.data_ptr(),
            k.NUM_TILES: weight.codes.shape[0],
            k.BIAS: full_bias.data_ptr(),
            k.MAX_THREADS: threads.num_threads(),
        }
        if isinstance(weight, DotWeight):
            element_bytes = 4 // k.DOT_INPUTS
            words |= {
                k.X: source.codes.data_ptr(),
                k.X_STRIDE: source.codes.stride(0) // element_bytes,
                k.TILE_BYTES: weight.codes.stride(0),
                k.WIDTH: -(-weight.in_features // k.DOT_INPUTS) * k.DOT_INPUTS,
                k.SUM_STARTS: weight.sum_starts.data_ptr(),
                k.ROW_SCALES: source.scales.data_ptr(),
            }
            return self._add("dot", k.NUM_ROWS, words)
        if isinstance(weight, GroupDotWeight | G32Weight):
            # a row's sums are those of the weight's groups, or of its own
            sum_size = weight.group_size if isinstance(weight, GroupDotWeight) else g32_dot.GROUP
            words |= {
                k.X: source.codes.data_ptr(),
                k.X_STRIDE: source.codes.stride(0),
                k.TILE_BYTES: weight.codes.stride(0) * 4,
                k.WIDTH: weight.in_features,
                k.GROUP: weight.group_size,
                k.SCALE_STRIDE: num_channels,
                k.ROW_SCALES: source.scales.data_ptr(),
                k.GROUP_STARTS: source.starts.data_ptr(),
                k.START_STRIDE: weight.in_features // sum_size,
                k.GROUP_ZEROS: 0 if weight.zeros is None else weight.zeros.data_ptr(),
                k.OUTLIERS: source.outliers.data_ptr(),
                k.NUM_OUTLIERS: linear.num_outliers if isinstance(linear, G32Linear) else 0,
            }
            return self._add(weight.kernel, k.NUM_ROWS, words)
        has_groups = weight.scales.shape[0] > 1
        words |= {
            k.X: source.values.data_ptr(),
            k.X_STRIDE: source.width,
            k.TILE_BYTES: weight.codes.stride(0) * weight.codes.element_size(),
            k.WIDTH: weight.in_features,
            k.SCALE_STRIDE: num_channels if has_groups else 0,
            k.ZEROS: 0 if weight.zeros is None else weight.zeros.data_ptr(),
            k.ZERO_STRIDE: num_channels if has_groups else 0,
            k.GROUP: weight.group_size if has_groups else GROUP,
        }
        return self._add(weight.kind, k.NUM_ROWS, words)

    def _add_lora(self, linear: LoraLinear, source: InputRows, out: OutputRows) -> None:
        from loraserve_kernels.cpu.lora import kernel as k

        modules = SITES[linear.site]
        shapes = [self._config.module_shapes[module] for module in modules]
        bias = linear.base.bias
        words = {
            k.X: source.values.data_ptr(),
            k.X_STRIDE: source.width,
            k.Y: out.values.data_ptr(),
            k.Y_STRIDE: out.values.stride(0),
            k.IN_FEATURES: shapes[0][1],
            k.FIRST_RECORD: linear.layer * len(COLUMNS) + MODULE_INDEX[modules[0]],
            k.NUM_SLICES: len(modules),
            k.BIAS: 0 if bias is None else self._keep(bias),
            **{k.WIDTHS + i: shape[0] for i, shape in enumerate(shapes)},
        }
        places = [self.program.add(None, words) for _ in LORA_KERNELS]
        self._lora.setdefault((linear.site, self._counted is self._kept), []).append(places)

    def _add_rotary(self, layer: DecoderLayer) -> None:
        from loraserve_kernels.cpu.program import rotary_kernel as k

        config = self._config
        words = {
            k.QKV: self._qkv.values.data_ptr(),
            k.QKV_STRIDE: self._qkv.values.stride(0),
            k.NUM_HEADS: config.num_heads,
            k.NUM_KV_HEADS: config.num_kv_heads,
            k.HEAD_DIM: config.head_dim,
        }
        if layer.q_norm is not None and layer.k_norm is not None:
            words |= {
                k.Q_NORM: self._keep(layer.q_norm.weight),
                k.K_NORM: self._keep(layer.k_norm.weight),
                k.IS_NORM_WHOLE: int(config.architecture.is_qk_norm_whole),
                k.IS_NORM_LAST: int(config.architecture.is_qk_norm_after_rope),
                k.EPS: _float_word(layer.q_norm.eps),
            }
        if layer.rope is not None:
            rotary = self._rotaries[layer.rope]
            words |= {
                k.ROTATED: 2 * rotary.cos.shape[1],
                k.COS: self._keep(rotary.cos),
                k.SIN: self._keep(rotary.sin),
                k.IS_INTERLEAVED: int(rotary.is_interleaved),
            }
        self._rotary.append(self._add("rotary", k.NUM_ROWS, words))

    def _add_attention(self, layer: DecoderLayer) -> None:
        from loraserve_kernels.cpu.attention import kernel as k

        config = self._config
        words = {
            k.Q: self._qkv.values.data_ptr(),
            k.Q_ROW: self._qkv.values.stride(0),
            k.Q_HEAD: config.head_dim,
            k.OUT: self._attended.values.data_ptr(),
            k.OUT_ROW: self._attended.width,
            k.OUT_HEAD: config.head_dim,
            k.NUM_KV_HEADS: config.num_kv_heads,
            k.GROUP: config.num_heads // config.num_kv_heads,
            k.HEAD_DIM: config.head_dim,
            k.WINDOW: _NO_WINDOW if layer.sliding_window is None else layer.sliding_window,
            k.SCALE: _float_word(config.attention_scale),
            k.SOFT_CAP: _float_word(config.attention_cap or 0.0),
        }
        self._attention.append(self.program.add(kernel("attention"), words))

    def _add_gather(self, x: Tensor, out: Tensor) -> None:
        from loraserve_kernels.cpu.program import gather_kernel as k

        words = {k.X: x.data_ptr(), k.OUT: out.data_ptr(), k.WIDTH: x.shape[1]}
        self._gathers.append(self._add("gather", k.NUM_ROWS, words))

    def _add_quantize(self, rows: InputRows, rounding: RowRounding | None) -> None:
        from loraserve_kernels.cpu.linear import row_quantization as k

        if rounding is not None:
            codes = code_words(rows, rounding)
            words = {k.X: rows.values.data_ptr(), k.X_STRIDE: rows.width, k.WIDTH: rows.width, **codes}
            self._add("quantize", k.NUM_ROWS, words)

    def _add_mlp(self, layer: DecoderLayer, takes_kept: bool) -> None:
        """Append what makes the next delta of the normed rows."""
        from loraserve_kernels.cpu.program import gate_kernel as k

        mlp = layer.mlp
        if not isinstance(mlp, GatedMlp):

            def call(num_rows: int, num_kept: int) -> None:
                count = num_kept if takes_kept else num_rows
                self._delta.rows(count).copy_(mlp(self.x.values[:count], self.plans[int(takes_kept)]))

            self._schedule.call(call)
            return
        if self._gate_up is None:
            size = mlp.gate_up.base.out_features // 2
            self._gate_up, self._gated = OutputRows.make(self.capacity, 2 * size), InputRows.make(self.capacity, size)
        self._add_site(mlp.gate_up, self.x, self._gate_up)
        gated = self._gated
        words = {
            k.WIDTH: gated.width,
            k.X: self._gate_up.values.data_ptr(),
            k.X_STRIDE: self._gate_up.values.stride(0),
            k.OUT: gated.values.data_ptr(),
            k.IS_GELU: int(self._config.activation is not ActivationFunction.SILU),
            **code_words(gated, rounding_of(mlp.down.base)),
        }
        self._add("gate", k.NUM_ROWS, words)
        self._add_site(mlp.down, gated, self._delta)

    def _add_head(self, base: Linear) -> None:
        """Append the head's products, where all of them are ours."""
        from loraserve_kernels.cpu.linear.tiles import tile as k
        from loraserve_kernels.cpu.linear.tiles.tile import TILE

        parts = base.parts if isinstance(base, JoinedLinear) else (base,)
        weights = [own_weight(part) for part in parts]
        # parts fill up their own channels, the last beyond the width
        self.head_width = -(-base.out_features // TILE) * TILE + (TILE if len(parts) > 1 else 0)
        roundings = {rounding_of(part) for part in parts} - {None}
        if any(weight is None for weight in weights) or len(roundings) > 1:
            return
        offset = 0
        for part, weight in zip(parts, weights, strict=True):
            if weight is not None:
                number = self._add_product(part, weight, self.x, 0, self.head_width)
                self.head.append((number, k.Y, 4 * offset))
                offset += part.out_features

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor alive as float32; return its address."""
        kept = tensor.float().contiguous()
        self._alive.append(kept)
        return kept.data_ptr()


def _norm_parts(norm: Norm) -> tuple[RMSNorm | None, RMSNorm | None, float]:
    """Split a norm into that of the sum, that of the delta, and the delta's multiplier."""
    if isinstance(norm, RMSNorm):
        return norm, None, 1.0
    if isinstance(norm, ResidualNorm):
        return norm.norm, norm.delta_norm, norm.delta_scale
    raise InvariantViolation(f"a {type(norm).__name__} isn't a CPU's norm")


def _float_word(number: float) -> int:
    """Pack a float32 into the first half of a word."""
    return int(np.array([number, 0], dtype=np.float32).view(np.int64)[0])
