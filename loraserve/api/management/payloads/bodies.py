"""What management routes take as JSON. Unknown fields are refused: a misspelt one must not be ignored."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from loraserve.api.http.json_body import json_object
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


Model = TypeVar("Model", bound=Body)


class SplitBody(Body):
    version: int
    weight: float


class ShadowBody(Body):
    version: int
    share: float


class AliasChange(Body):
    """The whole of it: what isn't said isn't there any more."""

    version: int | None = None
    split: list[SplitBody] | None = Field(default=None, max_length=LIMITS.max_split_versions)
    shadow: ShadowBody | None = None


class VersionEdit(Body):
    """What isn't said stays; null empties it."""

    notes: str | None = None
    tags: dict[str, str] | None = None


class AdapterEdit(VersionEdit):
    fallback: int | str | None = Field(default=None, union_mode="left_to_right")


class KeyCreate(Body):
    name: str = "key"
    scopes: list[str] | None = Field(default=None, max_length=16)
    # JSON has no instants: text is taken, in ISO 8601 with an offset.
    expires_at: AwareDatetime | None = Field(default=None, strict=False)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The request's JSON as `model`.

    Raises:
        InvalidRequest: it isn't strict JSON, a field is missing, wrong or unknown; `param` names it and nothing is repeated.
    """
    value = await json_object(request, services_of(request).text_threads)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refusal(error, model) from None


def _refusal(error: ValidationError, model: type[Body]) -> InvalidRequest:
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    if first["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields)
        return InvalidRequest("The body has a field that isn't known here.", hint=f"Known fields: {known}.")
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing.", param=param)
    return InvalidRequest(f"{param}: {first['msg'].removeprefix('Value error, ')}.", param=param)
