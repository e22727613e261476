"""JSON bodies of management routes.

Unknown fields are refused: a misspelt one must not be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from loraserve.api.http.json_body import json_object
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


Model = TypeVar("Model", bound=Body)


async def read_body(request: Request, model: type[Model]) -> Model:
    """Read the request's JSON as a `model`.

    Raises:
        InvalidRequest: it isn't strict JSON, or a field is missing, wrong or unknown; `param` names
            the field, no value is repeated.
    """
    return validated(await json_object(request, services_of(request).text_threads), model)


def validated(value: Mapping[str, Any], model: type[Model]) -> Model:
    """Return the object's fields as a `model`.

    Raises:
        InvalidRequest: as `read_body`.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refusal(error, model) from None


def _refusal(error: ValidationError, model: type[Body]) -> InvalidRequest:
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    if first["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields)
        return InvalidRequest("The body has an unknown field.", hint=f"Known fields: {known}.")
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing.", param=param)
    return InvalidRequest(f"{param}: {first['msg'].removeprefix('Value error, ')}.", param=param)
