"""The routes that Anthropic's clients call: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from loraserve.api.anthropic.route import router

__all__ = ["router"]
