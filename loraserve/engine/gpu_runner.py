"""Runs the model over batches on a GPU: decode steps as CUDA graphs, tokens sampled on the device, nothing in a step that waits for it.

A step is launched while the one before still runs. What it reads of the host goes over in a few copies to fixed addresses, from pinned buffers that are used in turn;
the tokens that aren't known yet are taken from where the step before leaves them. With ``TRITON_INTERPRET=1`` the same steps run on CPU tensors, for tests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve.config import EngineConfig
from loraserve.engine.batch import Batch
from loraserve.engine.cuda_graphs import DecodeGraphs, bucket_sizes
from loraserve.engine.request import Request
from loraserve.engine.runner import DeviceLost, allocate_kv
from loraserve.engine.sampler import Sampler, has_penalties
from loraserve.engine.scheduler import ScheduledRequest, StepResult
from loraserve.errors import ConfigError, InvariantViolation
from loraserve.limits import GIB, MIB
from loraserve.memory.gpu_device import GpuDevice
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import GpuInputs, KVTensors
from loraserve.types import SamplingParams, TokenLogprobs
from loraserve_kernels.gpu_attention_plan import GpuAttentionPlan
from loraserve_kernels.gpu_plan import GpuLoraPlan
from loraserve_kernels.gpu_sampling import SamplingRows, sample, top_logprobs

logger = logging.getLogger(__name__)

MAX_WORK_ITEMS = 4096
"""Of one site in one step: 64 rows of as many adapters of rank 341, or 512 of one of rank 512. A step that has more is refused by its plan, and the engine halves it."""


_WARM_UP_ROWS = (1, 2, 15, 16, 17, 48, 63, 64, 65, 80, 1 << 20)
"""On both sides of what kernels distinguish: one row, multiples of 16, few rows and many; and the largest step."""

_PLANS_BYTES = MAX_WORK_ITEMS * 16 * 16 * 4 * (16 + 32 + 16) + 64 * MIB
"""What the three LoRA plans and the other buffers of a runner take: an item has at most 16 parts of a tile's rows times 16 ranks."""


