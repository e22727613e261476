"""POST /load_lora_adapter, /load_lora_adapter_from_tensors and /unload_lora_adapter of SGLang."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field, WithJsonSchema
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from loraserve.adapters.extra_files import NO_EXTRA_FILES, ExtraFiles
from loraserve.api import scopes
from loraserve.api.errors import client_status_of, headers_of, openai_envelope
from loraserve.api.http.json_body import json_object_of
from loraserve.api.live_adapters.loading import LiveLoad, LiveLoader, LoadBody, PathLoadBody
from loraserve.api.live_adapters.tensors_body import FIELDS, read_tensors
from loraserve.api.management.adapters import check_query
from loraserve.api.management.payloads.bodies import Body, read_body, validated
from loraserve.api.management.payloads.multipart import multipart_boundary, read_upload
from loraserve.api.management.uploads import is_json, sender_of
from loraserve.api.services import Services, services_of
from loraserve.contract.server import LoraUpdate
from loraserve.errors import InvalidRequest, LoraserveError, PayloadTooLarge, UnsupportedParameter
from loraserve.limits import LIMITS
from loraserve.registry.uploads.staging import Written
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_writer = scopes.require(scopes.ADAPTERS_WRITE)
_IN_TENSORS = "__tensor__"
"""SGLang's path of an adapter that came as tensors."""
_QUERY = ("lora_name", "ephemeral", "ttl_s", "load_inplace", "pinned")


_TEXT = {"type": "string", "format": "byte"}
_Tensors = Annotated[
    # checked by code with a better message
    Any,
    WithJsonSchema(
        {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 1}, {"type": "null"}]}
    ),
]


class LoadLoraAdapterOfSglang(PathLoadBody):
    pinned: bool | None = None
    """Keep it on the device; needs an admin key."""


class LoadLoraAdapterFromTensors(LoadBody):
    config_dict: dict[str, Any]
    """The content of adapter_config.json."""
    serialized_named_tensors: _Tensors = None
    """Base64 of a safetensors file, or a list of one. SGLang's own pickles are refused."""
    serialized_tensors: _Tensors = None
    """Earlier name of the same."""
    pinned: bool | None = None
    upsert: bool | None = None
    """The same as load_inplace."""
    load_inplace: bool | None = None
    load_format: str | None = None
    """null or safetensors."""
    added_tokens_config: dict[str, Any] | None = None
    expected_checksums: Any = None
    lora_id: str | None = None


class UnloadLoraAdapterOfSglang(Body):
    lora_name: str = Field(min_length=1)
    lora_id: str | None = None


