"""POST /v1/embeddings: OpenAI's, with vLLM's fields."""

from __future__ import annotations

import base64
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api.inference.context import check_priority, resolve_model
from loraserve.api.inference.fields import json_fields, parse_body
from loraserve.api.inference.inputs import InputReader
from loraserve.api.inference.pooling_context import PoolingContext, vector_json
from loraserve.api.inference.quota import admitted_caller
from loraserve.api.inference.schemas import EmbeddingBody
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest
from loraserve.tenancy.identity.auth import Caller
from loraserve.types import BaseSpec, PoolingParams

router = APIRouter()


@router.post("/embeddings", response_model=None)
async def create_embeddings(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Return a vector for each input, pooled from the model's hidden states after its last norm.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
        Overloaded: the queue is full.
        RateLimited: the tenant's share is used up.
    """
    services = services_of(request)
    body, ignored = parse_body(EmbeddingBody, raw)
    check_priority(body, caller)
    _check(body, services.engine.base)
    model = await resolve_model(services, caller, body.model, body.adapters, user=body.user)
    reader = InputReader(services, caller.tenant, len(await request.body()), body, model.tokenizer)
    prompts = await reader.inputs(body.input, add_special_tokens=body.add_special_tokens)
    context = PoolingContext.begin("embd", services, body, model, prompts, ignored)
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": None} for index in range(len(prompts))
    ]

    def add(index: int, pooled: bytes) -> None:
        data[index]["embedding"] = _encoded(pooled, body.encoding_format)

    return await context.answer(
        request,
        caller,
        PoolingParams(kind=body.pooling, dimensions=body.dimensions, normalize=body.normalize and body.use_activation),
        add=add,
        whole=lambda usage: {
            "id": context.id,
            "object": "list",
            "created": context.created,
            "model": body.model,
            "data": data,
            "usage": usage,
        },
    )


def _check(body: EmbeddingBody, base: BaseSpec) -> None:
    if body.dimensions is not None and body.dimensions > base.hidden_size:
        raise InvalidRequest(
            f"dimensions is {body.dimensions}; this model's vectors have {base.hidden_size} numbers.",
            param="dimensions",
        )
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens should be 1 or more, or -1 for the model's context.", param="truncate_prompt_tokens"
        )


def _encoded(pooled: bytes, encoding_format: str) -> orjson.Fragment:
    """Return a vector as JSON: its shortest decimals, or its bytes."""
    if encoding_format == "base64":
        return orjson.Fragment(b'"' + base64.b64encode(pooled) + b'"')
    return vector_json(pooled)
