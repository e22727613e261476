"""Program of all layers of a step on a CPU: the kernels between embedding and logits, in order.

The decoder's own loop calls an operator at a time, each of which allocates its result and wakes its
threads: of a step with one row that is most of the time. Here the buffers stay and the kernels'
arguments with them; a step writes how many rows it has, and where its blocks and its adapters are.
Linears that a library multiplies stand between the kernels, and cut the program there.

Every step of a base goes this way, or none: a row's bits must not depend on how many rows there
are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve import faults
from loraserve.errors import InvariantViolation
from loraserve.model.backends.backend import DecoderLayer, Norm
from loraserve.model.backends.step_kernels import OwnNorm, StepKernels
from loraserve.model.backends.step_sizes import capacity_of
from loraserve.model.config.model_config import ModelConfig
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.rotary import RotaryEmbedding
from loraserve.progress import Progress
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.attention import kernel as a
from loraserve_kernels.cpu.attention.paged import AttentionPlan, make_attention_plan
from loraserve_kernels.cpu.program import gather_kernel
from loraserve_kernels.cpu.program import rotary_kernel as r
from loraserve_kernels.cpu.simd import LANES
from loraserve_kernels.errors import InvalidPlan, TensorMismatch
from loraserve_kernels.ops import apply_lora

_MIN_PARALLEL_WEIGHTS = 1 << 18
"""A step that multiplies fewer weights isn't worth waking a second thread for."""
_LONG_PRODUCTS = 1 << 33
"""Products of a step that takes so long that each of its layers is a mark of progress."""