@router.post("/load_lora_adapter", response_model=LoraUpdate)
async def load_lora_adapter(request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Load a PEFT adapter from a folder that the operator allows (``--lora-dir``)."""

    async def work() -> dict[str, str]:
        body = await read_body(request, LoadLoraAdapterOfSglang)
        services = services_of(request)
        load = LiveLoad.of(body, services, is_in_place=False, is_pinned=bool(body.pinned))
        await LiveLoader(services, caller, load).load_path(body.lora_path)
        return {body.lora_name: body.lora_path}

    return await _answer(work())


@router.post("/load_lora_adapter_from_tensors", response_model=LoraUpdate)
async def load_lora_adapter_from_tensors(
    request: Request,
    lora_name: str | None = None,
    ephemeral: bool | None = None,
    ttl_s: float | None = None,
    load_inplace: bool | None = None,
    pinned: bool | None = None,
    caller: Caller = Depends(_writer),
) -> Response:
    """Load an adapter whose safetensors are in the body.

    They are base64 in JSON, or the parts ``config`` and ``weights`` of multipart/form-data; then
    the other fields are in the query. An ephemeral adapter isn't written to a disk.
    """

    async def work() -> dict[str, str]:
        services = services_of(request)
        if is_json(request):
            check_query(request)
            return {await _load_json(request, services, caller): _IN_TENSORS}
        check_query(request, *_QUERY)
        given = {"lora_name": lora_name, "ephemeral": ephemeral, "ttl_s": ttl_s}
        body = validated({name: value for name, value in given.items() if value is not None}, LoadBody)
        load = LiveLoad.of(body, services, is_in_place=bool(load_inplace), is_pinned=bool(pinned))
        return {await _load_parts(request, services, caller, load): _IN_TENSORS}

    return await _answer(work())


@router.post("/unload_lora_adapter", response_model=LoraUpdate)
async def unload_lora_adapter(request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Unload an ephemeral adapter, or delete the adapter, which can be restored for a while."""

    async def work() -> dict[str, str]:
        body = await read_body(request, UnloadLoraAdapterOfSglang)
        _refuse_ids(body.lora_id)
        await services_of(request).registry.unload(caller.tenant, body.lora_name, actor=caller.key_id)
        return {}

    return await _answer(work())


async def _answer(work: Awaitable[dict[str, str]]) -> Response:
    """Answer in SGLang's form, errors of the client too."""
    try:
        loaded = await work
    except LoraserveError as error:
        status = client_status_of(error)
        if status >= 500:
            raise
        update = LoraUpdate(success=False, error_message=str(error), loaded_adapters={})
        return JSONResponse(update.model_dump() | openai_envelope(error), status, headers_of(error))
    return JSONResponse(LoraUpdate(success=True, error_message="", loaded_adapters=loaded).model_dump())


async def _load_parts(request: Request, services: Services, caller: Caller, load: LiveLoad) -> str:
    boundary = multipart_boundary(request)
    loader = LiveLoader(services, caller, load, sender=sender_of(request))
    await loader.check()
    throttle = loader.throttle
    await loader.fill(lambda weights: read_upload(request, boundary, weights, throttle))
    return load.name


async def _load_json(request: Request, services: Services, caller: Caller) -> str:
    """Load the adapter of a JSON body.

    Its name and its other fields may come after the weights. So those are held in memory until the
    rest is known, and a stored adapter's are copied from there.
    """
    registry, sender = services.registry, sender_of(request)
    services.check_open()
    throttle = registry.ephemeral.throttle
    held = registry.ephemeral.stage(caller.tenant)
    try:
        async with registry.uploads.slot(caller.tenant, sender, wait_s=LIMITS.live_load_wait_s):
            try:
                text, has_tensors = await read_tensors(
                    request.stream(), lambda data: throttle.run(partial(held.write, data))
                )
            except ClientDisconnect:
                # no client reads the answer
                raise InvalidRequest("The client disconnected before the end of the body.") from None
        value = await json_object_of(text, services.text_threads, caller.tenant)
        body = validated({name: item for name, item in value.items() if item is not None}, LoadLoraAdapterFromTensors)
        _check_tensors(body, has_tensors=has_tensors)
        config = _config_of(body)
        is_in_place = bool(body.load_inplace or body.upsert)
        load = LiveLoad.of(body, services, is_in_place=is_in_place, is_pinned=bool(body.pinned))
        loader = LiveLoader(services, caller, load)
        await loader.check()
        if load.is_ephemeral:
            await loader.take(config, held)
        else:

            async def copy(weights: Written) -> tuple[bytes, ExtraFiles]:
                await throttle.run(lambda: weights.write(held.read()))
                return config, NO_EXTRA_FILES

            await loader.fill(copy)
            held.close()
    except BaseException:
        held.close()
        raise
    return load.name


def _check_tensors(body: LoadLoraAdapterFromTensors, *, has_tensors: bool) -> None:
    """Check the fields of the tensors.

    Raises:
        InvalidRequest: there are none, or several.
        UnsupportedParameter: they have a form that isn't supported.
    """
    if body.load_format not in (None, "safetensors"):
        raise UnsupportedParameter(
            "load_format isn't supported but for null and safetensors: the others are pickles.",
            param="load_format",
            hint="Send base64 of safetensors.torch.save(tensors).",
        )
    # what was taken out has left an empty string
    given = [name for name in FIELDS if getattr(body, name) is not None]
    if not has_tensors or len(given) != 1 or getattr(body, given[0]) not in ("", [""]):
        raise InvalidRequest(
            f"{FIELDS[0]} should be one string of base64, or a list of one.",
            param=FIELDS[0],
            hint="This server takes whole tensors, whatever it is split over.",
        )
    for name, is_given in (
        ("added_tokens_config", bool(body.added_tokens_config)),
        ("expected_checksums", body.expected_checksums is not None),
    ):
        if is_given:
            raise UnsupportedParameter(f"{name} isn't supported.", param=name, hint="Leave it out.")
    _refuse_ids(body.lora_id)


def _refuse_ids(lora_id: str | None) -> None:
    if lora_id is not None:
        raise UnsupportedParameter("lora_id isn't supported; an adapter has a name alone.", param="lora_id")


def _config_of(body: LoadLoraAdapterFromTensors) -> bytes:
    config = json.dumps(body.config_dict, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    if len(config) > LIMITS.max_adapter_config_bytes:
        raise PayloadTooLarge(
            f"config_dict exceeds the limit of {LIMITS.max_adapter_config_bytes} bytes.", param="config_dict"
        )
    return config
