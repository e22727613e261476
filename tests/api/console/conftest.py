from __future__ import annotations

from whole_app import app, client, model_dir, services

__all__ = ["app", "client", "model_dir", "services"]
