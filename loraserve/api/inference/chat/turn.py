"""A turn of a chat, from a checked body to the answers' chunks, whatever route renders it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from loraserve.api.inference.answering.answer import StreamableAnswer
from loraserve.api.inference.answering.delivery import Delivery
from loraserve.api.inference.answering.generation import Generation
from loraserve.api.inference.answering.metering import RequestUsage
from loraserve.api.inference.chat.choice import ChatChoice
from loraserve.api.inference.chat.thinking import ThinkingSettings
from loraserve.api.inference.chat.tools import read_tools
from loraserve.api.inference.context import (
    InferenceContext,
    ResolvedModel,
    check_num_candidates,
    check_priority,
    resolve_asked,
    use_cache,
)
from loraserve.api.inference.prompts import Prompt, PromptReader, read_cut
from loraserve.api.inference.quota import reserve
from loraserve.api.inference.sampling import (
    ALL_THE_ROOM,
    Sampling,
    cache_ttl_s,
    choose_max_tokens,
    read_sampling,
)
from loraserve.api.inference.schemas import ChatBody
from loraserve.api.inference.structured_output import check_grammar, read_answer_format
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest
from loraserve.tenancy.identity.auth import Caller
from loraserve.text.answer_format import AnswerFormat
from loraserve.text.chat_format import ChatFormat, ToolUse

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk

_VERBOSITY = "verbosity"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Checked messages and tools, as the model gets them.

    Attributes:
        chat_format: of the bound version.
        asked: tokens that an answer may have; None: as many as there is room for.
        wanted: what the answers have to be; None: any text.
        ignored: fields that change nothing.
        thinking_budget: tokens of reasoning that an answer may have; None: any number.
    """

    body: ChatBody
    reader: PromptReader
    model: ResolvedModel
    chat_format: ChatFormat
    asked: int | None
    tool_use: ToolUse | None
    wanted: AnswerFormat | None
    sampling: Sampling
    prompt: Prompt
    ignored: tuple[str, ...]
    thinking_budget: int | None

    @classmethod
    async def read(
        cls,
        request: Request,
        caller: Caller,
        body: ChatBody,
        ignored: tuple[str, ...],
        *,
        text: str | None = None,
        num_more_bytes: int = 0,
        is_bounded: bool = True,
    ) -> ChatPrompt:
        """Check the body in the order that every chat has, and make tokens of its messages.

        Args:
            text: the prompt as it is, in place of what the template makes of messages; None: the
                messages are the prompt.
            num_more_bytes: size of what is read in addition to the request's body.
            is_bounded: whether the prompt has to fit the context.

        Raises:
            InvalidRequest: a field is wrong; `param` names it.
            ModelNotFound: the tenant has no such model.
            AdapterQuarantined: it isn't served.
        """
        services = services_of(request)
        asked = _asked_tokens(body)
        check_priority(body, caller)
        base = services.engine.base
        model = await resolve_asked(services, caller, body)
        chat_format = await services.version_chats.chat_format(caller.tenant, model.binding.adapter)
        thinking = ThinkingSettings(body)
        variables, unread = thinking.variables(chat_format)
        if body.verbosity is not None and chat_format.template.reads(_VERBOSITY):
            variables[_VERBOSITY] = body.verbosity
        elif body.verbosity in ("low", "high"):
            unread = (*unread, _VERBOSITY)
        ignored = (*ignored, *unread)
        reader = PromptReader(services, caller.tenant, len(await request.body()) + num_more_bytes, model.tokenizer)
        tool_use = await reader.run(
            lambda: read_tools(body.tools, chat_format, choice=body.tool_choice, is_parallel=body.parallel_tool_calls)
        )
        if body.tools and tool_use is None:
            ignored = (*ignored, "tools")
        wanted = read_answer_format(body)
        bad_words = await reader.bad_words(body.bad_words)
        sampling = read_sampling(
            body,
            reader.num_ids,
            logprobs=body.top_logprobs if body.logprobs else None,
            bad_words=bad_words,
            defaults=model.defaults,
        )
        cut = read_cut(body, asked, base)
        if text is None:
            prompt = await reader.chat(
                body.messages,
                chat_format=chat_format,
                add_generation_prompt=body.add_generation_prompt,
                add_special_tokens=body.add_special_tokens,
                variables={**variables, **body.chat_template_kwargs},
                tool_use=tool_use,
                is_bounded=is_bounded,
                continues_last=body.continue_final_message,
                cut=cut,
            )
        else:
            (prompt,) = await reader.prompts(text, add_special_tokens=True, cut=cut)
        check_num_candidates([prompt], sampling)
        budget = body.thinking_token_budget
        budget = thinking.budget(chat_format) if budget is None else budget
        return cls(body, reader, model, chat_format, asked, tool_use, wanted, sampling, prompt, ignored, budget)


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """Admitted chat: the engine's requests for it, and what has come of each choice.

    A route renders it, as an answer in one piece or as a stream.
    """

    context: InferenceContext
    body: ChatBody
    prompt: Prompt
    generation: Generation
    choices: Sequence[ChatChoice]
    usage: RequestUsage
    sampling: Sampling

    @classmethod
    async def begin(
        cls,
        request: Request,
        caller: Caller,
        body: ChatBody,
        ignored: tuple[str, ...],
        *,
        prefix: str,
        names: Mapping[str, str] | None = None,
        text: str | None = None,
        num_more_bytes: int = 0,
        caps_tokens: bool = False,
    ) -> ChatTurn:
        """Check everything, and admit the chat. No token is made before `respond`.

        Args:
            prefix: what its id begins with.
            names: a chat's fields that the route calls otherwise, for the ignored ones.
            text: the prompt as it is, as in `ChatPrompt.read`; then all of an answer is content.
            num_more_bytes: size of what was read in addition to the request's body.
            caps_tokens: whether an answer that may be longer than there is room for gets the room;
                otherwise it is refused.

        Raises:
            LoraserveError: as `ChatPrompt.read`.
            Overloaded: the queue is full.
            RateLimited: the tenant's share is used up.
        """
        services = services_of(request)
        read = await ChatPrompt.read(request, caller, body, ignored, text=text, num_more_bytes=num_more_bytes)
        prompt, wanted, sampling = read.prompt, read.wanted, read.sampling
        ttl_s = cache_ttl_s(sampling)
        prompt_text = prompt.end_text(read.model.tokenizer)
        thinking = read.chat_format.thinking_budget(prompt_text, read.thinking_budget)
        answer_format = None
        if text is None:
            answer_format = read.chat_format.answer_format(
                prompt_text, read.tool_use, skip_special_tokens=body.skip_special_tokens
            )
        if answer_format is not None:
            wanted = await read.reader.run(lambda: answer_format.whole(read.wanted))
        asked, default, base = read.asked, read.model.defaults.max_tokens(None), services.engine.base
        is_capped = caps_tokens and asked is not None and asked > base.max_model_len - len(prompt.token_ids) >= 1
        if is_capped:
            asked, default = None, None
        max_tokens = choose_max_tokens(asked, default, len(prompt.token_ids), base, "messages")
        if wanted is not None:
            sampling = sampling.constrained(await check_grammar(request, caller.tenant, wanted, read.model.tokenizer))
        admitted = reserve(request, [prompt], [max_tokens], body.n, is_bounded=(asked or default) is not None)

        passed = tuple((names or {}).get(name, name) for name in read.ignored)
        if is_capped:
            passed = (*passed, (names or {}).get("max_tokens", "max_tokens"))
        context = InferenceContext.begin(prefix, services, body, read.model, [prompt], passed)
        requests = context.requests(
            caller,
            sampling,
            [max_tokens],
            thinking=[thinking],
            shown_token_ids=() if answer_format is None else answer_format.shown_token_ids,
        )
        generation = Generation(
            services,
            requests,
            target=context.target,
            cache=use_cache(services, caller, requests, ttl_s),
        )
        choices = [ChatChoice(context, body, index, answer_format) for index in range(body.n)]
        return cls(context, body, prompt, generation, choices, RequestUsage(context, caller, admitted), sampling)

    async def respond(self, request: Request, answer: StreamableAnswer) -> Response:
        """Deliver the response that the answer makes of the turn.

        Raises:
            LoraserveError: it failed before the first byte of the answer.
            ClientDisconnect: the client has left.
        """
        return await Delivery(request, self.generation, answer, self.usage).respond()


class ChatAnswer(StreamableAnswer):
    """Answer to a chat, in what all dialects of chats share."""

    def __init__(self, turn: ChatTurn) -> None:
        self.turn = turn
        self.is_stream = turn.body.stream

    def headers(self, first: Chunk | None) -> dict[str, str]:
        return self.turn.context.headers(first)

    def add(self, index: int, chunk: Chunk) -> None:
        self.turn.choices[index].add(chunk)


def _asked_tokens(body: ChatBody) -> int | None:
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        raise InvalidRequest(f"{param} should be 1 or more.", param=param)
    if asked == ALL_THE_ROOM:
        asked = None
    if asked is not None and body.min_tokens > asked:
        raise InvalidRequest(f"min_tokens exceeds {param}.", param="min_tokens")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    if body.continue_final_message and "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other.", param="continue_final_message"
        )
    return asked
