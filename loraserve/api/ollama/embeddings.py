"""POST /api/embed, and the older /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.responses import Response

from loraserve.api.http.json_body import dump_json
from loraserve.api.http.request_record import RequestRecord
from loraserve.api.inference.context import resolve_model
from loraserve.api.inference.fields import ignored_header, json_fields, parse_body, renamed
from loraserve.api.inference.inputs import InputReader
from loraserve.api.inference.pooling_context import PoolingContext, vector_json
from loraserve.api.inference.quota import admitted_caller
from loraserve.api.inference.schemas import MAX_MODEL_LENGTH, EmbeddingBody
from loraserve.api.ollama.answer import costs_of, load_seconds, nanoseconds
from loraserve.api.ollama.latest_tag import find_model
from loraserve.api.ollama.options import KEEP_ALIVE, unloads
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest
from loraserve.tenancy.identity.auth import Caller
from loraserve.types import PoolingParams

router = APIRouter()

_Whole = Callable[[list[Any], Mapping[str, Any]], dict[str, Any]]
_THE_CONTEXT = -1
_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)

    model: str = Field(min_length=1, max_length=MAX_MODEL_LENGTH)
    keep_alive: Annotated[Any, WithJsonSchema(KEEP_ALIVE)] = None
    options: dict[str, Any] = {}
    """Options of Ollama's, of which none changes a vector."""

    def ignored(self) -> tuple[str, ...]:
        """List the fields that change nothing.

        Raises:
            InvalidRequest: `keep_alive` is wrong.
        """
        if self.keep_alive is not None:
            unloads(self.keep_alive)
        kept = () if self.keep_alive is None else ("keep_alive",)
        return (*kept, *(f"options.{name}" for name, value in self.options.items() if value is not None))


class OllamaEmbedBody(_Body):
    input: Annotated[Any, WithJsonSchema(_INPUT)] = ""
    """Text or texts; empty: there are no vectors."""
    truncate: bool = True
    """Whether a text longer than the context is cut at its end; otherwise it is refused."""
    dimensions: int | None = Field(default=None, ge=0)
    """Numbers of a vector that are kept; 0: all."""


class OllamaEmbeddingsBody(_Body):
    prompt: str = ""
    """Text; empty: the vector has no numbers."""


@router.post("/embed", response_model=None)
async def embed(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Return a vector of length 1 for each input.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
        Overloaded: the queue is full.
        RateLimited: the tenant's share is used up.
    """
    body, ignored = parse_body(OllamaEmbedBody, raw)
    is_list = isinstance(body.input, list) and all(isinstance(text, str) for text in body.input)
    if not is_list and not isinstance(body.input, str):
        raise InvalidRequest("input should be a string or a list of strings.", param="input")
    hidden_size = services_of(request).engine.base.hidden_size
    if body.dimensions is not None and body.dimensions > hidden_size:
        raise InvalidRequest(
            f"dimensions is {body.dimensions}; this model's vectors have {hidden_size} numbers.", param="dimensions"
        )

    def whole(vectors: list[Any], figures: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": body.model, "embeddings": vectors, **figures}

    fields = EmbeddingBody(
        model=body.model,
        input=body.input,
        truncate_prompt_tokens=_THE_CONTEXT if body.truncate else None,
        dimensions=body.dimensions or None,
    )
    with renamed(lambda place: place, {"truncate_prompt_tokens": "truncate"}):
        return await _answer(request, caller, fields, (*ignored, *body.ignored()), whole)


@router.post("/embeddings", response_model=None)
async def embeddings(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Return the prompt's vector, of any length.

    Raises:
        LoraserveError: as /api/embed.
    """
    body, ignored = parse_body(OllamaEmbeddingsBody, raw)

    def whole(vectors: list[Any], figures: Mapping[str, Any]) -> dict[str, Any]:
        return {"embedding": vectors[0] if vectors else []}

    fields = EmbeddingBody(model=body.model, input=body.prompt, normalize=False)
    names = {"input": "prompt", "truncate_prompt_tokens": "it to /api/embed"}
    with renamed(lambda place: "prompt" if place.startswith("input") else place, names):
        return await _answer(request, caller, fields, (*ignored, *body.ignored()), whole)


async def _answer(
    request: Request, caller: Caller, asked: EmbeddingBody, ignored: tuple[str, ...], whole: _Whole
) -> Response:
    """Answer once each text has its vector.

    Args:
        whole: returns the answer, given the vectors and the counts and times.
    """
    services = services_of(request)
    body = asked.model_copy(update={"model": await find_model(services, caller, asked.model)})
    model = await resolve_model(services, caller, body.model)
    if not body.input:
        return Response(dump_json(whole([], {})), headers=ignored_header(ignored), media_type="application/json")
    reader = InputReader(services, caller.tenant, len(await request.body()), body, model.tokenizer)
    prompts = await reader.inputs(body.input, add_special_tokens=body.add_special_tokens)
    context = PoolingContext.begin("embd", services, body, model, prompts, ignored)
    vectors: list[Any] = [None] * len(prompts)

    def add(index: int, pooled: bytes) -> None:
        vectors[index] = vector_json(pooled)

    record: RequestRecord = request.state.record
    return await context.answer(
        request,
        caller,
        PoolingParams(kind=body.pooling, dimensions=body.dimensions, normalize=body.normalize),
        add=add,
        whole=lambda usage: whole(vectors, _figures(record, usage)),
    )


def _figures(record: RequestRecord, usage: Mapping[str, Any]) -> dict[str, Any]:
    load_s = 0.0 if record.inference is None else load_seconds(record.inference)
    return {
        "total_duration": nanoseconds(time.monotonic() - record.started_s),
        "load_duration": nanoseconds(load_s),
        "prompt_eval_count": usage["prompt_tokens"],
        **costs_of(usage),
    }
