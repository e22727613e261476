"""All layers of a step on a CPU as one program: the kernels between embedding and logits, in order.

The decoder's own loop calls an operator at a time, each of which allocates its result and wakes its
threads: of a step with one row that is most of the time. Here the buffers stay and the kernels'
arguments with them; a step writes how many rows it has, and where its blocks and its adapters are.
Linears that a library multiplies stand between the kernels, and cut the program there.

Every step of a base goes this way, or none: a row's bits must not depend on how many rows there
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve import faults
from loraserve.errors import InvariantViolation
from loraserve.model.backends.backend import DecoderLayer, Norm
from loraserve.model.config.model_config import ActivationFunction, ModelConfig
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.layers.linears import JoinedLinear, Linear, own_weight
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.mlp import GatedMlp
from loraserve.model.layers.norms import ResidualNorm, RMSNorm
from loraserve.model.layers.rotary import RotaryEmbedding
from loraserve.progress import Progress
from loraserve_kernels.common.modules import MODULE_INDEX, MODULES, SITES
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.attention.paged import AttentionPlan, make_attention_plan
from loraserve_kernels.cpu.linear.decoded import GROUP, DecodedWeight, DotWeight, code_offset, full_bias_of
from loraserve_kernels.cpu.lora.apply import HAS_NUMBA
from loraserve_kernels.cpu.program.program import Program, kernel
from loraserve_kernels.errors import InvalidPlan, TensorMismatch
from loraserve_kernels.ops import apply_lora

_LORA_DTYPES = {
    torch.float32: "lora-float32",
    torch.bfloat16: "lora-bfloat16",
    torch.float16: "lora-float16",
    torch.int8: "lora-int8",
}
_NO_WINDOW = 1 << 40
_SMALLEST_CAPACITY = 16
_MIN_PARALLEL_WEIGHTS = 1 << 18
"""A step that multiplies fewer weights isn't worth waking a second thread for."""
_LONG_PRODUCTS = 1 << 33
"""Products of a step that takes so long that each of its layers is a mark of progress."""


def can_run(config: ModelConfig) -> bool:
    """Return whether a base's steps can be programs: numba is there, and takes its heads."""
    if not HAS_NUMBA:
        return False
    from loraserve_kernels.cpu.simd import LANES

    return config.head_dim % LANES == 0


