"""The routes that LoRAX's and TGI's clients call: /generate, /generate_stream and /."""

from __future__ import annotations

from loraserve.api.lorax.generate import router

__all__ = ["router"]
