"""/v1/responses: chats as OpenAI's newer API has them, and those that are stored."""

from __future__ import annotations

from fastapi import APIRouter

from loraserve.api.openai.responses import create, stored

router = APIRouter()
router.include_router(create.router)
router.include_router(stored.router)

__all__ = ["router"]
