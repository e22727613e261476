"""A trainer that loads adapters while it asks for answers, over `whole_app`."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx2
from whole_app import SMALL_CONFIG, small_weights

from loraserve.types import TenantId


@dataclass(frozen=True)
class Trainer:
    """A tenant's key in use."""

    client: httpx2.AsyncClient
    headers: dict[str, str]
    tenant: TenantId

    async def post(self, path: str, **how: Any) -> httpx2.Response:
        headers = self.headers | how.pop("headers", {})
        return await self.client.post(path, headers=headers, **how)

    async def get(self, path: str) -> httpx2.Response:
        return await self.client.get(path, headers=self.headers)

    async def load(self, name: str = "policy", path: str = "small", **fields: Any) -> httpx2.Response:
        """By vLLM's route."""
        return await self.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})

    async def unload(self, name: str = "policy") -> httpx2.Response:
        """By vLLM's route."""
        return await self.post("/v1/unload_lora_adapter", json={"lora_name": name})

    async def load_tensors(self, name: str = "policy", fill: float = 0.5, **fields: Any) -> httpx2.Response:
        """By SGLang's route, ephemeral unless the fields say otherwise."""
        body = {"ephemeral": True, "config_dict": SMALL_CONFIG, "serialized_named_tensors": [encoded(fill)]}
        return await self.post("/load_lora_adapter_from_tensors", json={"lora_name": name, **body, **fields})

    async def models(self) -> dict[str, dict[str, Any]]:
        answer = await self.client.get("/v1/models", headers=self.headers)
        return {model["id"]: model for model in answer.json()["data"]}

    async def complete(self, model: str = "policy") -> httpx2.Response:
        return await self.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 1})

    async def version(self, model: str = "policy") -> str:
        """What answers a completion."""
        answer = await self.complete(model)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-loraserve-adapter"]


def encoded(fill: float = 0.5) -> str:
    return base64.b64encode(small_weights(fill)).decode()


Connect = Callable[[str], Awaitable[Trainer]]
