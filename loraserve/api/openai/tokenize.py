"""POST /tokenize and /detokenize, and GET /tokenizer_info, as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.http.json_body import dump_json
from loraserve.api.inference.chat.tools import read_tools
from loraserve.api.inference.context import resolve_model
from loraserve.api.inference.fields import json_fields, parse_body
from loraserve.api.inference.prompts import PromptReader
from loraserve.api.inference.quota import admitted_caller
from loraserve.api.inference.sampling import check_token_ids
from loraserve.api.inference.schemas import DetokenizeBody, TokenizeBody
from loraserve.api.services import Services, services_of
from loraserve.errors import InvalidRequest
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_PATHS = frozenset(
    {"name_or_path", "vocab_file", "merges_file", "tokenizer_file", "special_tokens_map_file", "added_tokens_file"}
)
"""Fields of a tokenizer's config that say where its files were, on whichever machine."""


@router.post("/tokenize", response_model=None)
async def tokenize(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Return the tokens of a prompt, or of messages under the model's chat template.

    An adapter's version may have a template of its own.

    Raises:
        InvalidRequest: neither or both were given, or one is wrong.
        ModelNotFound: the tenant has no such model.
    """
    services = services_of(request)
    num_bytes = len(await request.body())
    body, _ = parse_body(TokenizeBody, raw)
    model = None if body.model is None else await resolve_model(services, caller, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either prompt or messages, and only one of them.", param="prompt")
    tokenizer = services.tokenizer if model is None else model.tokenizer
    reader = PromptReader(services, caller.tenant, num_bytes, tokenizer)
    tokens: Sequence[int]
    if body.prompt is not None:
        add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
        tokens = await reader.text(body.prompt, add_special_tokens=add_special_tokens, param="prompt")
    else:
        adapter = None if model is None else model.binding.adapter
        chat_format = await services.version_chats.chat_format(caller.tenant, adapter)
        chat = await reader.chat(
            body.messages,
            chat_format=chat_format,
            tool_use=await reader.run(lambda: read_tools(body.tools, chat_format)),
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=bool(body.add_special_tokens),
            variables=body.chat_template_kwargs,
            is_bounded=False,
            continues_last=body.continue_final_message,
        )
        tokens = chat.token_ids

    def answer() -> bytes:
        names = [tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
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
    model = None if body.model is None else await resolve_model(services, caller, body.model)
    tokenizer = services.tokenizer if model is None else model.tokenizer

    def answer() -> bytes:
        check_token_ids(body.tokens, tokenizer.num_ids(services.engine.base.vocab_size), "tokens")
        return orjson.dumps({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return _json(await run(caller.tenant, num_bytes, answer))


@router.get("/tokenizer_info", response_model=None, dependencies=[Depends(scopes.require(scopes.INFERENCE))])
async def get_tokenizer_info(request: Request) -> Response:
    """Return the base's tokenizer_config.json with its chat template and without its paths.

    Added tokens are given as their text. It's the same for every key, until the server is started
    with another base.
    """
    state = request.app.state
    if not hasattr(state, "tokenizer_info"):
        # transformers writes an endless model_max_length as 10^30
        state.tokenizer_info = dump_json(_tokenizer_info(services_of(request)))
    return _json(state.tokenizer_info)


def _tokenizer_info(services: Services) -> dict[str, Any]:
    config = {name: _plain(value) for name, value in services.tokenizer.config.items() if name not in _PATHS}
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    template = services.chat_format.template.sources.get("default")
    return config | ({} if template is None else {"chat_template": template})


def _plain(value: Any) -> Any:
    """Return a value of the file, with added tokens as their text."""
    if isinstance(value, dict):
        content = value.get("content")
        return content if isinstance(content, str) else {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
