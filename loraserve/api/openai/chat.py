"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api.http.sse import event
from loraserve.api.inference.context import InferenceContext, check_priority, resolve_model
from loraserve.api.inference.fields import json_fields, parse_body
from loraserve.api.inference.generation import Generation, answer
from loraserve.api.inference.logprobs import chat_logprobs
from loraserve.api.inference.metering import RequestUsage
from loraserve.api.inference.prompts import PromptReader
from loraserve.api.inference.quota import admitted_caller, reserve
from loraserve.api.inference.sampling import choose_max_tokens, read_sampling
from loraserve.api.inference.schemas import ChatBody
from loraserve.api.inference.structured_output import check_grammar, read_answer_format
from loraserve.api.openai.completions import finish_reason
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest
from loraserve.tenancy.identity.auth import Caller

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk

router = APIRouter()


@router.post("/chat/completions", response_model=None)
async def create_chat_completion(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Answer the messages n times. Everything is checked before the first byte of the answer.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
        Overloaded: the queue is full.
        RateLimited: the tenant's share is used up.
    """
    services = services_of(request)
    body, ignored = parse_body(ChatBody, raw)
    if body.reasoning_effort is not None and not services.chat_template.reads("reasoning_effort"):
        ignored = (*ignored, "reasoning_effort")
    asked = _asked_tokens(body)
    check_priority(body, caller)
    base = services.engine.base
    model = await resolve_model(services, caller, body.model, body.adapters, user=body.user)
    wanted = read_answer_format(body)
    sampling = read_sampling(body, base, logprobs=body.top_logprobs if body.logprobs else None)
    prompt = await PromptReader(services, caller.tenant, len(await request.body())).chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=body.add_special_tokens,
        variables=_template_variables(body),
    )
    max_tokens = choose_max_tokens(asked, None, len(prompt.token_ids), base, "messages")
    if wanted is not None:
        sampling = sampling.constrained(await check_grammar(request, caller.tenant, wanted))
    admitted = reserve(request, [prompt], [max_tokens], body.n, is_bounded=asked is not None)

    context = InferenceContext.begin("chatcmpl", services, body, model, [prompt], ignored)
    generation = Generation(
        services,
        context.requests(caller, sampling, [max_tokens]),
        tenant_name=caller.tenant_name,
        target=context.target,
    )
    choices = [_Choice(context, body, index) for index in range(body.n)]
    usage = RequestUsage(context, caller, admitted)

    def add(index: int, chunk: Chunk) -> None:
        choices[index].add(chunk)
        usage.add(index, chunk)

    def whole() -> dict[str, Any]:
        message = _head(context, body, "chat.completion")
        message |= {"choices": [choice.whole() for choice in choices], "usage": usage.as_dict()}
        return message | ({"prompt_token_ids": list(prompt.token_ids)} if body.return_token_ids else {})

    return await answer(
        request,
        generation,
        usage=usage,
        headers=context.headers,
        events=(lambda: _stream(context, body, generation, choices, usage)) if body.stream else None,
        add=add,
        whole=whole,
    )


def _asked_tokens(body: ChatBody) -> int | None:
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        raise InvalidRequest(f"{param} should be 1 or more.", param=param)
    if asked is not None and body.min_tokens > asked:
        raise InvalidRequest(f"min_tokens exceeds {param}.", param="min_tokens")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    return asked


def _template_variables(body: ChatBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables


async def _stream(
    context: InferenceContext, body: ChatBody, generation: Generation, choices: Sequence[_Choice], usage: RequestUsage
) -> AsyncGenerator[bytes, None]:
    head = _head(context, body, "chat.completion.chunk")
    wants_usage = body.stream_options.include_usage
    has_running_usage = wants_usage and body.stream_options.continuous_usage_stats

    def payload(part: dict[str, Any]) -> bytes:
        whole = head | {"choices": [part]}
        if wants_usage:
            whole["usage"] = usage.as_dict() if has_running_usage else None
        return event(whole)

    for choice in choices:
        yield payload(choice.opening())
    async for index, chunk in generation:
        usage.add(index, chunk)
        for part in choices[index].parts_of(chunk):
            yield payload(part)
    if wants_usage:
        yield event(head | {"choices": [], "usage": usage.as_dict()})


def _head(context: InferenceContext, body: ChatBody, kind: str) -> dict[str, Any]:
    return {"id": context.id, "object": kind, "created": context.created, "model": body.model}


@dataclass(slots=True)
class _Choice:
    """Collect one choice's chunks: joined for an answer in one piece, or as deltas for a stream."""

    context: InferenceContext
    body: ChatBody
    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(self._logprobs(chunk))
        self.finish_reason = finish_reason(chunk)
        self.stop_reason = chunk.stop_reason

    def whole(self) -> dict[str, Any]:
        """Return the choice in one piece."""
        whole: dict[str, Any] = {
            "index": self.index,
            "message": {"role": "assistant", "content": "".join(self.texts), "refusal": None},
            "logprobs": {"content": self.logprobs, "refusal": None} if self.body.logprobs else None,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if self.body.return_token_ids:
            whole["token_ids"] = self.token_ids
        return whole

    def opening(self) -> dict[str, Any]:
        """Return the first delta, which holds the role."""
        part: dict[str, Any] = {
            "index": self.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self.body.return_token_ids:
            part["prompt_token_ids"] = list(self.context.prompt_of(self.index).token_ids)
        return part

    def parts_of(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the deltas of this chunk.

        They are its text if it has any, and the end if it is the last.
        """
        parts: list[dict[str, Any]] = []
        logprobs = self._logprobs(chunk)
        if chunk.text or logprobs or (self.body.return_token_ids and chunk.token_ids):
            part: dict[str, Any] = {
                "index": self.index,
                "delta": {"content": chunk.text},
                "logprobs": {"content": logprobs, "refusal": None} if self.body.logprobs else None,
                "finish_reason": None,
            }
            if self.body.return_token_ids:
                part["token_ids"] = list(chunk.token_ids)
            parts.append(part)
        if chunk.finish_reason is not None:
            parts.append(
                {
                    "index": self.index,
                    "delta": {},
                    "logprobs": None,
                    "finish_reason": finish_reason(chunk),
                    "stop_reason": chunk.stop_reason,
                }
            )
        return parts

    def _logprobs(self, chunk: Chunk) -> list[dict[str, Any]]:
        if not self.body.logprobs or not chunk.logprobs:
            return []
        return chat_logprobs(self.context.services.tokenizer, chunk.logprobs, self.body.top_logprobs)