class Runner:
    """The base model on a GPU, with its paged KV cache and the buffers that steps are described in.

    Attributes:
        num_blocks: KV blocks that slots may name.
    """

    def __init__(self, decoder: Decoder, config: EngineConfig, kv: KVTensors, adapters: GpuDevice) -> None:
        """Allocate what steps need and capture the decode steps.

        Args:
            kv: the cache.
            adapters: where adapters lie; told of every launch, so that it overwrites nothing that a step still reads.
        """
        self._decoder, self._adapters, self._kv = decoder, adapters, kv
        self.num_blocks = kv.k[0].shape[0]
        self._device = device = decoder.backend.device
        self._sampler = Sampler(decoder.spec.eos_token_ids)
        max_num_seqs, max_num_tokens = config.max_num_seqs, max(config.max_num_batched_tokens, config.max_num_seqs)
        self._decode_rows = _Rows(max_num_seqs, device)
        self._mixed_rows = _Rows(max_num_tokens, device)
        self._attention = _attention_plan(decoder, config)
        pool, items = adapters.pool, MAX_WORK_ITEMS
        self._decode_lora = GpuLoraPlan(pool, max_num_tokens=max_num_seqs, max_work_items=items, block_m=16)
        self._mixed_lora = GpuLoraPlan(pool, max_num_tokens=max_num_tokens, max_work_items=items, block_m=32)
        self._logits_lora = GpuLoraPlan(pool, max_num_tokens=max_num_tokens, max_work_items=items, block_m=16)
        self._sampling = SamplingRows(max_num_seqs, device)
        self._sampled = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._finite = torch.zeros(max_num_seqs, dtype=torch.bool, device=device)
        # a step's results are read while those of the next one are made
        self._host_results = [_HostResults(max_num_seqs, device) for _ in range(2)]
        self._turn = 0
        # of the step before: entry of its batch → place in `_sampled`
        self._places: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        sizes = bucket_sizes(max_num_seqs) if config.cuda_graphs else []
        self._graphs = DecodeGraphs(device, sizes, self._decode)
        self._max_num_tokens = max_num_tokens
        if device.type == "cuda":
            self.warm_up(_WARM_UP_ROWS)
        with torch.inference_mode():
            self._graphs.capture(self._prepare_nobody)

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[int]) -> None:
        """Compute steps of so many rows that stand for nobody, so that no request's step waits for a compiler.

        Triton compiles a kernel anew for a number that is 1, or a multiple of 16, where others have shared one.
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
            _to_host(top_logprobs(logits, self._sampled[:num_logits], 1)[0])

    def launch(self, batch: Batch) -> GpuStep:
        """Send the step's description and kernels to the device, and return without waiting for it."""
        row_slots = np.zeros(len(batch.token_ids), dtype=np.int32)
        for adapter, start, end in batch.adapters:
            if not isinstance(adapter, int):
                raise InvariantViolation(f"the adapter of rows {start}:{end} is not in this device's memory")
            row_slots[start:end] = adapter
        try:
            with torch.inference_mode():
                return self._launch(batch, row_slots)
        except torch.AcceleratorError as error:
            raise _lost(error) from error
        except RuntimeError as error:
            if "Triton Error [CUDA]" in str(error):
                raise _lost(error) from error
            raise
        finally:
            # also when a launch raised: what was launched before it may still read adapters
            self._adapters.step_launched()

    def _launch(self, batch: Batch, row_slots: npt.NDArray[np.int32]) -> GpuStep:
        num_rows = len(row_slots)
        sampled = [i for i, entry in enumerate(batch.entries) if entry.is_sampled]
        bucket = self._graphs.bucket(num_rows) if num_rows == len(sampled) else None
        if bucket is None:
            logits = self._run_mixed(batch, row_slots, [batch.logits_ranges[i][1] - 1 for i in sampled])
            rows = self._mixed_rows.sampled(logits, len(sampled))
        else:
            logits = self._run_decode(batch, row_slots, bucket)
            rows = logits[:num_rows]
        return self._sample(batch, sampled, logits, rows)

    def needs_results_first(self, request: Request) -> bool:
        """Whether the request's next token is chosen on the host."""
        return needs_host(request)

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
        """Compute a decode step of so many rows from what the buffers hold."""
        lora = self._decode_lora if with_lora else None
        inputs = self._inputs(self._decode_rows, num_rows, None, lora, lora)
        return self._decoder.forward(inputs, self._kv)

    def _prepare_nobody(self, num_rows: int) -> None:
        self._decode_rows.clear(num_rows)
        self._attention.fill(
            np.arange(num_rows + 1, dtype=np.int32),
            np.zeros(num_rows, dtype=np.int32),
            np.zeros((num_rows, 1), dtype=np.int32),
        )
        self._decode_lora.fill(np.zeros(num_rows, dtype=np.int32))

    def _run_mixed(self, batch: Batch, row_slots: npt.NDArray[np.int32], sampled_rows: list[int]) -> Tensor:
        num_rows, logits_rows = len(row_slots), batch.logits_rows
        self._mixed_rows.fill(batch, self._places, sampled_rows, num_rows)
        self._attention.fill(
            np.array(batch.query_starts, dtype=np.int32),
            np.array(batch.context_lens, dtype=np.int32),
            batch.block_tables,
        )
        lora = self._mixed_lora if self._mixed_lora.fill(row_slots) else None
        logits_lora = self._logits_lora if self._logits_lora.fill(row_slots[logits_rows]) else None
        wanted = self._mixed_rows.logits_rows(len(logits_rows))
        inputs = self._inputs(self._mixed_rows, num_rows, wanted, lora, logits_lora)
        return self._decoder.forward(inputs, self._kv)

    def _inputs(
        self,
        rows: _Rows,
        num_rows: int,
        logits_rows: Tensor | None,
        lora: GpuLoraPlan | None,
        logits_lora: GpuLoraPlan | None,
    ) -> GpuInputs:
        return GpuInputs(
            token_ids=rows.token_ids(num_rows, self._sampled),
            positions=rows.positions(num_rows),
            slot_mapping=rows.slots(num_rows),
            attention=self._attention,
            logits_rows=logits_rows,
            lora=lora,
            logits_lora=logits_lora,
        )

    def _sample(self, batch: Batch, sampled: list[int], logits: Tensor, rows: Tensor) -> GpuStep:
        """Choose the tokens of the entries that reach their last one on the device; what is chosen on the host has its logits sent there.

        Args:
            sampled: those entries.
            logits: [num_logits, vocab_size] float32, or more: behind the last wanted row come those that stand for nobody.
            rows: [num_sampled, vocab_size]: those that tokens are chosen from.
        """
        entries, count = [batch.entries[i] for i in sampled], len(sampled)
        self._places = np.zeros(len(batch.entries), dtype=np.int64)
        self._places[sampled] = np.arange(count)
        host, self._turn = self._host_results[self._turn], 1 - self._turn
        top: _Top | None = None
        if count:
            tokens, finite = self._sampled[:count], self._finite[:count]
            self._sampling.fill([e.request.params for e in entries], [e.end for e in entries])
            sample(rows, self._sampling, tokens, finite)
            host.tokens[:count].copy_(tokens, non_blocking=True)
            host.finite[:count].copy_(finite, non_blocking=True)
            top = _send_logprobs(entries, rows, tokens)
        on_host = {
            i: _to_host(logits[start:end])
            for i, (start, end) in enumerate(batch.logits_ranges)
            if end > start and (batch.entries[i].is_scored or needs_host(batch.entries[i].request))
        }
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return GpuStep(batch, sampled, host, top, on_host, self._sampler, event)


