"""Ollama's tag in models' names: every name has one there, ``NAME:latest`` unless it says more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loraserve.errors import ModelNotFound
from loraserve.registry.model_name import LATEST_TAG, parse_model

if TYPE_CHECKING:
    from loraserve.api.services import Services
    from loraserve.tenancy.identity.auth import Caller


def tagged(model: str) -> str:
    """Write the name as Ollama lists it, with the tag unless the name has a tag of its own.

    A name that ends in the tag itself gets another, which `find_model` drops.
    """
    has_tag = ":" in model.rpartition("/")[2] and not model.endswith(LATEST_TAG)
    return model if has_tag else f"{model}{LATEST_TAG}"


async def find_model(services: Services, caller: Caller, model: str) -> str:
    """Find the name that a request means, which may have the tag.

    The base's id comes first, then the name without the tag, then an adapter whose name ends in it.
    Of a name that nothing has, the tag is dropped.

    Raises:
        DatabaseUnavailable: the database is away, and the name isn't known yet.
    """
    bare, base_id = model.removesuffix(LATEST_TAG), services.engine.base.id
    if bare in ("", model) or model == base_id:
        return model
    for name in (bare, model):
        if name == base_id or await _exists(services, caller, name):
            return name
    return bare


async def _exists(services: Services, caller: Caller, name: str) -> bool:
    """Check whether the tenant may use a model of that name; sums and the like aren't looked up."""
    try:
        await services.registry.check_model(caller.tenant, parse_model(name, services.engine.base.id))
    except ModelNotFound:
        return False
    return True
