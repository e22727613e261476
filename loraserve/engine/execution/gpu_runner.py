"""The base model on a GPU: decode steps as CUDA graphs, tokens sampled on the device.

A step is launched while the one before still runs. Its description is copied from alternating
pinned buffers to fixed addresses; tokens that aren't known yet are read from where the step before
leaves them. With ``TRITON_INTERPRET=1`` the same steps run on CPU tensors, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve.config import MAX_LORA_WORK_ITEMS, EngineConfig
from loraserve.engine.execution.batch import Batch
from loraserve.engine.execution.cuda_graphs import DecodeGraphs, bucket_sizes
from loraserve.engine.execution.gpu_io import GpuStepHandle, HostResults, Top, lost, send_logprobs, to_device, to_host
from loraserve.engine.execution.gpu_memory import attention_plan
from loraserve.engine.execution.pooled_rows import pooled_rows
from loraserve.engine.execution.sampler import Sampler, wait_for_masks, without_mask
from loraserve.engine.execution.step_rows import StepRows
from loraserve.engine.greedy import has_penalties
from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest, StepResult
from loraserve.errors import InvariantViolation
from loraserve.memory.devices.gpu import GpuDevice
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import GpuInputs, KVTensors, PooledRows
from loraserve.types import SamplingParams
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan
from loraserve_kernels.gpu.sampling.masks import MaskRows, allowed_logits
from loraserve_kernels.gpu.sampling.sampling import SamplingRows, sample, top_logprobs

_WARM_UP_ROWS = (1, 2, 15, 16, 17, 48, 63, 64, 65, 80, 1 << 20)
"""Step sizes on both sides of those that kernels distinguish, and the largest."""


class GpuRunner:
    """Launch steps on a GPU from buffers at fixed addresses.

    Attributes:
        num_blocks: KV blocks that slots may name.
    """

    def __init__(self, decoder: Decoder, config: EngineConfig, kv: KVTensors, adapters: GpuDevice) -> None:
        """Allocate what steps need and capture the decode steps.

        Args:
            adapters: holds the adapters; noted every launch, so that it overwrites nothing that a
                step still reads.
        """
        self._decoder, self._adapters, self._kv = decoder, adapters, kv
        self.num_blocks = kv.k[0].shape[0]
        self._device = device = decoder.backend.device
        self._sampler = Sampler(decoder.spec.eos_token_ids, decoder.spec.vocab_size)
        max_num_seqs, max_num_tokens = config.max_num_seqs, max(config.max_num_batched_tokens, config.max_num_seqs)
        self._decode_rows = StepRows(max_num_seqs, device)
        self._mixed_rows = StepRows(max_num_tokens, device)
        self._attention = attention_plan(decoder, config)
        pool, items = adapters.pool, MAX_LORA_WORK_ITEMS
        self._decode_lora = GpuLoraPlan(pool, max_num_tokens=max_num_seqs, max_work_items=items, block_m=16)
        self._mixed_lora = GpuLoraPlan(pool, max_num_tokens=max_num_tokens, max_work_items=items, block_m=32)
        self._logits_lora = GpuLoraPlan(pool, max_num_tokens=max_num_tokens, max_work_items=items, block_m=16)
        self._sampling = SamplingRows(max_num_seqs, device)
        self._masks = MaskRows(max_num_seqs, decoder.spec.vocab_size, device)
        self._sampled = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._finite = torch.zeros(max_num_seqs, dtype=torch.bool, device=device)
        # a step's results are read while the next step writes its own
        self._host_results = [HostResults(max_num_seqs, device) for _ in range(2)]
        self._turn = 0
        # previous step: entry of its batch → index into `_sampled`
        self._places: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        sizes = bucket_sizes(max_num_seqs) if config.cuda_graphs else []
        self._graphs = DecodeGraphs(device, sizes, self._decode)
        self._max_num_tokens = max_num_tokens
        if device.type == "cuda":
            self.warm_up(_WARM_UP_ROWS)
        with torch.inference_mode():
            self._graphs.capture(self._prepare_padding)

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[int]) -> None:
        """Compute steps of that many padding rows, so that no request's step waits for a compiler.

        Triton specializes kernels for numbers that are 1 or multiples of 16.
        """
        for num_rows in sorted({min(size, self._max_num_tokens, self._decoder.spec.max_model_len) for size in sizes}):
            self._mixed_rows.clear(num_rows)
            blocks = np.zeros((1, -(-num_rows // self._kv.block_size)), dtype=np.int32)
            length = np.array([num_rows], dtype=np.int32)
            self._attention.fill(np.array([0, num_rows], dtype=np.int32), length, blocks)
            num_logits = min(num_rows, len(self._sampled))
            for lora, logits_lora in ((self._mixed_lora, self._logits_lora), (None, None)):
                self._mixed_lora.fill(np.zeros(num_rows, dtype=np.int32))
                self._logits_lora.fill(np.zeros(num_logits, dtype=np.int32))
                wanted = torch.arange(num_logits, device=self._device)
                logits = self._decoder.forward(
                    self._inputs(self._mixed_rows, num_rows, wanted, lora, logits_lora), self._kv
                )
            for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9)):
                self._sampling.fill([params] * num_logits, [0] * num_logits)
                sample(logits, self._sampling, self._sampled[:num_logits], self._finite[:num_logits])
            self._masks.fill([None] * num_logits)
            allowed_logits(logits, self._masks)
            to_host(top_logprobs(logits, self._sampled[:num_logits], 1)[0])
            if self._device.type == "cuda":
                # pinned buffers alternate: none may be filled before its copy is made
                torch.cuda.synchronize(self._device)

    def launch(self, batch: Batch) -> GpuStepHandle:
        """Launch a step on the device without waiting for it."""
        row_slots = np.zeros(len(batch.token_ids), dtype=np.int32)
        for adapter, start, end in batch.adapters:
            if not isinstance(adapter, int):
                raise InvariantViolation(f"the adapter of rows {start}:{end} is not in this device's memory")
            row_slots[start:end] = adapter
        try:
            with torch.inference_mode():
                return self._launch(batch, row_slots)
        except torch.AcceleratorError as error:
            raise lost(error) from error
        except RuntimeError as error:
            if "Triton Error [CUDA]" in str(error):
                raise lost(error) from error
            raise
        finally:
            # also if this raised: earlier launches may still read adapters
            self._adapters.step_launched()

    def _launch(self, batch: Batch, row_slots: npt.NDArray[np.int32]) -> GpuStepHandle:
        num_rows = len(row_slots)
        sampled = [i for i, entry in enumerate(batch.entries) if entry.is_sampled]
        bucket = self._graphs.bucket(num_rows) if num_rows == len(sampled) else None
        hidden: Tensor | None = None
        if bucket is None:
            logits, hidden = self._run_mixed(batch, row_slots, [batch.logits_ranges[i][1] - 1 for i in sampled])
            rows = self._mixed_rows.sampled(logits, len(sampled))
        else:
            logits = self._run_decode(batch, row_slots, bucket)
            rows = logits[:num_rows]
        return self._sample(batch, sampled, logits, rows, hidden)

    def needs_results_first(self, request: Request) -> bool:
        """Check whether the next token is chosen on the host, or from what a grammar allows."""
        return needs_host(request) or request.constraint is not None

    def _run_decode(self, batch: Batch, row_slots: npt.NDArray[np.int32], bucket: int) -> Tensor:
        num_rows = len(row_slots)
        self._decode_rows.fill(batch, self._places, [], bucket)
        padding = bucket - num_rows
        self._attention.fill(
            np.arange(bucket + 1, dtype=np.int32),
            np.pad(np.array(batch.context_lens, dtype=np.int32), (0, padding)),
            np.pad(batch.block_tables, ((0, padding), (0, 0))),
        )
        has_lora = self._decode_lora.fill(np.pad(row_slots, (0, padding)))
        return self._graphs.replay(bucket, has_lora)

    def _decode(self, num_rows: int, with_lora: bool) -> Tensor:
        """Compute a decode step of that many rows from what the buffers hold."""
        lora = self._decode_lora if with_lora else None
        inputs = self._inputs(self._decode_rows, num_rows, None, lora, lora)
        return self._decoder.forward(inputs, self._kv)

    def _prepare_padding(self, num_rows: int) -> None:
        self._decode_rows.clear(num_rows)
        self._attention.fill(
            np.arange(num_rows + 1, dtype=np.int32),
            np.zeros(num_rows, dtype=np.int32),
            np.zeros((num_rows, 1), dtype=np.int32),
        )
        self._decode_lora.fill(np.zeros(num_rows, dtype=np.int32))

    def _run_mixed(
        self, batch: Batch, row_slots: npt.NDArray[np.int32], sampled_rows: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a step of any rows; return its logits, and the hidden states of pooled rows."""
        num_rows, logits_rows = len(row_slots), batch.logits_rows
        self._mixed_rows.fill(batch, self._places, sampled_rows, num_rows)
        self._attention.fill(
            np.array(batch.query_starts, dtype=np.int32),
            np.array(batch.context_lens, dtype=np.int32),
            batch.block_tables,
        )
        lora = self._mixed_lora if self._mixed_lora.fill(row_slots) else None
        wanted = self._mixed_rows.logits_rows(len(logits_rows))
        pooled = pooled_rows(batch) if len(batch.pooled_rows) else None
        if pooled is None:
            has_lora = self._logits_lora.fill(row_slots[logits_rows])
        else:
            has_lora = self._logits_lora.fill(row_slots[pooled.kept.numpy()], pooled.logits_places.int().numpy())
            pooled = PooledRows(*(to_device(rows, self._device) for rows in pooled.tensors))
        logits_lora = self._logits_lora if has_lora else None
        inputs = self._inputs(self._mixed_rows, num_rows, wanted, lora, logits_lora, pooled)
        return self._decoder.forward_pooled(inputs, self._kv)

    def _inputs(
        self,
        rows: StepRows,
        num_rows: int,
        logits_rows: Tensor | None,
        lora: GpuLoraPlan | None,
        logits_lora: GpuLoraPlan | None,
        pooled: PooledRows | None = None,
    ) -> GpuInputs:
        return GpuInputs(
            token_ids=rows.token_ids(num_rows, self._sampled),
            positions=rows.positions(num_rows),
            slot_mapping=rows.slots(num_rows),
            attention=self._attention,
            logits_rows=logits_rows,
            lora=lora,
            logits_lora=logits_lora,
            pooled=pooled,
        )

    def _sample(
        self, batch: Batch, sampled: list[int], logits: Tensor, rows: Tensor, hidden: Tensor | None
    ) -> GpuStepHandle:
        """Sample tokens on the device; send the logits of entries that are sampled on the host.

        Hidden states are pooled there too.

        Args:
            sampled: entries that reach their last token.
            logits: [num_logits, vocab_size] float32; padding rows may follow.
            rows: [num_sampled, vocab_size]: logits of the sampled entries.
            hidden: [num_pooled, hidden_size], of the pooled rows.
        """
        entries, count = [batch.entries[i] for i in sampled], len(sampled)
        self._places = np.zeros(len(batch.entries), dtype=np.int64)
        self._places[sampled] = np.arange(count)
        host, self._turn = self._host_results[self._turn], 1 - self._turn
        top: Top | None = None
        refused: dict[int, StepResult] = {}
        if count:
            tokens, finite = self._sampled[:count], self._finite[:count]
            self._sampling.fill([e.request.params for e in entries], [e.end for e in entries])
            allowed, refused = self._mask(entries, sampled, rows)
            sample(allowed, self._sampling, tokens, finite)
            host.tokens[:count].copy_(tokens, non_blocking=True)
            host.finite[:count].copy_(finite, non_blocking=True)
            top = send_logprobs(entries, rows, tokens)
        on_host = {
            i: to_host(logits[start:end])
            for i, (start, end) in enumerate(batch.logits_ranges)
            if end > start and (batch.entries[i].is_scored or needs_host(batch.entries[i].request))
        }
        pooled = None if hidden is None else to_host(hidden)
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return GpuStepHandle(batch, sampled, host, top, on_host, refused, pooled, self._sampler, event)

    def _mask(
        self, entries: Sequence[ScheduledRequest], places: Sequence[int], rows: Tensor
    ) -> tuple[Tensor, dict[int, StepResult]]:
        """Mask the logits to sample from; return them, and the results of entries without a mask.

        The device computes the forward pass while the masks are waited for.

        Args:
            places: of the entries in the step's batch.
            rows: [num_sampled, vocab_size] float32; kept.
        """
        wait_for_masks(entries)
        refused: dict[int, StepResult] = {}
        masks: list[npt.NDArray[np.uint32] | None] = []
        for place, entry in zip(places, entries, strict=True):
            constraint, mask = entry.request.constraint, None
            if constraint is not None and not needs_host(entry.request):
                result = without_mask(entry)
                if result is None:
                    mask = constraint.allowed_words(self._sampler.end_tokens(entry.request, entry.end))
                else:
                    refused[place] = result
            masks.append(mask)
        if all(mask is None for mask in masks):
            return rows, refused
        self._masks.fill(masks)
        return allowed_logits(rows, self._masks), refused


def needs_host(request: Request) -> bool:
    """Check whether the request's tokens are chosen on the host, or in advance."""
    params = request.params
    if request.probe is not None:
        return True
    is_biased = bool(params.logit_bias) or bool(params.allowed_token_ids)
    # their log probabilities are looked up in the whole row
    is_biased = is_biased or bool(params.logprob_token_ids)
    return has_penalties(params) or is_biased or request.num_output_tokens < params.min_tokens
