"""POST /tokenize and /detokenize, as vLLM has them: benchmark tools count prompts with these."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request

from loraserve.api.json_body import json_object
from loraserve.api.openai.admission import resolve_model
from loraserve.api.openai.fields import parse_body
from loraserve.api.openai.prompts import encode_text, read_chat
from loraserve.api.openai.quota import admitted_caller
from loraserve.api.openai.sampling import check_token_ids
from loraserve.api.openai.schemas import DetokenizeBody, TokenizeBody
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest
from loraserve.tenancy.auth import Caller

router = APIRouter()


@router.post("/tokenize")
async def tokenize(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_object),
) -> dict[str, Any]:
    """The tokens of a prompt, or of messages under the model's chat template.

    Raises:
        InvalidRequest: neither or both were given, or one is wrong.
        ModelNotFound: the tenant has no such model.
    """
    services = services_of(request)
    body, _ = parse_body(TokenizeBody, raw)
    if body.model is not None:
        await resolve_model(services, caller, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if body.prompt is not None:
        add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
        tokens = await encode_text(body.prompt, services, add_special_tokens=add_special_tokens, param="prompt")
    else:
        chat = await read_chat(
            body.messages,
            services,
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=bool(body.add_special_tokens),
            variables=body.chat_template_kwargs,
        )
        tokens = list(chat.token_ids)
    names = [services.tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": services.engine.base.max_model_len,
        "tokens": tokens,
        "token_strs": names,
    }


@router.post("/detokenize")
async def detokenize(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_object),
) -> dict[str, Any]:
    """The text of tokens, special ones included.

    Raises:
        InvalidRequest: an id is not one of the model's.
        ModelNotFound: the tenant has no such model.
    """
    services = services_of(request)
    body, _ = parse_body(DetokenizeBody, raw)
    if body.model is not None:
        await resolve_model(services, caller, body.model)
    check_token_ids(body.tokens, services.engine.base.vocab_size, "tokens")
    return {"prompt": services.tokenizer.decode(body.tokens, skip_special_tokens=False)}
