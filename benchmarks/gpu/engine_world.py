"""The engine itself on a base of random weights: its runner, scheduler, pager and division of
memory, without a server before it.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from adapters_store import open_store
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.model import make_base
from benchmarks.gpu.shapes import llama
from loraserve.config import EngineConfig
from loraserve.engine.engine import Engine
from loraserve.engine.execution.cuda_graphs import DecodeGraphs, bucket_sizes
from loraserve.engine.worker.device_setup import set_up_gpu
from loraserve.engine_client.messages import AddRequest
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.pager import Pager
from loraserve.progress import Progress
from loraserve.types import AdapterRef, BaseSpec, Digest, RequestId, SamplingParams, TenantId, TokenOutput
from loraserve_kernels.common.modules import LAYER_MODULES

RANK = 16
NUM_ADAPTERS = 33
"""One for each of 32 streams, and one that no step has seen."""
WARMING_BYTES = 3 << 30
MOST_S = 100.0
"""Time after which requests that don't end show that the engine is stuck."""

_PATHS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}


@dataclass(slots=True)
class Stream:
    """One request, as its client sees it.

    Attributes:
        times_s: of each token.
    """

    added_s: float
    times_s: list[float] = field(default_factory=list)
    is_over: bool = False

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.added_s


@dataclass(slots=True)
class EngineWorld:
    """An engine that is ready, and how it came to be so.

    Attributes:
        ready_s: seconds from the base's weights to an engine that steps.
        sizes: of the decode steps that are captured.
        adapters: on all seven linears of each layer; the last isn't loaded at the start.
    """

    machine: Machine
    engine: Engine
    runner: Any
    ready_s: float
    base_s: float
    num_blocks: int
    sizes: list[int]
    adapters: list[AdapterRef]
    _store: Any
    _folder: Any
    _rng: random.Random = field(default_factory=lambda: random.Random(7))
    _count: int = 0
    streams: dict[RequestId, Stream] = field(default_factory=dict)
    _graphs: Any = None

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        vocab = self.engine.base.vocab_size
        return tuple(self._rng.randrange(3, vocab) for _ in range(num_tokens))

    def add(self, num_tokens: int, max_tokens: int, adapter: AdapterRef | None = None, **params: Any) -> Stream:
        """A request with a prompt that nothing has seen."""
        self._count += 1
        name = RequestId(f"r{self._count}")
        stream = self.streams[name] = Stream(time.perf_counter())
        self.engine.add(
            AddRequest(
                request_id=name,
                tenant=TenantId("t"),
                adapter=adapter,
                prompt_token_ids=self.prompt(num_tokens),
                params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params),
            )
        )
        return stream

    def step(self) -> list[TokenOutput]:
        outputs = self.engine.step()
        now = time.perf_counter()
        for output in outputs:
            stream = self.streams[output.request_id]
            if output.error_code:
                raise RuntimeError(f"a request failed: {output.error_code} {output.error_message}")
            stream.times_s += [now] * len(output.token_ids)
            if output.finish_reason is not None:
                stream.is_over = True
                del self.streams[output.request_id]
        return outputs

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Step until so; at most `MOST_S` seconds."""
        started = time.perf_counter()
        while not is_done():
            if time.perf_counter() - started > MOST_S:
                raise TimeoutError(f"{len(self.streams)} requests don't end")
            if not self.engine.has_requests:
                raise RuntimeError("no request is left, and what was waited for has not come")
            if self.engine.is_waiting:
                # as a worker waits: loaders need the interpreter
                time.sleep(5e-4)
            self.step()

    def finish(self) -> None:
        """End all requests; what they held must be free."""
        for name in list(self.streams):
            self.engine.abort(name)
        self.streams.clear()
        while self.engine.has_requests:
            self.engine.step()
        problems = self.engine.check()
        if problems:
            raise RuntimeError("; ".join(problems[:3]))

    def without_graphs(self, is_off: bool) -> None:
        """Have decode steps launched kernel by kernel, or replayed again."""
        if is_off:
            self._graphs = self.runner._graphs
            self.runner._graphs = DecodeGraphs(self.machine.device, [], self.runner._decode)
        else:
            self.runner._graphs = self._graphs

    def close(self) -> None:
        self.engine.close()
        self._store.close()
        self._folder.cleanup()


def adapter_files(spec: BaseSpec, rank: int) -> tuple[bytes, bytes]:
    """One adapter's config and weights, in PEFT's format: bfloat16, random."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(LAYER_MODULES),
    }
    header: dict[str, Any] = {}
    end = 0
    for layer in range(spec.num_layers):
        for module in LAYER_MODULES:
            out_features, in_features = spec.modules[module]
            for side, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                name = f"base_model.model.model.layers.{layer}.{_PATHS[module]}.{module}.lora_{side}.weight"
                size = 2 * shape[0] * shape[1]
                header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
                end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # the same numbers again and again: a load reads, hashes and packs them all the same
    part = torch.randn(min(end // 2, 1 << 20)).mul_(0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    data = (part * (end // len(part) + 1))[:end]
    return json.dumps(config).encode(), len(text).to_bytes(8, "little") + text + data


def make_engine(machine: Machine, format: str, *, max_num_seqs: int, num_tokens: int) -> EngineWorld:
    """
    Args:
        num_tokens: of the largest step.
    """
    config_json = dict(llama(machine.is_tiny))
    budget = 0
    if machine.is_warming:
        config_json["num_hidden_layers"], budget = 1, WARMING_BYTES
    elif machine.is_tiny:
        budget = 8 << 20
    dtype = torch.float16 if machine.is_tiny else torch.bfloat16
    config = EngineConfig(
        model_dir="",
        model_id="random",
        store_url="",
        device=machine.device.type,
        dtype=str(dtype).removeprefix("torch."),
        memory_budget_bytes=budget,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=num_tokens,
        host_cache_bytes=8 << 30,
    )
    started = time.perf_counter()
    base = make_base(machine, config_json, dtype=dtype, format=format)
    machine.synchronize()
    made = time.perf_counter()
    decoder = base.decoder
    runner, device, kv = set_up_gpu(decoder, config, Progress())
    folder = tempfile.TemporaryDirectory(prefix="loraserve-gpu-adapters-")
    store = open_store(Path(folder.name).as_uri())
    pager = Pager(
        store=store,
        base=decoder.spec,
        pool=DeviceCache(device),
        host_cache=HostCache(config.host_cache_bytes),
        num_threads=config.loader_threads,
    )
    engine = Engine(config, decoder.spec, runner, pager, overlap=True, kv=kv)
    machine.synchronize()
    ready = time.perf_counter()
    refs = _adapters(store, decoder.spec, 3 if machine.is_tiny else NUM_ADAPTERS)
    return EngineWorld(
        machine=machine,
        engine=engine,
        runner=runner,
        ready_s=ready - made,
        base_s=made - started,
        num_blocks=runner.num_blocks,
        sizes=bucket_sizes(max_num_seqs),
        adapters=refs,
        _store=store,
        _folder=folder,
    )


def _adapters(store: Any, spec: BaseSpec, count: int) -> list[AdapterRef]:
    """Adapters of one pair of blobs: the engine tells them apart by their digests alone."""
    blobs = []
    for data in adapter_files(spec, RANK):
        with store.stage() as staged:
            staged.write(data)
            blobs.append(staged.commit())
    return [
        AdapterRef(
            tenant=TenantId("t"),
            name=f"a{i}",
            version=1,
            digest=Digest(f"{i:064x}"),
            config_blob=blobs[0],
            weights_blob=blobs[1],
        )
        for i in range(1, count + 1)
    ]


def gaps_s(streams: Sequence[Stream], since_s: float) -> list[float]:
    """Seconds between two tokens of a stream, for all streams."""
    found = []
    for stream in streams:
        times = [time for time in stream.times_s if time >= since_s]
        found += [b - a for a, b in pairwise(times)]
    return found
