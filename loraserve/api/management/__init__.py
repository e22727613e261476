"""The management routes, below /api/v1."""

from __future__ import annotations

from fastapi import APIRouter

from loraserve.api.management import (
    activity,
    adapters,
    admin_keys,
    aliases,
    files,
    grants,
    keys,
    lifecycle,
    operations,
    residency,
    server,
    tenants,
    uploads,
    usage,
)
from loraserve.api.management.comparison import evaluations, traffic

router = APIRouter()
for part in (
    adapters,
    lifecycle,
    files,
    aliases,
    traffic,
    evaluations,
    uploads,
    operations,
    residency,
    grants,
    tenants,
    keys,
    admin_keys,
    server,
    activity,
    usage,
):
    router.include_router(part.router)

__all__ = ["router"]