def _attention_plan(decoder: Decoder, config: EngineConfig) -> GpuAttentionPlan:
    shape = decoder.config
    return GpuAttentionPlan(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=config.block_size,
        max_num_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_num_seqs=config.max_num_seqs,
        max_model_len=decoder.spec.max_model_len,
        device=decoder.backend.device,
    )


def free_bytes(decoder: Decoder, config: EngineConfig) -> int:
    """Return what of the device's memory is left for KV blocks and adapters: its free memory after the largest step was computed once.

    Raises:
        ConfigError: nothing is.
    """
    device = decoder.backend.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _compute_largest_step(decoder, config)
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # graphs keep a decode step's memory of their own
    budget = int(total * config.memory_utilization) - (total - free) - 2 * step_bytes - _PLANS_BYTES
    if budget <= 0:
        raise ConfigError(
            f"The base leaves no memory: of the device's {total / GIB:.1f} GiB {free / GIB:.1f} are free, and a step takes {step_bytes / GIB:.1f}.",
            hint="Quantize the base, lower --max-num-batched-tokens, or raise --memory-utilization.",
        )
    return budget


@torch.inference_mode()
def _compute_largest_step(decoder: Decoder, config: EngineConfig) -> None:
    """Rows that stand for nobody, as many as a step may have; their logits for as many as may be sampled."""
    device, plan = decoder.backend.device, _attention_plan(decoder, config)
    num_rows = max(config.max_num_batched_tokens, config.max_num_seqs)
    lengths = [decoder.spec.max_model_len] * (num_rows // decoder.spec.max_model_len)
    lengths += [num_rows - sum(lengths)] if num_rows > sum(lengths) else []
    lengths = lengths[: config.max_num_seqs]
    num_rows = sum(lengths)
    width = -(-max(lengths) // config.block_size)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    plan.fill(starts, np.array(lengths, dtype=np.int32), np.zeros((len(lengths), width), dtype=np.int32))
    inputs = GpuInputs(
        token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
        positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
        slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
        attention=plan,
        logits_rows=torch.arange(min(num_rows, config.max_num_seqs), device=device),
        lora=None,
        logits_lora=None,
    )
    decoder.forward(inputs, allocate_kv(decoder, 1, config.block_size))


class _Top(NamedTuple):
    chosen: Tensor
    values: Tensor
    ids: Tensor


def _send_logprobs(entries: list[ScheduledRequest], logits: Tensor, tokens: Tensor) -> _Top | None:
    counts = [entry.request.params.logprobs for entry in entries if entry.request.params.logprobs is not None]
    if not counts:
        return None
    chosen, values, ids = top_logprobs(logits, tokens, min(max(*counts, 1), logits.shape[1]))
    return _Top(*(_to_host(part) for part in (chosen, values, ids)))


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, there once what was launched so far is done: into pinned memory, or else the copy would wait."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return out.copy_(tensor, non_blocking=True)


class _HostResults:
    """Pinned memory that a step's tokens arrive in."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=pinned)
        self.finite = torch.zeros(max_num_seqs, dtype=torch.bool, pin_memory=pinned)


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A launched step. Its host memory is the runner's, until the step after the next is launched."""

    batch: Batch
    sampled: list[int]
    host: _HostResults
    top: _Top | None
    logits: dict[int, Tensor]
    sampler: Sampler
    event: torch.cuda.Event | None

    def results(self) -> list[StepResult]:
        """Wait for the device."""
        if self.event is not None:
            try:
                self.event.synchronize()
            except torch.AcceleratorError as error:
                raise _lost(error) from error
        tokens: list[int] = self.host.tokens[: len(self.sampled)].tolist()
        finite: list[bool] = self.host.finite[: len(self.sampled)].tolist()
        results = [StepResult() for _ in self.batch.entries]
        for place, i in enumerate(self.sampled):
            entry = self.batch.entries[i]
            if not finite[place]:
                results[i] = StepResult(is_finite=False)
            elif entry.request.params.max_tokens > 0:
                results[i] = StepResult(tokens[place], self._logprobs(place, entry, tokens[place]))
        for i, logits in self.logits.items():
            results[i] = self.sampler.sample_entry(self.batch.entries[i], logits)
        return results

    def _logprobs(self, place: int, entry: ScheduledRequest, token_id: int) -> TokenLogprobs | None:
        count = entry.request.params.logprobs
        if self.top is None or count is None:
            return None
        ids, values = self.top.ids[place, :count].tolist(), self.top.values[place, :count].tolist()
        return TokenLogprobs(token_id, float(self.top.chosen[place]), tuple(zip(ids, values, strict=True)))


def _lost(error: RuntimeError) -> DeviceLost:
    """An error of the device stays with its process: every later call would fail with it."""
    logger.error("the device failed: %s", str(error).splitlines()[0])
    return DeviceLost(str(error))


def needs_host(request: Request) -> bool:
    """Whether the request's tokens are chosen on the host: by its history, or by its own list of tokens."""
    params = request.params
    return has_penalties(params) or bool(params.logit_bias) or request.num_output_tokens < params.min_tokens


class _Rows:
    """A step's rows as the device reads them, at one address for life, and two buffers of pinned memory that they come from in turn."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._rows = torch.zeros((6, size), dtype=torch.int64, device=device)
        self._staged = [torch.zeros((6, size), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._hosts = [staged.numpy() for staged in self._staged]
        self._turn = 0

    def token_ids(self, count: int, sampled: Tensor) -> Tensor:
        """Return the rows' tokens, [count] int64: those that the host didn't know are in `sampled`."""
        tokens, feeds = self._rows[0, :count], self._rows[3, :count]
        return torch.where(feeds >= 0, sampled[feeds.clamp_min(0)], tokens)

    def positions(self, count: int) -> Tensor:
        return self._rows[1, :count]

    def slots(self, count: int) -> Tensor:
        return self._rows[2, :count]

    def logits_rows(self, count: int) -> Tensor:
        return self._rows[4, :count]

    def sampled(self, logits: Tensor, count: int) -> Tensor:
        """Return the logits that tokens are chosen from, [count, vocab_size]."""
        return logits if count == logits.shape[0] else logits[self._rows[5, :count]]

    def fill(self, batch: Batch, places: npt.NDArray[np.int64], sampled_rows: Sequence[int], num_rows: int) -> None:
        """Describe a batch, followed by rows that stand for nobody, up to `num_rows`.

        Args:
            places: of the step before: entry → where its token will stand.
            sampled_rows: which rows of the logits tokens are chosen from.
        """
        host, count = self._hosts[self._turn], len(batch.token_ids)
        host[0, :count], host[1, :count], host[2, :count] = batch.token_ids, batch.positions, batch.slots
        host[3, :count] = -1
        host[3, batch.feeds.rows] = places[batch.feeds.previous_entries]
        host[4, : len(batch.logits_rows)] = batch.logits_rows
        host[5, : len(sampled_rows)] = sampled_rows
        self._send(count, num_rows)

    def clear(self, num_rows: int) -> None:
        """Rows that all stand for nobody."""
        self._send(0, num_rows)

    def _send(self, count: int, num_rows: int) -> None:
        host = self._hosts[self._turn]
        host[:2, count:num_rows] = 0
        host[2:4, count:num_rows] = -1
        self._rows.copy_(self._staged[self._turn], non_blocking=True)
        self._turn = 1 - self._turn