class StepProgram:
    """Steps of one base. One thread at a time calls `run`.

    Args:
        config: the base's, which `can_run` takes.
        progress: notified of each layer of a long step.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: LoraLinear | None,
        rotaries: Sequence[RotaryEmbedding],
        progress: Progress,
    ) -> None:
        self._config, self._layers, self._norm, self._head = config, tuple(layers), norm, head
        self._rotaries, self._progress = tuple(rotaries), progress
        self._max_positions = min(rotary.cos.shape[0] for rotary in rotaries) if rotaries else 1 << 62
        self._kernels: StepKernels | None = None
        self._kv: KVTensors | None = None
        # rows and kept rows in the kernels' blocks
        self._num_rows = (0, 0)
        self._has_adapters = self._has_norms = False

    @staticmethod
    def can_run(config: ModelConfig) -> bool:
        """Check whether the kernels take a base's heads."""
        return config.head_dim % LANES == 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers that it keeps between steps."""
        return 0 if self._kernels is None else self._kernels.num_bytes

    def takes(self, kv: KVTensors) -> bool:
        """Check whether the kernels read this cache."""
        if kv is self._kv:
            return True
        return kv.block_size % LANES == 0 and all(
            t.dtype == torch.float32 and t.stride(-1) == 1 and t.stride(2) == self._config.head_dim
            for t in (*kv.k, *kv.v)
        )

    def hidden(self, num_rows: int) -> Tensor:
        """Provide the memory from which `run` reads the residual stream of a step's rows.

        It is [num_rows, hidden_size] float32, before the first layer.
        """
        kernels = self._kernels
        if kernels is None or num_rows > kernels.capacity:
            # the buffers before are given back first
            self._kernels = kernels = None
            capacity = capacity_of(num_rows)
            self._kv, self._num_rows, self._has_adapters, self._has_norms = None, (0, 0), False, False
            self._kernels = kernels = StepKernels(
                self._config, self._layers, self._norm, self._head, self._rotaries, capacity
            )
        return kernels.hidden[:num_rows]

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
        positions = inputs.positions.numpy()
        if positions.min() < 0 or positions.max() >= self._max_positions:
            raise InvariantViolation(f"a position isn't below {self._max_positions}")
        plan = make_attention_plan(inputs.query_starts, inputs.context_lens, inputs.block_tables, kv.block_size)
        if plan.num_blocks > kv.k[0].shape[0]:
            raise TensorMismatch(f"the plan takes {plan.num_blocks} blocks; the cache has {kv.k[0].shape[0]}")
        kernels = self._kernels
        if kernels is None or num_rows > kernels.capacity:
            raise InvariantViolation(f"a step of {num_rows} rows was run that `hidden` wasn't asked for")
        is_parallel = num_rows * kernels.num_weights >= _MIN_PARALLEL_WEIGHTS
        num_threads = threads.num_threads() if is_parallel else 1
        kernels.program.reset()
        self._set_cache(kernels, kv)
        # whatever the kernels read has to live until they have run
        alive: list[object] = [plan, self._set_rows(kernels, inputs, num_rows, num_kept)]
        alive.append(self._set_attention(kernels, plan, num_threads))
        kept_lora = inputs.kept_lora
        alive.append(self._set_adapters(kernels, inputs.lora, kept_lora, num_threads))
        end, logits = "stored", None
        if num_kept:
            end = "normed"
            if inputs.pooled is None and kernels.head:
                end, logits = "head", _set_head(kernels, num_kept)
        kernels.plans = (inputs.lora, kept_lora)
        try:
            self._run_items(kernels, end, num_rows, num_kept, num_threads)
        finally:
            # plans keep adapters
            kernels.plans = (None, None)
        del alive
        _check_slots(kernels, kv)
        x = kernels.x.values[:num_kept]
        if inputs.pooled is not None or not num_kept:
            return None, x
        head = self._head
        if head is None:
            raise InvariantViolation("logits were asked for of a stage that has no head")
        if logits is None:
            logits = head.base(x)
        elif logits.shape[1] != head.base.out_features:
            logits = logits[:, : head.base.out_features].contiguous()
        if kept_lora is not None:
            apply_lora(x, logits, kept_lora, head.site, 0, head.base.bias)
        return logits, x

    def _run_items(self, kernels: StepKernels, end: str, num_rows: int, num_kept: int, num_threads: int) -> None:
        by_layer, joined = kernels.schedules
        has_faults = faults.is_armed("model.layer")
        is_long = has_faults or num_rows * kernels.num_weights > _LONG_PRODUCTS
        for item in (by_layer if is_long else joined)[end]:
            if has_faults:
                faults.hit("model.layer")
            if isinstance(item, tuple):
                kernels.program.run(*item, num_threads)
            else:
                item(num_rows, num_kept)
            self._progress.tick()

    def _set_rows(self, kernels: StepKernels, inputs: ModelInputs, num_rows: int, num_kept: int) -> list[Tensor]:
        """Write how many rows there are, and where what the kernels read of them is."""
        blocks = kernels.program.blocks
        if (num_rows, num_kept) != self._num_rows:
            for word, numbers in kernels.all_rows.items():
                blocks[numbers, word] = num_rows
            for word, numbers in kernels.kept_rows.items():
                blocks[numbers, word] = num_kept
            self._num_rows = (num_rows, num_kept)
        kept = inputs.kept_rows
        if kept is None:
            kept = torch.arange(num_rows)
        tensors = [inputs.positions.contiguous(), inputs.slot_mapping.contiguous(), kept.contiguous()]
        blocks[kernels.rotary, r.POSITIONS] = tensors[0].data_ptr()
        blocks[kernels.rotary, r.SLOTS] = tensors[1].data_ptr()
        blocks[kernels.gathers, gather_kernel.ROWS] = tensors[2].data_ptr()
        return tensors

    def _set_cache(self, kernels: StepKernels, kv: KVTensors) -> None:
        """Write where each layer's keys and values are, if they are others than before."""
        if kv is self._kv:
            return
        blocks = kernels.program.blocks
        for layer, (k, v) in enumerate(zip(kv.k, kv.v, strict=True)):
            addresses = (k.data_ptr(), k.stride(0), k.stride(1)), (v.data_ptr(), v.stride(0), v.stride(1))
            blocks[kernels.rotary[layer], r.K_CACHE : r.K_HEAD + 1] = addresses[0]
            blocks[kernels.rotary[layer], r.V_CACHE : r.V_HEAD + 1] = addresses[1]
            blocks[kernels.rotary[layer], r.NUM_BLOCKS] = k.shape[0]
            blocks[kernels.rotary[layer], r.BLOCK_SIZE] = kv.block_size
            blocks[kernels.attention[layer], a.K : a.K_HEAD + 1] = addresses[0]
            blocks[kernels.attention[layer], a.V : a.V_HEAD + 1] = addresses[1]
            blocks[kernels.attention[layer], a.BLOCK_SIZE] = kv.block_size
        self._kv = kv

    def _set_attention(self, kernels: StepKernels, plan: AttentionPlan, num_threads: int) -> npt.NDArray[np.float32]:
        """Write which rows see which keys; return the memory of the scores."""
        blocks, config = kernels.program.blocks, self._config
        # one slot behind a row's weights for their sum
        scratch_row = plan.num_scores + 1
        group = config.num_heads // config.num_kv_heads
        scratch = np.empty(num_threads * a.ROW_TILE * group * scratch_row, dtype=np.float32)
        tables, sequences = plan.block_tables, plan.table
        blocks[kernels.attention, a.BLOCK_TABLES : a.NUM_SEQUENCES + 1] = (
            tables.data_ptr(),
            tables.shape[1],
            sequences.ctypes.data,
            len(sequences),
        )
        blocks[kernels.attention, a.SCRATCH : a.SCRATCH_ROW + 1] = (scratch.ctypes.data, scratch_row)
        return scratch

    def _set_adapters(
        self, kernels: StepKernels, lora: LoraPlan | None, kept: LoraPlan | None, num_threads: int
    ) -> list[object]:
        """Write which rows belong to which adapters; return the memory that the kernels use."""
        alive: list[object] = []
        if lora is None and not self._has_adapters:
            return alive
        self._has_adapters = lora is not None
        alive += kernels.adapters.fill(lora, kept, num_threads)
        alive += self._set_norms(kernels, lora, kept)
        return alive

    def _set_norms(self, kernels: StepKernels, lora: LoraPlan | None, kept: LoraPlan | None) -> list[object]:
        """Write which rows have norms of their adapter's own; return the tables of them."""
        alive: list[object] = []
        plans = [plan for plan in (lora, kept) if plan is not None and plan.has_norms]
        if not plans and not self._has_norms:
            return alive
        self._has_norms = bool(plans)
        for own in kernels.own_norms:
            plan = kept if own.is_kept else lora
            table = None if plan is None or not plan.has_norms else _norm_table(plan, own)
            kernels.program.blocks[own.number, own.word] = 0 if table is None else table.ctypes.data
            alive.append(table)
        return alive


def _set_head(kernels: StepKernels, num_kept: int) -> Tensor:
    """Write where the logits go, and return them."""
    logits = torch.empty(num_kept, kernels.head_width)
    for number, word, offset in kernels.head:
        kernels.program.blocks[number, word] = logits.data_ptr() + offset
    return logits


def _norm_table(plan: LoraPlan, own: OwnNorm) -> npt.NDArray[np.int64]:
    """Build the table with the address of each row's weight of a norm."""
    table = np.full(plan.num_tokens, own.base, dtype=np.int64)
    for segment in plan.segments:
        weight = segment.adapter.norms.get((own.layer, own.name))
        if weight is not None:
            table[segment.row_start : segment.row_end] = weight.data_ptr()
    return table


def _check_slots(kernels: StepKernels, kv: KVTensors) -> None:
    # every layer's kernel counts the same
    outside = int(kernels.program.blocks[kernels.rotary[0], r.OUTSIDE])
    if outside:
        raise InvalidPlan(f"{outside} slots aren't within the cache's {kv.k[0].shape[0]} blocks of {kv.block_size}")
