"""What the engine process is told at its start.

The server's own settings are in `loraserve.settings`.
"""

from __future__ import annotations

from loraserve.limits import GIB, MIB
from loraserve.types import KernelChoice, Struct

CPU_BUDGET_BYTES = 8 * GIB
"""Default bytes for KV blocks and adapters on a CPU, whose memory other processes use too."""
AUTO_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""Data type that ``auto`` means on each device:
CPUs without AMX or AVX512-BF16 emulate the half-width types.
"""
MAX_LORA_WORK_ITEMS = 4096
"""Most work items of one site in one step of a GPU: 64 rows of as many adapters of rank 341, or 512
of one of rank 512. Its plan refuses a step that has more, and the engine halves it.
"""
GPU_PLANS_BYTES = MAX_LORA_WORK_ITEMS * 16 * 16 * 4 * (16 + 32 + 16) + 64 * MIB
"""Bytes of the three LoRA plans and the other buffers of a GPU's runner: an item has at most 16
parts of a tile's rows times 16 ranks.
"""


class EngineConfig(Struct, frozen=True):
    """Everything the engine needs, checked by `loraserve.settings`.

    What is ``auto`` the engine resolves: only it knows the machine's devices.
    """

    model_dir: str
    model_id: str
    store_url: str
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """auto: float32 on a CPU, bfloat16 on a GPU."""
    model_impl: str = "auto"
    """Code that computes the layers: native, transformers, or auto (native where it has them)."""
    quantize: str = "none"
    """none: weights stay as the checkpoint has them."""
    activation_dtype: str = "auto"
    """Activations that int8 weights by output channel and int4 weights multiply on a CPU: int8,
    float, or auto (int8 for weights that --quantize or `loraserve quantize` rounded, else float).
    """
    memory_budget_bytes: int = 0
    """Device bytes for KV blocks and adapter weights together, beside the base's weights; 0: 8 GiB
    on a CPU, on a GPU what is free.
    """
    memory_utilization: float = 0.9
    """With a budget of 0 on a GPU: the part of its memory that the engine may take in all."""
    adapter_dtype: str = "auto"
    """What adapters are held in: auto (on a GPU the activations' dtype, on a CPU each as it's
    stored), fp32 (on a CPU alone), bf16, fp16 or int8.
    """
    adapter_rank_error: float | None = None
    """Each module of an adapter keeps the fewest ranks within this relative error; None:
    all of them.
    """
    max_adapter_loss: float | None = None
    """An adapter of which a module is off by more than this, relative to its size,
    is refused; None: none is.
    """
    host_cache_bytes: int = 4 * GIB
    max_model_len: int | None = None
    """None: what the model's config says."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_inter_token_s: float | None = None
    """Seconds that a step with prompts should take beside running streams; None: by what their
    tokens take without; `UNBOUNDED_S`: as long as it takes.
    """
    block_size: int = 16
    enable_prefix_cache: bool = True
    speculation: str = "auto"
    """auto or off: whether steps verify proposed tokens, where a row's bits allow it."""
    draft_model_dir: str | None = None
    """Directory of a small base that proposes tokens; None: there is none."""
    draft_quantize: str = "none"
    """Format that a float draft base's linears are rounded to; none: as stored."""
    cuda_graphs: bool = True
    """Whether a GPU's decode steps are captured as graphs."""
    num_threads: int = 0
    """Threads of each process that computes; 0: torch's own choice, shared out among them."""
    tensor_parallel: int = 1
    """Processes that share each layer, each with a part of its linears; 1: one has all."""
    pipeline_parallel: int = 1
    """Stages that the layers are split into, each with processes of its own; 1: there is one."""
    loader_threads: int = 2
    heartbeat_s: float = 0.5
    chat_template_file: str | None = None
    """Template that certificates' prompts are rendered with; None: the checkpoint's."""
    kernels: tuple[KernelChoice, ...] = ()
    """Kernels that an engine before this one chose: its streams are continued,
    with the same bits.
    """
