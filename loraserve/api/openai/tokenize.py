"""POST /tokenize and /detokenize, as vLLM has them: benchmark tools count prompts with these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api.inference.chat.tools import read_tools
from loraserve.api.inference.context import resolve_model
from loraserve.api.inference.fields import json_fields, parse_body
from loraserve.api.inference.prompts import PromptReader
from loraserve.api.inference.quota import admitted_caller
from loraserve.api.inference.sampling import check_token_ids
from loraserve.api.inference.schemas import DetokenizeBody, TokenizeBody
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()


@router.post("/tokenize", response_model=None)
async def tokenize(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Return the tokens of a prompt, or of messages under the model's chat template.

    Raises:
        InvalidRequest: neither or both were given, or one is wrong.
        ModelNotFound: the tenant has no such model.
    """
    services = services_of(request)
    num_bytes = len(await request.body())
    body, _ = parse_body(TokenizeBody, raw)
    if body.model is not None:
        await resolve_model(services, caller, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either prompt or messages, and only one of them.", param="prompt")
    reader = PromptReader(services, caller.tenant, num_bytes)
    tokens: Sequence[int]
    if body.prompt is not None:
        add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
        tokens = await reader.text(body.prompt, add_special_tokens=add_special_tokens, param="prompt")
    else:
        chat = await reader.chat(
            body.messages,
            chat_format=services.chat_format,
            tool_use=await reader.run(lambda: read_tools(body.tools, services.chat_format)),
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=bool(body.add_special_tokens),
            variables=body.chat_template_kwargs,
            is_bounded=False,
        )
        tokens = chat.token_ids

    def answer() -> bytes:
        names = [services.tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
        return orjson.dumps(
            {
                "count": len(tokens),
                "max_model_len": services.engine.base.max_model_len,
                "tokens": tokens,
                "token_strs": names,
            }
        )

    return _json(await services.text_threads.run(caller.tenant, num_bytes, answer))


@router.post("/detokenize", response_model=None)
async def detokenize(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Return the text of tokens, special ones included.

    Raises:
        InvalidRequest: an id is not one of the model's.
        ModelNotFound: the tenant has no such model.
    """
    services = services_of(request)
    num_bytes = len(await request.body())
    run = services.text_threads.run
    body, _ = await run(caller.tenant, num_bytes, lambda: parse_body(DetokenizeBody, raw))
    if body.model is not None:
        await resolve_model(services, caller, body.model)

    def answer() -> bytes:
        check_token_ids(body.tokens, services.engine.base.vocab_size, "tokens")
        return orjson.dumps({"prompt": services.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return _json(await run(caller.tenant, num_bytes, answer))


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
