"""Steps of a decoder as an engine launches them: buffers at fixed addresses, decode steps as
graphs, chunks and mixed steps without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.model import RandomBase, make_kv
from loraserve.engine.execution.cuda_graphs import DecodeGraphs
from loraserve.model.inputs import GpuInputs
from loraserve_kernels.gpu.attention.plan import GpuAttentionPlan
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan
from loraserve_kernels.gpu.paged.pool import PagedPool

BLOCK_SIZE = 16
MAX_WORK_ITEMS = 4096


class Steps:
    """A decoder with a cache for some sequences, whose blocks lie in any order.

    Attributes:
        tables: [max_num_seqs, width] int32: each sequence's blocks.
        graphs: of the decode steps; replayed by `decode`.
    """

    def __init__(
        self,
        machine: Machine,
        base: RandomBase,
        pool: PagedPool,
        *,
        max_num_seqs: int,
        max_len: int,
        max_num_tokens: int,
        sizes: Sequence[int],
    ) -> None:
        """Allocate everything; nothing is captured yet (`capture`).

        Args:
            max_len: of a sequence.
            max_num_tokens: rows of the largest mixed step.
            sizes: of decode steps.
        """
        self.machine, self.base, self._device = machine, base, machine.device
        config, decoder = base.config, base.decoder
        width = -(-max_len // BLOCK_SIZE)
        order = np.random.default_rng(0).permutation(max_num_seqs * width).astype(np.int32)
        self.tables: npt.NDArray[np.int32] = order.reshape(max_num_seqs, width)
        self._kv = make_kv(decoder, max_num_seqs * width, BLOCK_SIZE, machine)
        rows = max(max_num_tokens, max_num_seqs)
        self._attention = GpuAttentionPlan(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            max_num_tokens=rows,
            max_num_seqs=max_num_seqs,
            max_model_len=width * BLOCK_SIZE,
            device=self._device,
        )
        items = 64 if machine.is_tiny else MAX_WORK_ITEMS
        self._decode_lora = GpuLoraPlan(pool, max_num_tokens=max_num_seqs, max_work_items=items, block_m=16)
        self._mixed_lora = GpuLoraPlan(pool, max_num_tokens=rows, max_work_items=items, block_m=32)
        self._logits_lora = GpuLoraPlan(pool, max_num_tokens=max_num_seqs, max_work_items=items, block_m=16)
        # token ids, positions, slots
        self._rows = torch.zeros((3, rows), dtype=torch.int64, device=self._device)
        pinned = self._device.type == "cuda"
        self._staged = [torch.zeros((3, rows), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._turn = 0
        self._prefill: GpuInputs | None = None
        self.graphs = DecodeGraphs(self._device, list(sizes), self.run)

    @torch.inference_mode()
    def capture(self) -> None:
        self.graphs.capture(self._fill_nobody)

    def fill(
        self,
        sequences: Sequence[int],
        positions: Sequence[int],
        token_ids: Sequence[int],
        slots: Sequence[int],
    ) -> bool:
        """Describe a decode step: one row of each of these sequences.

        Whether any has an adapter.
        """
        where = np.array(positions)
        tables = self.tables[list(sequences)]
        cache_slots = (
            tables[np.arange(len(where)), where // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + where % BLOCK_SIZE
        )
        self._send(np.array(token_ids), where, cache_slots)
        starts = np.arange(len(where) + 1, dtype=np.int32)
        self._attention.fill(starts, (where + 1).astype(np.int32), tables)
        return self._decode_lora.fill(np.array(slots, dtype=np.int32))

    @torch.inference_mode()
    def decode(self, num_rows: int, with_lora: bool) -> Tensor:
        """Run the step that was filled in, by its graph; [num_rows,
        vocab_size] until the next step.
        """
        return self.graphs.replay(num_rows, with_lora)

    @torch.inference_mode()
    def run(self, num_rows: int, with_lora: bool) -> Tensor:
        """The same, launched kernel by kernel."""
        lora = self._decode_lora if with_lora else None
        return self.base.decoder.forward(self._inputs(num_rows, lora, None), self._kv)

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[int],
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int],
        *,
        last_rows_only: bool = False,
    ) -> Tensor:
        """Compute whole prompts in one step; the logits of all rows, or of each prompt's last."""
        self._prefill = self._prefill_inputs(sequences, prompts, slots, last_rows_only=last_rows_only)
        return self.prepared_prefill()

    @torch.inference_mode()
    def prepared_prefill(self) -> Tensor:
        """Compute the prompts of the last `prefill` again; may be captured."""
        if self._prefill is None:
            raise RuntimeError("no prompts were described")
        return self.base.decoder.forward(self._prefill, self._kv)

    def _prefill_inputs(
        self,
        sequences: Sequence[int],
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int],
        *,
        last_rows_only: bool,
    ) -> GpuInputs:
        lens = [len(prompt) for prompt in prompts]
        where = np.concatenate([np.arange(size) for size in lens])
        tables = self.tables[list(sequences)]
        owners = np.repeat(np.arange(len(lens)), lens)
        cache_slots = tables[owners, where // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + where % BLOCK_SIZE
        self._send(np.concatenate(prompts), where, cache_slots)
        starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        self._attention.fill(starts, np.array(lens, dtype=np.int32), tables)
        has_lora = self._mixed_lora.fill(np.repeat(np.array(slots, dtype=np.int32), lens))
        lora, wanted = self._mixed_lora if has_lora else None, None
        logits_lora = lora
        if last_rows_only:
            wanted = torch.from_numpy(starts[1:].astype(np.int64) - 1).to(self._device)
            logits_lora = self._logits_lora if self._logits_lora.fill(np.array(slots, dtype=np.int32)) else None
        return self._inputs(len(where), lora, logits_lora, wanted)

    def _fill_nobody(self, num_rows: int) -> None:
        nothing = np.zeros(num_rows, dtype=np.int64)
        self._send(nothing, nothing, nothing - 1)
        starts = np.arange(num_rows + 1, dtype=np.int32)
        self._attention.fill(starts, np.zeros(num_rows, dtype=np.int32), np.zeros((num_rows, 1), dtype=np.int32))
        self._decode_lora.fill(np.zeros(num_rows, dtype=np.int32))

    def _send(
        self, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> None:
        staged, count = self._staged[self._turn], len(token_ids)
        for row, values in zip(staged.numpy(), (token_ids, positions, slots), strict=True):
            row[:count] = values
        self._rows.copy_(staged, non_blocking=True)
        self._turn = 1 - self._turn

    def _inputs(
        self, num_rows: int, lora: GpuLoraPlan | None, logits_lora: GpuLoraPlan | None, wanted: Tensor | None = None
    ) -> GpuInputs:
        return GpuInputs(
            token_ids=self._rows[0, :num_rows],
            positions=self._rows[1, :num_rows],
            slot_mapping=self._rows[2, :num_rows],
            attention=self._attention,
            logits_rows=wanted,
            lora=lora,
            logits_lora=logits_lora,
        )
