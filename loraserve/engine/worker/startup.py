"""Build an engine: choose the device, load the base, divide memory, compile kernels."""

from __future__ import annotations

import dataclasses
import logging
import math
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from adapters_store import open_store
from loraserve import faults
from loraserve.background import Throttle
from loraserve.config import AUTO_DTYPES, CPU_BUDGET_BYTES, EngineConfig
from loraserve.engine.engine import Engine
from loraserve.engine.execution.cpu_runner import CpuRunner
from loraserve.engine.execution.runner import StepRunner, kv_block_bytes, view_kv
from loraserve.engine.grammar.constraints import Constraints
from loraserve.engine.parallel.kernel_choices import adopt_kernels, chosen_kernels
from loraserve.engine.speculation.draft_base import DraftBase
from loraserve.engine.speculation.drafting import MAX_DRAFT_REQUESTS, Drafting
from loraserve.engine.speculation.speculation import MAX_REQUESTS, Speculation
from loraserve.engine.verification.answer_prompts import AnswerPrompts
from loraserve.engine.verification.float_base import FloatBase
from loraserve.engine.verification.verifier import Verifier
from loraserve.engine.worker.device_setup import kv_cache, num_needed_blocks, recurrent_states, set_up_gpu
from loraserve.engine.worker.first_step import check_first_step
from loraserve.engine_client import messages as m
from loraserve.errors import ConfigError, InvariantViolation
from loraserve.memory.arena import Arena, Owner
from loraserve.memory.devices.base import AdapterDevice
from loraserve.memory.devices.cpu import CpuDevice, HostMemory, cpu_adapter_dtype
from loraserve.memory.kv.block_pool import BlockPool
from loraserve.memory.loading.lowering import FILE_DTYPES
from loraserve.memory.loading.precision import Precision
from loraserve.memory.memory_plan import (
    beside_draft,
    draft_context,
    draft_kv_blocks,
    plan_cpu_memory,
)
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.pager import Pager
from loraserve.model.checkpoint.blueprint import context_len, draw
from loraserve.model.checkpoint.cutting import check_grid
from loraserve.model.checkpoint.headers import read_headers
from loraserve.model.checkpoint.loader import load_model
from loraserve.model.checkpoint.whole_weights import WholeWeights
from loraserve.model.config.implementation import NATIVE, choose_implementation
from loraserve.model.config.model_config import read_config
from loraserve.model.decoder import Decoder
from loraserve.model.parallel.grid import Grid
from loraserve.model.states import RecurrentStates
from loraserve.progress import Progress
from loraserve.text.grammar import GrammarCompiler
from loraserve.text.same_tokenizer import check_same_tokenizer
from loraserve_kernels.common.arithmetic import FLOATS
from loraserve_kernels.cpu.lora.apply import HAS_NUMBA
from loraserve_kernels.ops import can_compile_apart, compile_kernels, start_compiling

if TYPE_CHECKING:
    from loraserve.engine.parallel.rank_group import RankGroup
    from loraserve.model.modelling.modelled_base import ModelledBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine that is ready to step, and what the worker runs with it."""

    engine: Engine
    verifier: Verifier
    ready: m.Ready
    group: RankGroup | None = None

    def close(self) -> None:
        """End verifications, grammars and loads, their threads, and other ranks' processes."""
        self.verifier.close()
        self.engine.close()
        if self.group is not None:
            self.group.close()


def build_engine(
    config: EngineConfig, wake: Callable[[], None] = lambda: None, progress: Progress | None = None
) -> EngineParts:
    """Load the base and allocate memory.

    Args:
        wake: called on background threads when something is ready for the steps' thread.
        progress: notes what is being done, here and in every step; None: nothing reads it.

    Raises:
        ModelError, ConfigError: the model's directory, the draft base's, the device or the memory
            budget is wrong.
    """
    progress = progress or Progress()
    progress.begin("looking for devices")
    faults.hit("engine.load")
    config = resolve(config)
    if config.device == "cpu":
        start_compiling(*_adapter_dtypes(config))
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    if config.draft_model_dir is not None:
        # before the base is loaded, which may take minutes
        check_same_tokenizer(Path(config.model_dir), Path(config.draft_model_dir))
    adopt_kernels(config.kernels)
    implementation = choose_implementation(Path(config.model_dir), config.model_impl)
    logger.info("the base is computed by %s code (--model-impl %s)", implementation, config.model_impl)
    if implementation != NATIVE:
        _check_modelled(config)
    config = msgspec.structs.replace(config, model_impl=implementation)
    group = start_group(config, progress) if Grid.of(config).size > 1 else None
    try:
        return _build(config, wake, progress, group)
    except BaseException:
        if group is not None:
            group.close()
        raise


