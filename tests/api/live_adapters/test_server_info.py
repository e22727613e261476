"""vLLM's server_info, as trainers call it."""

from __future__ import annotations

import httpx2
from trainer import Trainer

from loraserve.limits import LIMITS


async def test_server_info_has_vllm_fields_read_by_trainers(acme: Trainer) -> None:
    config = (await acme.get("/server_info?config_format=json")).json()["vllm_config"]
    assert config["lora_config"]["max_lora_rank"] == LIMITS.max_rank
    assert config["lora_config"]["max_loras"] >= 1
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert (await acme.get("/server_info?config_format=text")).json()["error"]["param"] == "config_format"


async def test_server_info_requires_key(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/server_info?config_format=json")).status_code == 401
