"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api.http.sse import event
from loraserve.api.inference.chat.choice import ChatChoice
from loraserve.api.inference.chat.tools import read_tools
from loraserve.api.inference.context import InferenceContext, check_num_candidates, check_priority, resolve_asked
from loraserve.api.inference.fields import json_fields, parse_body
from loraserve.api.inference.generation import Generation, answer
from loraserve.api.inference.logprobs import prompt_logprobs
from loraserve.api.inference.metering import RequestUsage
from loraserve.api.inference.prompts import PromptReader
from loraserve.api.inference.quota import admitted_caller, reserve
from loraserve.api.inference.sampling import choose_max_tokens, kept_tokens, read_sampling
from loraserve.api.inference.schemas import ChatBody
from loraserve.api.inference.structured_output import check_grammar, read_answer_format
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest
from loraserve.tenancy.identity.auth import Caller

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk

router = APIRouter()

_NUM_END_TOKENS = 64
"""Tokens of a prompt's end that say whether the answer begins with reasoning."""


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
    if body.reasoning_effort is not None and not services.chat_format.template.reads("reasoning_effort"):
        ignored = (*ignored, "reasoning_effort")
    asked = _asked_tokens(body)
    check_priority(body, caller)
    base = services.engine.base
    model = await resolve_asked(services, caller, body)
    chat_format = services.chat_format
    reader = PromptReader(services, caller.tenant, len(await request.body()))
    tool_use = await reader.run(
        lambda: read_tools(body.tools, chat_format, choice=body.tool_choice, is_parallel=body.parallel_tool_calls)
    )
    if body.tools and tool_use is None:
        ignored = (*ignored, "tools")
    wanted = read_answer_format(body)
    bad_words = await reader.bad_words(body.bad_words)
    sampling = read_sampling(body, base, logprobs=body.top_logprobs if body.logprobs else None, bad_words=bad_words)
    prompt = await reader.chat(
        body.messages,
        chat_format=chat_format,
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=body.add_special_tokens,
        variables=_template_variables(body),
        tool_use=tool_use,
        continues_last=body.continue_final_message,
        keep=kept_tokens(body, asked, base),
    )
    check_num_candidates([prompt], sampling)
    prompt_text = prompt.text
    if prompt_text is None:
        # its end, markers of reasoning too: decoding all of a long prompt takes long
        end = prompt.token_ids[-_NUM_END_TOKENS:]
        prompt_text = services.tokenizer.decode(end, skip_special_tokens=False)
    answer_format = chat_format.answer_format(prompt_text, tool_use, skip_special_tokens=body.skip_special_tokens)
    if answer_format is not None:
        wanted = await reader.run(lambda: answer_format.whole(wanted))
    max_tokens = choose_max_tokens(asked, None, len(prompt.token_ids), base, "messages")
    if wanted is not None:
        sampling = sampling.constrained(await check_grammar(request, caller.tenant, wanted))
    admitted = reserve(request, [prompt], [max_tokens], body.n, is_bounded=asked is not None)

    context = InferenceContext.begin("chatcmpl", services, body, model, [prompt], ignored)
    generation = Generation(
        services,
        context.requests(
            caller,
            sampling,
            [max_tokens],
            shown_token_ids=() if answer_format is None else answer_format.shown_token_ids,
        ),
        target=context.target,
    )
    choices = [ChatChoice(context, body, index, answer_format) for index in range(body.n)]
    usage = RequestUsage(context, caller, admitted)

    def add(index: int, chunk: Chunk) -> None:
        choices[index].add(chunk)
        usage.add(index, chunk)

    def whole() -> dict[str, Any]:
        message = _head(context, body, "chat.completion")
        message |= {"choices": [choice.whole() for choice in choices], "usage": usage.as_dict()}
        if body.prompt_logprobs is not None:
            # the same for every choice
            entries = choices[0].prompt_logprobs
            message["prompt_logprobs"] = prompt_logprobs(services.tokenizer, entries, body.prompt_logprobs)
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
    if body.continue_final_message and "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other.", param="continue_final_message"
        )
    return asked


def _template_variables(body: ChatBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables


async def _stream(
    context: InferenceContext,
    body: ChatBody,
    generation: Generation,
    choices: Sequence[ChatChoice],
    usage: RequestUsage,
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
