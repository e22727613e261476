"""The routes that Ollama's clients call, below /api."""

from __future__ import annotations

from fastapi import APIRouter

from loraserve.api.ollama import embeddings, models, route

router = APIRouter()
router.include_router(route.router)
router.include_router(embeddings.router)
router.include_router(models.router)

__all__ = ["router"]
