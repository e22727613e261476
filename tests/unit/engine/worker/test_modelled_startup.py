"""An engine whose base transformers' code computes refuses what that code lacks, before a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from loraserve.config import EngineConfig
from loraserve.engine.worker.startup import build_engine
from loraserve.errors import ConfigError

from ..conftest import write_tokenizer


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("neox")
    config = GPTNeoXConfig(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"tensor_parallel": 2}, "--tensor-parallel"),
        ({"pipeline_parallel": 2}, "--pipeline-parallel"),
        ({"draft_model_dir": ""}, "--draft-model"),
    ],
)
def test_parallel_ranks_and_drafts_are_refused(
    base_dir: Path, options: dict[str, Any], flag: str, tmp_path: Path
) -> None:
    if "draft_model_dir" in options:
        # of the base's own tokenizer, which is compared before
        write_tokenizer(base_dir)
        options = {"draft_model_dir": str(base_dir)}
    config = EngineConfig(
        model_dir=str(base_dir), model_id="b", store_url=f"file://{tmp_path}", device="cpu", **options
    )
    with pytest.raises(ConfigError, match=flag) as caught:
        build_engine(config)
    assert caught.value.hint == f"Leave {flag} out."