@dataclass(slots=True, eq=False)
class _Rows:
    """Buffer of rows that linears read.

    Attributes:
        values: [capacity, width] float32.
        codes: [capacity, bytes] int8, the same rounded, for linears that take it so; filled up with
            zeros to what one instruction multiplies.
        scales: [capacity] float32, of the codes.
        has_codes: whether a linear reads the codes.
    """

    values: Tensor
    codes: Tensor
    scales: Tensor
    has_codes: bool = False

    @classmethod
    def make(cls, capacity: int, width: int) -> _Rows:
        from loraserve_kernels.cpu.linear.decoded_kernel import DOT_INPUTS

        num_bytes = -(-width // DOT_INPUTS) * 4
        return cls(torch.zeros(capacity, width), torch.zeros(capacity, num_bytes, dtype=torch.int8), torch.ones(capacity))

    @property
    def width(self) -> int:
        return self.values.shape[1]


@dataclass(slots=True, eq=False)
class _Outputs:
    """Buffer that linears write: [capacity, width] float32, the width filled up to whole tiles."""

    values: Tensor
    width: int

    @classmethod
    def make(cls, capacity: int, width: int) -> _Outputs:
        from loraserve_kernels.cpu.linear.decoded_kernel import TILE

        # a joined linear's parts fill up their own channels, the last beyond the width
        return cls(torch.zeros(capacity, -(-width // TILE) * TILE + TILE), width)

    def rows(self, count: int) -> Tensor:
        return self.values[:count, : self.width]


@dataclass(frozen=True, slots=True)
class _OwnNorm:
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
        """Return the items up to each end, by layer, and with ranges joined."""
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


class StepProgram:
    """Steps of one base. One thread at a time calls `run`.

    Args:
        config: the base's, which `can_run` takes.
        progress: told of each layer of a long step.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: LoraLinear,
        rotaries: Sequence[RotaryEmbedding],
        progress: Progress,
    ) -> None:
        self._config, self._layers, self._norm, self._head = config, tuple(layers), norm, head
        self._rotaries, self._progress = tuple(rotaries), progress
        self._max_positions = min(rotary.cos.shape[0] for rotary in rotaries) if rotaries else 1 << 62
        self._capacity = 0
        self._kv: KVTensors | None = None

    def takes(self, kv: KVTensors) -> bool:
        """Return whether the kernels read this cache."""
        if kv is self._kv:
            return True
        from loraserve_kernels.cpu.simd import LANES

        return kv.block_size % LANES == 0 and all(
            t.dtype == torch.float32 and t.stride(-1) == 1 and t.stride(2) == self._config.head_dim
            for t in (*kv.k, *kv.v)
        )

    def hidden(self, num_rows: int) -> Tensor:
        """Return where `run` reads the residual stream of a step's rows, to be written.

        It is [num_rows, hidden_size] float32, before the first layer.
        """
        if num_rows > self._capacity:
            self._build(max(_SMALLEST_CAPACITY, 1 << (num_rows - 1).bit_length()))
        return self._hidden[:num_rows]

    def run(self, inputs: ModelInputs, kv: KVTensors) -> tuple[Tensor | None, Tensor]:
        """Compute a step from `hidden`; keys and values are in the cache afterwards.

        Returns:
            The logits, [num_kept, vocab_size] float32, in memory of their own, unscaled, with
            adapters' heads; None where the step pools, or keeps no row. And the kept rows after the
            last norm, [num_kept, hidden_size] float32, valid until the next step.

        Raises:
            InvalidPlan, TensorMismatch: a slot or a block that the cache doesn't have.
            InvariantViolation: a position that the base doesn't have, kept rows out of order.
        """
        num_rows, kept = inputs.token_ids.shape[0], inputs.kept_rows
        num_kept = num_rows if kept is None else kept.shape[0]
        if int(inputs.positions.min()) < 0 or int(inputs.positions.max()) >= self._max_positions:
            raise InvariantViolation(f"a position isn't below {self._max_positions}")
        plan = make_attention_plan(inputs.query_starts, inputs.context_lens, inputs.block_tables, kv.block_size)
        if plan.num_blocks > kv.k[0].shape[0]:
            raise TensorMismatch(f"the plan takes {plan.num_blocks} blocks; the cache has {kv.k[0].shape[0]}")
        program, num_threads = self._program, self._num_threads(num_rows)
        program.reset()
        self._set_cache(kv)
        # whatever the kernels read has to live until they have run
        alive = [plan, self._set_rows(inputs, num_rows, num_kept), self._set_attention(plan, num_threads)]
        kept_lora = inputs.kept_lora
        alive.append(self._set_adapters(inputs.lora, kept_lora, num_threads))
        end, logits = "stored", None
        if num_kept:
            end = "normed"
            if inputs.pooled is None and self._head_kernels:
                end, logits = "head", self._set_head(num_kept)
        self._run_items(end, num_rows, num_kept, num_threads)
        del alive
        outside = int(program.blocks[self._rotary, self._outside].sum())
        if outside:
            raise InvalidPlan(
                f"{outside} slots aren't within the cache's {kv.k[0].shape[0]} blocks of {kv.block_size}"
            )
        x = self._x.values[:num_kept]
        if inputs.pooled is not None or not num_kept:
            return None, x
        if logits is None:
            logits = self._head.base(x)
        elif logits.shape[1] != self._head.base.out_features:
            logits = logits[:, : self._head.base.out_features].contiguous()
        if kept_lora is not None:
            apply_lora(x, logits, kept_lora, self._head.site, 0, self._head.base.bias)
        return logits, x

    def _run_items(self, end: str, num_rows: int, num_kept: int, num_threads: int) -> None:
        by_layer, joined = self._schedules
        has_faults = faults.is_armed("model.layer")
        is_long = has_faults or num_rows * self._num_weights > _LONG_PRODUCTS
        for item in (by_layer if is_long else joined)[end]:
            if has_faults:
                faults.hit("model.layer")
            if isinstance(item, tuple):
                self._program.run(*item, num_threads)
            else:
                item(num_rows, num_kept)
            self._progress.tick()

    def _num_threads(self, num_rows: int) -> int:
        return threads.num_threads() if num_rows * self._num_weights >= _MIN_PARALLEL_WEIGHTS else 1

    # -- what a step decides ---------------------------------------------------------------------

    def _set_rows(self, inputs: ModelInputs, num_rows: int, num_kept: int) -> list[Tensor]:
        """Write how many rows there are, and where what the kernels read of them is."""
        from loraserve_kernels.cpu.program import gather_kernel, rotary_kernel

        blocks = self._program.blocks
        for word, numbers in self._all_rows.items():
            blocks[numbers, word] = num_rows
        for word, numbers in self._kept_rows.items():
            blocks[numbers, word] = num_kept
        kept = inputs.kept_rows
        if kept is None:
            kept = torch.arange(num_rows)
        tensors = [inputs.positions.contiguous(), inputs.slot_mapping.contiguous(), kept.contiguous()]
        blocks[self._rotary, rotary_kernel.POSITIONS] = tensors[0].data_ptr()
        blocks[self._rotary, rotary_kernel.SLOTS] = tensors[1].data_ptr()
        blocks[self._gathers, gather_kernel.ROWS] = tensors[2].data_ptr()
        return tensors

    def _set_cache(self, kv: KVTensors) -> None:
        """Write where each layer's keys and values are, if they are others than before."""
        if kv is self._kv:
            return
        from loraserve_kernels.cpu.attention import kernel as attention_kernel
        from loraserve_kernels.cpu.program import rotary_kernel as r

        a, blocks = attention_kernel, self._program.blocks
        for layer, (k, v) in enumerate(zip(kv.k, kv.v, strict=True)):
            addresses = (k.data_ptr(), k.stride(0), k.stride(1)), (v.data_ptr(), v.stride(0), v.stride(1))
            blocks[self._rotary[layer], r.K_CACHE : r.K_HEAD + 1] = addresses[0]
            blocks[self._rotary[layer], r.V_CACHE : r.V_HEAD + 1] = addresses[1]
            blocks[self._rotary[layer], r.NUM_BLOCKS] = k.shape[0]
            blocks[self._rotary[layer], r.BLOCK_SIZE] = kv.block_size
            blocks[self._attention[layer], a.K : a.K_HEAD + 1] = addresses[0]
            blocks[self._attention[layer], a.V : a.V_HEAD + 1] = addresses[1]
            blocks[self._attention[layer], a.BLOCK_SIZE] = kv.block_size
        self._kv = kv

    def _set_attention(self, plan: AttentionPlan, num_threads: int) -> Tensor:
        """Write which rows see which keys; return the memory of the scores."""
        from loraserve_kernels.cpu.attention import kernel as a

        blocks, config = self._program.blocks, self._config
        # one slot behind a row's weights for their sum
        scratch_row = plan.num_scores + 1
        group = config.num_heads // config.num_kv_heads
        scratch = torch.empty(num_threads * a.ROW_TILE * group * scratch_row)
        for word, value in (
            (a.BLOCK_TABLES, plan.block_tables.data_ptr()),
            (a.MAX_BLOCKS, plan.block_tables.shape[1]),
            (a.SEQUENCES, plan.table.ctypes.data),
            (a.NUM_SEQUENCES, len(plan.context_lens)),
            (a.SCRATCH, scratch.data_ptr()),
            (a.SCRATCH_ROW, scratch_row),
        ):
            blocks[self._attention, word] = value
        return scratch

    def _set_head(self, num_kept: int) -> Tensor:
        """Write where the logits go, and return them."""
        logits = torch.empty(num_kept, self._head_width)
        for number, word, offset in self._head_kernels:
            self._program.blocks[number, word] = logits.data_ptr() + offset
        return logits

    def _set_adapters(self, lora: LoraPlan | None, kept: LoraPlan | None, num_threads: int) -> list[object]:
        """Write which rows belong to which adapters; return the memory that the kernels use."""
        alive: list[object] = []
        if lora is None and not self._has_adapters:
            return alive
        self._has_adapters = lora is not None
        for (site, is_kept), places in self._lora.items():
            alive += self._set_site(kept if is_kept else lora, site, places, num_threads)
        alive += self._set_norms(lora, kept)
        return alive

    def _set_site(
        self, plan: LoraPlan | None, site: str, places: npt.NDArray[np.intp], num_threads: int
    ) -> list[object]:
        """Write a plan into these layers' kernels of a site; places is [layers, dtypes]."""
        from loraserve_kernels.cpu.lora import kernel as k

        blocks, alive, scratch, tiles = self._program.blocks, list[object](), None, None
        for column, (dtype, name) in enumerate(_LORA_DTYPES.items()):
            numbers = places[:, column]
            table = None if plan is None else plan.tables.get(dtype)
            works = () if plan is None or table is None else tuple(s.adapter.work[site] for s in plan.segments)
            if plan is None or table is None or not any(work.num_bytes for work in works):
                self._program.put(numbers, None)
                continue
            if scratch is None:
                scratch = np.empty((plan.num_tokens, max(1, *(work.num_ranks for work in works))), dtype=np.float32)
                has_rows = any(work.has_rows for work in works)
                tiles = np.empty((num_threads if has_rows else 0, k.TILE_FLOATS), dtype=np.float32)
                alive += [scratch, tiles, plan]
            self._program.put(numbers, kernel(name))
            for word in kernel(name).counters:
                blocks[numbers, word] = 0
            blocks[numbers, k.SEGMENTS], blocks[numbers, k.NUM_SEGMENTS] = table.ctypes.data, len(table)
            blocks[numbers, k.SCRATCH], blocks[numbers, k.SCRATCH_STRIDE] = scratch.ctypes.data, scratch.shape[1]
            blocks[numbers, k.TILES] = 0 if tiles is None or not len(tiles) else tiles.ctypes.data
        return alive

    def _set_norms(self, lora: LoraPlan | None, kept: LoraPlan | None) -> list[object]:
        """Write which rows have norms of their adapter's own; return the tables that say so."""
        alive: list[object] = []
        plans = [plan for plan in (lora, kept) if plan is not None and plan.has_norms]
        if not plans and not self._has_norms:
            return alive
        self._has_norms = bool(plans)
        for own in self._own_norms:
            plan = kept if own.is_kept else lora
            table = None if plan is None or not plan.has_norms else _norm_table(plan, own)
            self._program.blocks[own.number, own.word] = 0 if table is None else table.ctypes.data
            alive.append(table)
        return alive

    # -- what the base decides -------------------------------------------------------------------

    def _build(self, capacity: int) -> None:
        """Make buffers for so many rows, and the kernels that work on them."""
        config = self._config
        self._capacity, self._kv, self._has_adapters, self._has_norms = capacity, None, False, False
        self._program = Program()
        self._schedule = _Schedule(self._program)
        self._weights: list[object] = []
        self._num_weights = 0
        self._all_rows: dict[int, Any] = {}
        self._kept_rows: dict[int, Any] = {}
        self._counted = self._all_rows
        self._own_norms: list[_OwnNorm] = []
        self._lora: dict[tuple[str, bool], Any] = {}
        self._rotary, self._attention, self._gathers = [], [], []
        hidden_size, size = config.hidden_size, config.num_heads * config.head_dim
        self._hidden = torch.zeros(capacity, hidden_size)
        self._kept_hidden, self._kept_attended = torch.zeros(capacity, hidden_size), _Rows.make(capacity, size)
        self._x, self._attended = _Rows.make(capacity, hidden_size), _Rows.make(capacity, size)
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._qkv, self._delta = _Outputs.make(capacity, width), _Outputs.make(capacity, hidden_size)
        self._gate_up: _Outputs | None = None
        last = len(self._layers) - 1
        hidden = self._hidden
        self._mark_codes()
        for index, layer in enumerate(self._layers):
            delta = (index - 1, "mlp_out_norm") if index else None
            self._add_norm(layer.attention_norm, hidden, (index, "attention_norm"), delta)
            self._add_site(layer.qkv, self._x, self._qkv)
            self._add_rotary(layer)
            if index == last:
                self._schedule.end("stored")
            self._add_attention(layer)
            attended = self._attended
            if index == last:
                self._counted, hidden, attended = self._kept_rows, self._kept_hidden, self._kept_attended
                self._add_gather(self._hidden, hidden)
                self._add_gather(self._attended.values, attended.values)
            self._add_quantize(attended)
            self._add_site(layer.o, attended, self._delta)
            self._add_norm(layer.mlp_norm, hidden, (index, "mlp_norm"), (index, "attention_out_norm"))
            self._add_mlp(layer, index == last)
            if index < last:
                self._schedule.cut()
        self._add_norm(self._norm, hidden, (0, "norm"), (last, "mlp_out_norm"))
        self._schedule.end("normed")
        self._add_head()
        self._schedule.end("head")
        self._freeze()

    def _freeze(self) -> None:
        from loraserve_kernels.cpu.program import rotary_kernel

        self._program.freeze()
        self._schedules = self._schedule.finished()
        self._outside = rotary_kernel.OUTSIDE
        for counted in (self._all_rows, self._kept_rows):
            for word, numbers in counted.items():
                counted[word] = np.array(numbers)
        self._rotary, self._attention = np.array(self._rotary), np.array(self._attention)
        self._gathers = np.array(self._gathers)
        self._lora = {site: np.array(places) for site, places in self._lora.items()}

    def _mark_codes(self) -> None:
        """Note which buffers' rows are read as codes."""
        for linear in (self._head.base, *(layer.qkv.base for layer in self._layers)):
            self._x.has_codes |= _reads_codes(linear)
        for layer in self._layers:
            self._attended.has_codes |= _reads_codes(layer.o.base)
            if isinstance(layer.mlp, GatedMlp):
                self._x.has_codes |= _reads_codes(layer.mlp.gate_up.base)
        self._kept_attended.has_codes = self._attended.has_codes

    def _add(self, name: str, rows_word: int, words: dict[int, int]) -> int:
        """Append a kernel that works on the rows that are counted here."""
        number = self._program.add(kernel(name), words)
        self._counted.setdefault(rows_word, []).append(number)
        return number

    def _add_norm(self, norm: Norm, hidden: Tensor, place: tuple[int, str], delta: tuple[int, str] | None) -> None:
        """Append the sum of `hidden` and the delta, and the norm of it.

        Args:
            place: layer and name of the norm, as adapters name their own.
            delta: layer and name of the norm that the delta passes; None: there is no delta.
        """
        from loraserve_kernels.cpu.program import norm_kernel as k

        inner, delta_norm, scale = _norm_parts(norm)
        eps = self._config.rms_norm_eps
        weight = 0 if inner is None else self._keep(inner.weight)
        words = {
            k.WIDTH: hidden.shape[1],
            k.HIDDEN: hidden.data_ptr(),
            k.WEIGHT: weight,
            k.OUT: self._x.values.data_ptr(),
            k.EPS: _float_word(eps),
            k.DELTA_SCALE: _float_word(scale),
            **_code_words(self._x, k.CODES, k.CODE_ROW_BYTES, k.SCALES, k.OFFSET, k.IS_WIDE),
        }
        if delta is not None:
            words |= {
                k.DELTA: self._delta.values.data_ptr(),
                k.DELTA_STRIDE: self._delta.values.stride(0),
                k.DELTA_WEIGHT: 0 if delta_norm is None else self._keep(delta_norm.weight),
            }
        number, is_kept = self._add("norm", k.NUM_ROWS, words), self._counted is self._kept_rows
        self._own_norms.append(_OwnNorm(number, k.WEIGHTS, *place, weight, is_kept))
        if delta is not None and delta_norm is not None:
            self._own_norms.append(_OwnNorm(number, k.DELTA_WEIGHTS, *delta, words[k.DELTA_WEIGHT], is_kept))

    def _add_site(self, linear: LoraLinear, source: _Rows, out: _Outputs) -> None:
        """Append a site's linears, and places for the kernels of its adapters."""
        self._add_linear(linear.base, source, out, 0)
        self._add_lora(linear, source, out)

    def _add_linear(self, linear: Linear, source: _Rows, out: _Outputs, column: int) -> None:
        if isinstance(linear, JoinedLinear):
            for part in linear.parts:
                self._add_linear(part, source, out, column)
                column += part.out_features
            return
        weight = own_weight(linear)
        if weight is None:
            takes_kept, end = self._counted is self._kept_rows, column + linear.out_features
            self._num_weights += source.width * linear.out_features

            def call(num_rows: int, num_kept: int) -> None:
                count = num_kept if takes_kept else num_rows
                out.values[:count, column:end] = linear(source.values[:count])

            self._schedule.call(call)
            return
        self._add_product(weight, linear.bias, source, out.values.data_ptr() + 4 * column, out.values.stride(0))

    def _add_product(
        self, weight: DotWeight | DecodedWeight, bias: Tensor | None, source: _Rows, y: int, y_stride: int
    ) -> int:
        from loraserve_kernels.cpu.linear import decoded_kernel as k

        num_channels = weight.scales.shape[-1]
        full_bias = full_bias_of(bias, num_channels)
        self._weights += [weight, full_bias]
        self._num_weights += weight.codes.numel()
        words = {
            k.Y: y,
            k.Y_STRIDE: y_stride,
            k.CODES: weight.codes.data_ptr(),
            k.SCALES: weight.scales.data_ptr(),
            k.NUM_TILES: weight.codes.shape[0],
            k.BIAS: full_bias.data_ptr(),
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

    def _add_lora(self, linear: LoraLinear, source: _Rows, out: _Outputs) -> None:
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
            k.FIRST_RECORD: linear.layer * len(MODULES) + MODULE_INDEX[modules[0]],
            k.NUM_SLICES: len(modules),
            k.BIAS: 0 if bias is None else self._keep(bias),
            **{k.WIDTHS + i: shape[0] for i, shape in enumerate(shapes)},
        }
        places = [self._program.add(None, words) for _ in _LORA_DTYPES]
        self._lora.setdefault((linear.site, self._counted is self._kept_rows), []).append(places)

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
                k.EPS: _float_word(layer.q_norm.eps),
            }
        if layer.rope is not None:
            rotary = self._rotaries[layer.rope]
            words |= {
                k.ROTATED: 2 * rotary.cos.shape[1],
                k.COS: self._keep(rotary.cos),
                k.SIN: self._keep(rotary.sin),
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
        self._attention.append(self._program.add(kernel("attention"), words))

    def _add_gather(self, x: Tensor, out: Tensor) -> None:
        from loraserve_kernels.cpu.program import gather_kernel as k

        words = {k.X: x.data_ptr(), k.OUT: out.data_ptr(), k.WIDTH: x.shape[1]}
        self._gathers.append(self._add("gather", k.NUM_ROWS, words))

    def _add_quantize(self, rows: _Rows) -> None:
        from loraserve_kernels.cpu.linear import row_quantization as k

        if rows.has_codes:
            codes = _code_words(rows, k.CODES, k.CODE_ROW_BYTES, k.SCALES, k.OFFSET, k.IS_WIDE)
            words = {k.X: rows.values.data_ptr(), k.X_STRIDE: rows.width, k.WIDTH: rows.width, **codes}
            self._add("quantize", k.NUM_ROWS, words)

    def _add_mlp(self, layer: DecoderLayer, takes_kept: bool) -> None:
        """Append what makes the next delta of the normed rows."""
        from loraserve_kernels.cpu.program import gate_kernel as k

        mlp = layer.mlp
        if not isinstance(mlp, GatedMlp):

            def call(num_rows: int, num_kept: int) -> None:
                count = num_kept if takes_kept else num_rows
                self._delta.rows(count).copy_(mlp(self._x.values[:count], None))

            self._schedule.call(call)
            return
        if self._gate_up is None:
            size = mlp.gate_up.base.out_features // 2
            self._gate_up, self._gated = _Outputs.make(self._capacity, 2 * size), _Rows.make(self._capacity, size)
            linears = [other.mlp.down.base for other in self._layers if isinstance(other.mlp, GatedMlp)]
            self._gated.has_codes = any(_reads_codes(linear) for linear in linears)
        self._add_site(mlp.gate_up, self._x, self._gate_up)
        gated = self._gated
        words = {
            k.WIDTH: gated.width,
            k.X: self._gate_up.values.data_ptr(),
            k.X_STRIDE: self._gate_up.values.stride(0),
            k.OUT: gated.values.data_ptr(),
            k.IS_GELU: int(self._config.activation is not ActivationFunction.SILU),
            **_code_words(gated, k.CODES, k.CODE_ROW_BYTES, k.SCALES, k.OFFSET, k.IS_WIDE),
        }
        self._add("gate", k.NUM_ROWS, words)
        self._add_site(mlp.down, gated, self._delta)

    def _add_head(self) -> None:
        """Append the head's products, where all of them are ours."""
        from loraserve_kernels.cpu.linear import decoded_kernel as k
        from loraserve_kernels.cpu.linear.decoded_kernel import TILE

        base = self._head.base
        parts = base.parts if isinstance(base, JoinedLinear) else (base,)
        weights = [own_weight(part) for part in parts]
        self._head_kernels: list[tuple[int, int, int]] = []
        # parts fill up their own channels, the last beyond the width
        self._head_width = -(-base.out_features // TILE) * TILE + (TILE if len(parts) > 1 else 0)
        if any(weight is None for weight in weights):
            return
        offset = 0
        for part, weight in zip(parts, weights, strict=True):
            if weight is not None:
                number = self._add_product(weight, part.bias, self._x, 0, self._head_width)
                self._head_kernels.append((number, k.Y, 4 * offset))
                offset += part.out_features

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor alive as float32; return its address."""
        kept = tensor.float().contiguous()
        self._weights.append(kept)
        return kept.data_ptr()


def _reads_codes(linear: Linear) -> bool:
    parts = linear.parts if isinstance(linear, JoinedLinear) else (linear,)
    return any(isinstance(own_weight(part), DotWeight) for part in parts)


def _norm_parts(norm: Norm) -> tuple[RMSNorm | None, RMSNorm | None, float]:
    """Return the norm of the sum, that of the delta, and what the delta is multiplied with."""
    if isinstance(norm, RMSNorm):
        return norm, None, 1.0
    if isinstance(norm, ResidualNorm):
        return norm.norm, norm.delta_norm, norm.delta_scale
    raise InvariantViolation(f"a {type(norm).__name__} isn't a CPU's norm")


def _code_words(rows: _Rows, codes: int, row_bytes: int, scales: int, offset: int, is_wide: int) -> dict[int, int]:
    """Return the words that have a kernel round its rows, by what the word is of."""
    from loraserve_kernels.cpu.linear.decoded_kernel import HAS_VNNI

    if not rows.has_codes:
        return {}
    return {
        codes: rows.codes.data_ptr(),
        row_bytes: rows.codes.stride(0),
        scales: rows.scales.data_ptr(),
        offset: code_offset(),
        is_wide: int(not HAS_VNNI),
    }


def _norm_table(plan: LoraPlan, own: _OwnNorm) -> npt.NDArray[np.int64]:
    """Return the address of each row's weight of a norm."""
    table = np.full(plan.num_tokens, own.base, dtype=np.int64)
    for segment in plan.segments:
        weight = segment.adapter.norms.get((own.layer, own.name))
        if weight is not None:
            table[segment.row_start : segment.row_end] = weight.data_ptr()
    return table


def _float_word(number: float) -> int:
    """Return a word whose first half is this float32."""
    return int(np.array([number, 0], dtype=np.float32).view(np.int64)[0])
