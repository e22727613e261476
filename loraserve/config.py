"""What the engine process is told at its start. The server's own settings are in `loraserve.settings`."""

from __future__ import annotations

from loraserve.limits import GIB
from loraserve.types import Struct


class EngineConfig(Struct, frozen=True):
    """Everything the engine needs; complete and checked (`loraserve.settings` resolves ``auto``)."""

    model_dir: str
    model_id: str
    store_url: str
    device: str = "cpu"
    dtype: str = "float32"
    quantize: str = "none"
    memory_budget_bytes: int = 8 * GIB
    """Device bytes for KV blocks and adapter weights together, beside the base's weights."""
    adapter_share: float = 0.5
    """The part of the memory budget that adapters may take."""
    host_cache_bytes: int = 4 * GIB
    max_model_len: int | None = None
    """None: what the model's config says."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    enable_prefix_cache: bool = True
    num_threads: int = 0
    """0: torch's own choice."""
    loader_threads: int = 2
    heartbeat_s: float = 0.5
