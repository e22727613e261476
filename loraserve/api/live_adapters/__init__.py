"""Loads of adapters by trainers and sidecars, while the server runs: vLLM's and SGLang's routes."""

from __future__ import annotations

from fastapi import APIRouter

from loraserve.api.live_adapters import pausing, server_info, sglang, vllm

router = APIRouter()
router.include_router(vllm.router, prefix="/v1")
router.include_router(sglang.router)
router.include_router(pausing.router)
router.include_router(server_info.router)

__all__ = ["router"]
