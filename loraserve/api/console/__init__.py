"""The web console: static pages that are fed by the public API alone."""

from __future__ import annotations

from loraserve.api.console.pages import router

__all__ = ["router"]
