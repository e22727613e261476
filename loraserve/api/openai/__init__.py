"""The routes that OpenAI's clients call: /v1, and those that vLLM has beside it."""

from __future__ import annotations

from fastapi import APIRouter

from loraserve.api.openai import batches, chat, completions, embeddings, files, models, responses, scoring, tokenize

router = APIRouter()
router.include_router(models.router, prefix="/v1")
router.include_router(completions.router, prefix="/v1")
router.include_router(chat.router, prefix="/v1")
router.include_router(responses.router, prefix="/v1")
router.include_router(embeddings.router, prefix="/v1")
router.include_router(files.router, prefix="/v1")
router.include_router(batches.router, prefix="/v1")
router.include_router(scoring.router)
router.include_router(tokenize.router)

__all__ = ["router"]
