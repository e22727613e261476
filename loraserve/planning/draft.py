"""Memory of a draft base: its weights next to the base's, its cache within the budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loraserve.config import EngineConfig
from loraserve.errors import ConfigError
from loraserve.memory.memory_plan import DRAFT_SEQUENCES, draft_context, draft_kv_blocks
from loraserve.model.config.model_config import read_config
from loraserve.planning.base import BasePlan, plan_base
from loraserve.text.same_tokenizer import check_same_tokenizer


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft base as it will be resident.

    Attributes:
        base: its weights.
        kv_bytes: of its cache.
    """

    base: BasePlan
    kv_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, with names that stay."""
        return {
            "architecture": self.base.spec.architecture,
            "quantization": self.base.spec.quantization,
            "num_parameters": self.base.spec.num_parameters,
            "size_bytes": self.base.num_bytes,
            "kv_bytes": self.kv_bytes,
            "max_sequences": DRAFT_SEQUENCES,
            "max_tokens": self.base.max_model_len,
        }


def plan_draft(config: EngineConfig, base: BasePlan) -> DraftPlan | None:
    """Read the headers of the draft base's directory; None without one.

    Raises:
        ConfigError: it can't be used on the base's device, or can't have the requested format.
        TokenizerMismatch: its tokenizer isn't the base's.
        ModelError: what is wrong with the directory, and where.
    """
    if config.draft_model_dir is None:
        return None
    if base.device != "cpu":
        raise ConfigError(
            "--draft-model is for CPUs, and this plan is for a GPU.",
            hint="Leave --draft-model out, or use --device cpu.",
        )
    check_same_tokenizer(Path(config.model_dir), Path(config.draft_model_dir))
    num_tokens = draft_context(read_config(Path(config.draft_model_dir)).max_model_len, base.max_model_len)
    own = msgspec.structs.replace(
        config,
        model_dir=config.draft_model_dir,
        model_id="draft",
        quantize=config.draft_quantize,
        activation_dtype="auto",
        max_model_len=num_tokens,
    )
    draft = plan_base(own, base.device)
    num_blocks = draft_kv_blocks(num_tokens, config.block_size)
    return DraftPlan(draft, num_blocks * draft.kv_block_bytes(config.block_size))