def _check_modelled(config: EngineConfig) -> None:
    """Raise an error if a base of transformers' code can't be served so.

    Raises:
        ConfigError: a flag requires what this code doesn't have.
    """
    flags = {
        "--tensor-parallel": config.tensor_parallel > 1,
        "--pipeline-parallel": config.pipeline_parallel > 1,
        "--draft-model": config.draft_model_dir is not None,
        "--device cuda": config.device == "cuda",
    }
    flag = next((flag for flag, is_given in flags.items() if is_given), None)
    if flag is not None:
        raise ConfigError(
            f"{flag} isn't there for bases that transformers' code computes, and this one would be.",
            hint="Use --device cpu." if config.device == "cuda" else f"Leave {flag} out.",
        )


def start_group(config: EngineConfig, progress: Progress) -> RankGroup:
    """Start the other ranks of a base that is cut.

    Raises:
        LoraserveError: the base can't be cut so, or a rank could not be started.
    """
    model_dir = Path(config.model_dir)
    check_grid(draw(read_config(model_dir), read_headers(model_dir), config.quantize), Grid.of(config))
    # not every build of torch has collectives
    from loraserve.engine.parallel.rank_group import RankGroup

    return RankGroup(config, progress)


def _build(config: EngineConfig, wake: Callable[[], None], progress: Progress, group: RankGroup | None) -> EngineParts:
    decoder = _load(config, progress, group)
    draft = _draft_base(config, decoder, progress)
    if draft is not None:
        config = msgspec.structs.replace(
            config, memory_budget_bytes=beside_draft(config.memory_budget_bytes, draft.kv_num_bytes)
        )
    runner: StepRunner
    weights: Decoder | WholeWeights | ModelledBase = decoder
    if group is not None and isinstance(decoder, Decoder):
        weights = WholeWeights(Path(config.model_dir), decoder, getattr(torch, config.dtype), config.quantize)
    states: RecurrentStates | None = None
    if not isinstance(decoder, Decoder) and decoder.state_shapes:
        states, config = recurrent_states(decoder.state_shapes, config)
    if config.device == "cpu":
        runner, device, kv = _on_cpu(decoder, config, progress, group, states)
    elif isinstance(decoder, Decoder):
        runner, device, kv = set_up_gpu(decoder, config, progress)
    else:
        raise InvariantViolation("a base of transformers' code is on a GPU")
    progress.begin("opening the adapters' store")
    store = open_store(config.store_url)
    pager = Pager(
        store=store,
        base=decoder.spec,
        pool=DeviceCache(device),
        host_cache=HostCache(config.host_cache_bytes),
        num_threads=config.loader_threads,
        weights=weights,
        precision=Precision(config.adapter_rank_error, config.max_adapter_loss),
        wake=wake,
    )
    is_on_cpu = config.device == "cpu"
    throttle = Throttle.beside_steps(torch.get_num_threads() if is_on_cpu else math.inf)
    compiler = GrammarCompiler(Path(config.model_dir), decoder.spec.vocab_size, decoder.spec.eos_token_ids)
    engine = Engine(
        config,
        decoder.spec,
        runner,
        pager,
        overlap=not is_on_cpu,
        kv=kv,
        constraints=Constraints(compiler, wake=wake, are_beside_steps=not is_on_cpu),
        speculation=_speculation(config, decoder, draft),
        progress=progress,
        more_stats=dict if group is None else group.stats,
    )
    progress.begin("computing a first step")
    try:
        check_first_step(engine, weights)
    except BaseException:
        engine.close()
        raise
    engine.listener = verifier = Verifier(
        engine,
        weights,
        store,
        model_dir=Path(config.model_dir),
        float_base=None
        if config.model_impl != NATIVE
        else FloatBase(Path(config.model_dir), decoder.spec, weights.device),
        prompts=AnswerPrompts(Path(config.model_dir), decoder.spec, config.chat_template_file),
        throttle=throttle,
        wake=wake,
    )
    ready = m.Ready(
        base=decoder.spec,
        num_kv_blocks=runner.num_blocks,
        block_size=config.block_size,
        adapter_budget_bytes=device.limits.num_bytes,
        device=config.device,
        kernels=tuple(chosen_kernels()),
    )
    return EngineParts(engine, verifier, ready, group)


