"""From an EngineConfig to an engine that is ready to step: the device chosen, the base loaded, memory divided, kernels compiled."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import torch

from adapters_store import open_store
from loraserve.config import EngineConfig
from loraserve.engine import messages as m
from loraserve.engine.core import Engine
from loraserve.engine.runner import Runner, StepRunner, allocate_kv, kv_block_bytes
from loraserve.engine.verification import Verifications
from loraserve.errors import ConfigError
from loraserve.limits import GIB, MIB
from loraserve.memory.adapter_pool import AdapterPool
from loraserve.memory.device import AdapterDevice, CpuDevice, cpu_adapter_dtype
from loraserve.memory.host_cache import HostCache
from loraserve.memory.lowering import FILE_DTYPES
from loraserve.memory.pager import Pager
from loraserve.memory.precision import Precision
from loraserve.model.decoder import Decoder
from loraserve.model.loader import load_model
from loraserve_kernels.launch import warm_up

logger = logging.getLogger(__name__)

CPU_BUDGET_BYTES = 8 * GIB
"""For KV blocks and adapters on a CPU, where nothing else is said: its memory belongs to others too."""


def build_engine(config: EngineConfig) -> tuple[Engine, m.Ready]:
    """Load the base and set memory aside.

    Raises:
        ModelError, ConfigError: what is wrong with the model's directory, the device or the memory budget.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    config = resolve(config)
    decoder = load_model(
        Path(config.model_dir),
        model_id=config.model_id,
        dtype=getattr(torch, config.dtype),
        quantize=config.quantize,
        device=config.device,
        max_model_len=config.max_model_len,
    )
    runner: StepRunner
    if config.device == "cpu":
        runner, device = _on_cpu(decoder, config)
    else:
        runner, device = _on_gpu(decoder, config)
    store = open_store(config.store_url)
    pager = Pager(
        store=store,
        base=decoder.spec,
        pool=AdapterPool(device),
        host_cache=HostCache(config.host_cache_bytes),
        num_threads=config.loader_threads,
        weights=decoder,
        precision=Precision(config.adapter_rank_error, config.max_adapter_loss),
    )
    engine = Engine(config, decoder.spec, runner, pager, overlap=config.device != "cpu")
    engine.verifications = Verifications(engine, decoder, store)
    ready = m.Ready(
        base=decoder.spec,
        num_kv_blocks=runner.num_blocks,
        block_size=config.block_size,
        adapter_budget_bytes=device.limits.num_bytes,
    )
    return engine, ready


def resolve(config: EngineConfig) -> EngineConfig:
    """Return the config with each ``auto`` replaced by what this machine has.

    Raises:
        ConfigError: a GPU is asked for and there's none that serves.
    """
    has_gpu = torch.cuda.is_available()
    device = config.device
    if device == "auto":
        device = "cuda" if has_gpu and _has_triton() else "cpu"
    if device == "cuda" and not has_gpu and not is_interpreted():
        raise ConfigError("--device cuda: torch finds no CUDA device here.", hint="Use --device cpu.")
    if device == "cuda" and not _has_triton():
        raise ConfigError("--device cuda needs Triton, which isn't installed.", hint="pip install 'loraserve[gpu]'")
    dtype = config.dtype
    if dtype == "auto":
        # CPUs without AMX or AVX512-BF16 emulate the half-width types
        dtype = "float32" if device == "cpu" else "bfloat16"
    budget = config.memory_budget_bytes
    if budget == 0 and (device == "cpu" or not has_gpu):
        budget = CPU_BUDGET_BYTES
    return msgspec.structs.replace(config, device=device, dtype=dtype, memory_budget_bytes=budget)


def is_interpreted() -> bool:
    """Whether Triton's kernels run on the CPU, for tests: a GPU's engine then runs here, slowly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401 (asked for, not used)
    except ImportError:
        return False
    return True


def _on_cpu(decoder: Decoder, config: EngineConfig) -> tuple[Runner, AdapterDevice]:
    num_blocks, adapter_bytes = divide(decoder, config, config.memory_budget_bytes)
    runner = Runner(decoder, allocate_kv(decoder, num_blocks, config.block_size))
    held = cpu_adapter_dtype(config.adapter_dtype)
    for dtype in FILE_DTYPES.values() if held is None else (held,):
        warm_up(dtype)  # no step shall wait for a compiler
    return runner, CpuDevice(decoder.spec, adapter_bytes, held)


def _on_gpu(decoder: Decoder, config: EngineConfig) -> tuple[StepRunner, AdapterDevice]:
    # Triton is loaded for GPUs alone
    from loraserve.engine import gpu_budget, gpu_runner
    from loraserve.memory.gpu_device import GpuDevice, adapter_dtype

    budget = config.memory_budget_bytes or gpu_budget.free_bytes(decoder, config)
    num_blocks, adapter_bytes = divide(decoder, config, budget)
    dtype = adapter_dtype(config.adapter_dtype, decoder.kv_dtype)
    device = GpuDevice.of_size(decoder.spec, adapter_bytes, dtype, decoder.backend.device)
    # a pool has a largest size; KV blocks have what it leaves
    num_blocks += max(0, adapter_bytes - device.num_bytes) // kv_block_bytes(decoder, config.block_size)
    kv = allocate_kv(decoder, num_blocks, config.block_size)
    logger.info(
        "%s: %d KV blocks of %d tokens, %.1f GiB for adapters in %s",
        decoder.backend.device,
        num_blocks,
        config.block_size,
        device.limits.num_bytes / GIB,
        str(dtype).removeprefix("torch."),
    )
    return gpu_runner.Runner(decoder, config, kv, device), device


def divide(decoder: Decoder, config: EngineConfig, budget_bytes: int) -> tuple[int, int]:
    """Divide a budget into KV blocks and bytes for adapters.

    Raises:
        ConfigError: it can't hold one sequence of the model's full length.
    """
    block_bytes = kv_block_bytes(decoder, config.block_size)
    kv_bytes = int(budget_bytes * (1 - config.adapter_share))
    num_blocks = kv_bytes // block_bytes
    needed = -(-decoder.spec.max_model_len // config.block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"The KV cache's part of the memory budget, {kv_bytes / MIB:.0f} MiB, holds {num_blocks * config.block_size} "
            f"tokens; one sequence of the model's {decoder.spec.max_model_len} takes {needed * block_bytes / MIB:.0f} MiB.",
            hint="Raise --memory-budget or lower --max-model-len.",
        )
    return num_blocks, budget_bytes - num_blocks * block_bytes
