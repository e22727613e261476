from __future__ import annotations

from whole_app import app, client, model_dir, services, started

__all__ = ["app", "client", "model_dir", "services", "started"]