def _load(config: EngineConfig, progress: Progress, group: RankGroup | None) -> Decoder | ModelledBase:
    """Load the base."""
    asked: dict[str, Any] = {
        "model_id": config.model_id,
        "dtype": getattr(torch, config.dtype),
        "quantize": config.quantize,
        "activation_dtype": config.activation_dtype,
        "device": config.device,
        "max_model_len": config.max_model_len,
        "progress": progress,
    }
    if config.model_impl == NATIVE:
        return load_model(Path(config.model_dir), **asked, member=None if group is None else group.member)
    # imports transformers, which other bases don't need
    from loraserve.model.modelling.loading import load_modelled

    return load_modelled(Path(config.model_dir), **asked)


def resolve(config: EngineConfig) -> EngineConfig:
    """Replace each ``auto`` in the config by what this machine has.

    Raises:
        ConfigError: the config requires a GPU, and none can be used.
    """
    has_gpu = torch.cuda.is_available()
    device = config.device
    if device == "auto":
        device = "cuda" if has_gpu and _has_triton() else "cpu"
    if device == "cuda" and not has_gpu and not is_interpreted():
        raise ConfigError("--device cuda: torch finds no CUDA device here.", hint="Use --device cpu.")
    if device == "cuda" and not _has_triton():
        raise ConfigError(
            "--device cuda needs Triton, which isn't installed.", hint="Install it: pip install 'loraserve[gpu]'"
        )
    dtype = config.dtype
    if dtype == "auto":
        dtype = AUTO_DTYPES[device]
    if device == "cuda" and config.draft_model_dir is not None:
        raise ConfigError(
            "--draft-model is for CPUs, and this engine runs on a GPU.",
            hint="Leave --draft-model out, or use --device cpu.",
        )
    num_threads = config.num_threads
    size = Grid.of(config).size
    if size > 1:
        if device != "cpu":
            flag = "--tensor-parallel" if config.tensor_parallel > 1 else "--pipeline-parallel"
            raise ConfigError(
                f"{flag} is for CPUs, and this engine would run on a GPU.",
                hint=f"Leave {flag} out, or use --device cpu.",
            )
        # of processes that wait for each other, more threads than cores make each step late
        num_threads = num_threads or max(1, torch.get_num_threads() // size)
    budget = config.memory_budget_bytes
    if budget == 0 and (device == "cpu" or not has_gpu):
        budget = CPU_BUDGET_BYTES
    return msgspec.structs.replace(
        config, device=device, dtype=dtype, memory_budget_bytes=budget, num_threads=num_threads
    )


def is_interpreted() -> bool:
    """Check whether Triton's kernels are interpreted on the CPU, for tests of the GPU's engine."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401 (probed, not used)
    except ImportError:
        return False
    return True


def _on_cpu(
    decoder: Decoder | ModelledBase,
    config: EngineConfig,
    progress: Progress,
    group: RankGroup | None,
    states: RecurrentStates | None,
) -> tuple[CpuRunner, AdapterDevice, BlockPool]:
    # each rank has its layers and heads of every block, in whole pages; the budget is all ranks'
    block_bytes = [kv_block_bytes(decoder, config.block_size)]
    if isinstance(decoder, Decoder):
        places = Grid.of(config).places(decoder.config)
        block_bytes = [place.kv_block_bytes(config.block_size, decoder.kv_dtype.itemsize) for place in places]
    parts = [-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE for num_bytes in block_bytes]
    part = parts[0]
    plan = plan_cpu_memory(config.memory_budget_bytes, sum(parts), num_needed_blocks(decoder, config), mmap.PAGESIZE)
    memory = HostMemory(plan.num_blocks * part)
    kv = dataclasses.replace(view_kv(decoder, memory.data, part, config.block_size), states=states)
    arena = Arena(plan.num_pages, plan.page_num_bytes)
    held = cpu_adapter_dtype(config.adapter_dtype)
    _compile_kernels(config, progress)

    def release(blocks: Sequence[int]) -> None:
        freed = runs(blocks)
        for first, count in freed:
            memory.release(first * part, count * part)
        if group is not None:
            group.release(freed)

    runner: CpuRunner
    device: AdapterDevice
    client = arena.client(Owner.ADAPTERS)
    if group is None or not isinstance(decoder, Decoder):
        runner, device = CpuRunner(decoder, kv), CpuDevice(decoder.spec, plan.max_adapter_bytes, held, client)
    else:
        runner, device = group.serve(decoder, kv, parts, plan.max_adapter_bytes, held, client)
    num_snapshots = None if states is None else states.num_snapshots
    return runner, device, kv_cache(config, plan, arena, release, num_snapshots)


def _adapter_dtypes(config: EngineConfig) -> tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]:
    """List the dtypes of adapters whose kernels are compiled at the start, and after it.

    Where each adapter is held as it is stored, its load waits for the kernel of its dtype.
    """
    held = cpu_adapter_dtype(config.adapter_dtype)
    if held is not None:
        return (held,), ()
    # trainers write float32 and bfloat16 most
    stored = tuple(sorted(FILE_DTYPES.values(), key=lambda dtype: dtype is torch.float16))
    return ((), stored) if can_compile_apart() else (stored, ())


def _compile_kernels(config: EngineConfig, progress: Progress) -> None:
    """Compile what steps need: no step may wait for a compiler."""

    def begin(num_kernels: int) -> None:
        progress.begin("compiling kernels (once on a machine: they are kept on disk), kernels", num_kernels)

    compile_kernels(_adapter_dtypes(config)[0], begin, progress.advance, progress.tick)


def _draft_base(config: EngineConfig, decoder: Decoder | ModelledBase, progress: Progress) -> DraftBase | None:
    """Load the draft base, if there is to be one.

    Raises:
        ConfigError: no token may be proposed here, or its format is none that it can have.
        ModelError: what is wrong with its directory.
    """
    if config.draft_model_dir is None:
        return None
    if not has_exact_rows(decoder, config):
        raise ConfigError(
            "--draft-model needs steps whose rows don't depend on their number, or it would change answers: "
            f"the base's weights are multiplied as {decoder.spec.arithmetic} by {decoder.spec.kernels} here.",
            hint="Use --dtype float32 or --quantize int8 (docs/speculation.md), or leave --draft-model out.",
        )
    draft_dir = Path(config.draft_model_dir)
    num_tokens = draft_context(context_len(read_config(draft_dir), None), decoder.spec.max_model_len)
    draft = load_model(
        draft_dir,
        model_id="draft",
        dtype=getattr(torch, config.dtype),
        quantize=config.draft_quantize,
        device=config.device,
        max_model_len=num_tokens,
        progress=progress,
    )
    num_bytes = kv_block_bytes(draft, config.block_size)
    memory = HostMemory(draft_kv_blocks(num_tokens, config.block_size) * num_bytes)
    return DraftBase(draft, view_kv(draft, memory.data, num_bytes, config.block_size), decoder.spec)


def _speculation(config: EngineConfig, decoder: Decoder | ModelledBase, draft: DraftBase | None) -> Speculation | None:
    """Build what proposes tokens; None where it is off, or answers might not stay the same."""
    if config.speculation == "off" or not has_exact_rows(decoder, config):
        return None
    drafting = None if draft is None else Drafting(draft, max_requests=MAX_DRAFT_REQUESTS)
    return Speculation(max_requests=MAX_REQUESTS, drafting=drafting)


def has_exact_rows(decoder: Decoder | ModelledBase, config: EngineConfig) -> bool:
    """Check whether a row's bits are known not to depend on the number of a sequence's rows.

    That is so on CPUs, but not of bfloat16 products that a library rounds, nor of PyTorch's own
    attention and products, which take the place of kernels that a machine or a head's size lacks.
    Of transformers' code it isn't known.
    """
    if not isinstance(decoder, Decoder) or config.device != "cpu" or not HAS_NUMBA:
        return False
    from loraserve_kernels.cpu.simd import LANES

    has_attention = decoder.config.head_dim % LANES == 0 and config.block_size % LANES == 0
    arithmetics, kernels = decoder.spec.arithmetic.split("+"), decoder.spec.kernels.split("+")
    return has_attention and FLOATS["bfloat16"] not in arithmetics and "torch" not in kernels


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Group the numbers into runs of consecutive ones, each as (first, count)."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and sum(found[-1]) == number:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((number, 1))
    return found
