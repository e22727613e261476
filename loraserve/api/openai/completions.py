"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api.http.json_body import dump_text
from loraserve.api.http.sse import event, event_frame
from loraserve.api.inference.answering.answer import StreamableAnswer
from loraserve.api.inference.answering.delivery import Delivery
from loraserve.api.inference.answering.generation import Generation, finish_reason
from loraserve.api.inference.answering.metering import RequestUsage
from loraserve.api.inference.context import (
    InferenceContext,
    check_num_candidates,
    check_num_choices,
    check_priority,
    resolve_asked,
    use_cache,
)
from loraserve.api.inference.fields import json_fields, parse_body
from loraserve.api.inference.logprobs import CompletionLogprobs, finite_logprob, join_logprobs, prompt_logprobs
from loraserve.api.inference.prompts import PromptReader, read_cut
from loraserve.api.inference.quota import admitted_caller, reserve
from loraserve.api.inference.sampling import ALL_THE_ROOM, cache_ttl_s, choose_max_tokens, read_sampling
from loraserve.api.inference.schemas import CompletionBody
from loraserve.api.inference.structured_output import check_grammar, read_answer_format
from loraserve.api.services import Services, services_of
from loraserve.errors import InvalidRequest
from loraserve.tenancy.identity.auth import Caller
from loraserve.types import ThinkingBudget

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


@router.post("/completions", response_model=None)
async def create_completion(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Complete each prompt n times. Everything is checked before the first byte of the answer.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
        Overloaded: the queue is full.
        RateLimited: the tenant's share is used up.
    """
    services = services_of(request)
    asked, ignored = parse_body(CompletionBody, raw)
    _check_combination(asked)
    # the best n of so many are answered
    body = asked.model_copy(update={"n": asked.best_of or asked.n})
    check_priority(body, caller)
    wanted = read_answer_format(body)
    base = services.engine.base
    model = await resolve_asked(services, caller, body)
    reader = PromptReader(services, caller.tenant, len(await request.body()), model.tokenizer)
    default_max_tokens = model.defaults.max_tokens(DEFAULT_MAX_TOKENS) or DEFAULT_MAX_TOKENS
    wanted_tokens = default_max_tokens if body.max_tokens is None else body.max_tokens
    cut = read_cut(body, None if wanted_tokens == ALL_THE_ROOM else wanted_tokens, base)
    prompts = await reader.prompts(body.prompt, add_special_tokens=body.add_special_tokens, cut=cut)
    check_num_choices(len(prompts), body.n)
    is_scoring = body.max_tokens == 0
    is_ranked = body.n > asked.n
    sampling = read_sampling(
        body,
        reader.num_ids,
        logprobs=0 if body.logprobs is None and is_ranked else body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        bad_words=await reader.bad_words(body.bad_words),
        defaults=model.defaults,
    )
    check_num_candidates(prompts, sampling)
    thinking: list[ThinkingBudget | None] | None = None
    if body.thinking_token_budget is not None:
        chat_format = await services.version_chats.chat_format(caller.tenant, model.binding.adapter)
        thinking = [
            chat_format.thinking_budget(prompt.end_text(model.tokenizer), body.thinking_token_budget)
            for prompt in prompts
        ]
    ttl_s = cache_ttl_s(sampling)
    max_tokens = [_max_tokens(body, default_max_tokens, len(prompt.token_ids), services) for prompt in prompts]
    if wanted is not None:
        sampling = sampling.constrained(await check_grammar(request, caller.tenant, wanted, model.tokenizer))
    admitted = reserve(request, prompts, max_tokens, body.n, is_bounded=body.max_tokens != ALL_THE_ROOM)

    context = InferenceContext.begin("cmpl-", services, body, model, prompts, ignored)
    requests = context.requests(caller, sampling, max_tokens, thinking=thinking)
    generation = Generation(
        services,
        requests,
        target=context.target,
        is_scoring=is_scoring,
        cache=use_cache(services, caller, requests, ttl_s),
    )
    choices = [_Choice(context, body, index) for index in range(len(prompts) * body.n)]
    usage = RequestUsage(context, caller, admitted)
    num_shown = asked.n if is_ranked else None
    answer = _Completion(context, body, choices, usage, num_shown=num_shown)
    return await Delivery(request, generation, answer, usage).respond()


class _Completion(StreamableAnswer):
    """Text completion, or its chunks.

    Args:
        num_shown: choices of each prompt that are shown, the best; None: all, as they are numbered.
    """

    def __init__(
        self,
        context: InferenceContext,
        body: CompletionBody,
        choices: Sequence[_Choice],
        usage: RequestUsage,
        *,
        num_shown: int | None,
    ) -> None:
        self.is_stream = body.stream
        self._context, self._body, self._choices, self._usage = context, body, choices, usage
        self._num_shown = num_shown
        self._head = {
            **{"id": context.id, "object": "text_completion", "created": context.created, "model": body.model},
            "system_fingerprint": context.services.engine.base.fingerprint,
        }
        self._has_usage = body.stream_options.include_usage
        self._has_running_usage = self._has_usage and body.stream_options.continuous_usage_stats
        self._can_fill = not self._has_running_usage and not body.return_token_ids and body.logprobs is None
        self._frames: dict[int, bytes] = {}
        """Choice → frame of its events that add text alone."""

    def headers(self, first: Chunk | None) -> dict[str, str]:
        return self._context.headers(first)

    def add(self, index: int, chunk: Chunk) -> None:
        self._choices[index].add(chunk)

    def whole(self) -> dict[str, Any]:
        if self._num_shown is None:
            shown = [choice.whole() for choice in self._choices]
        else:
            shown = _shown(self._choices, self._body.n, self._num_shown)
        return self._head | {"choices": shown, "usage": self._usage.as_dict()}

    def render(self, index: int, chunk: Chunk) -> bytes:
        choice = self._choices[index]
        if self._can_fill and choice.has_begun and chunk.finish_reason is None:
            if not chunk.text:
                return b""
            return (self._frames.get(index) or self._make_frame(index)) % dump_text(chunk.text)
        part = choice.part(chunk)
        if part is None:
            return b""
        payload = {**self._head, "choices": (part,)}
        if self._has_usage:
            payload["usage"] = self._usage.as_dict() if self._has_running_usage else None
        return event(payload)

    def _make_frame(self, index: int) -> bytes:
        more = {"usage": None} if self._has_usage else {}
        frame = event_frame(lambda text: {**self._head, "choices": (_text_part(index, text),), **more})
        self._frames[index] = frame
        return frame

    async def closing(self) -> bytes:
        return event(self._head | {"choices": [], "usage": self._usage.as_dict()}) if self._has_usage else b""


def _check_combination(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of < body.n:
        raise InvalidRequest("best_of should be n or more.", param="best_of")
    if body.best_of is not None and body.best_of > body.n and body.stream:
        raise InvalidRequest("best_of over n is for answers in one piece; this one is a stream.", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens should be 1 or more; 0 only scores a prompt, with echo.", param="max_tokens")
    is_bounded = body.max_tokens is not None and body.max_tokens != ALL_THE_ROOM
    if is_bounded and body.min_tokens > max(1, body.max_tokens or 0):
        raise InvalidRequest("min_tokens exceeds max_tokens.", param="min_tokens")


def _max_tokens(body: CompletionBody, default: int, num_prompt_tokens: int, services: Services) -> int:
    base = services.engine.base
    if body.max_tokens == 0 and num_prompt_tokens <= base.max_model_len:
        return 1
    if body.max_tokens == ALL_THE_ROOM:
        return choose_max_tokens(None, None, num_prompt_tokens, base, "prompt")
    return choose_max_tokens(body.max_tokens, default, num_prompt_tokens, base, "prompt")


def _shown(choices: Sequence[_Choice], num_made: int, num_shown: int) -> list[dict[str, Any]]:
    """Return of each prompt's choices those of the highest log probability per token."""
    shown: list[dict[str, Any]] = []
    for start in range(0, len(choices), num_made):
        ranked = sorted(choices[start : start + num_made], key=lambda choice: choice.mean_logprob, reverse=True)
        shown += [choice.whole() | {"index": len(shown) + place} for place, choice in enumerate(ranked[:num_shown])]
    return shown


def _text_part(index: int, text: str) -> dict[str, Any]:
    """Return the part of a chunk that has nothing but text."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}


@dataclass(slots=True)
class _Choice:
    """Collect one choice's chunks: joined for an answer in one piece, or as parts for a stream."""

    context: InferenceContext
    body: CompletionBody
    index: int
    logprobs: CompletionLogprobs | None = None
    chunks: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0
    sum_logprobs: float = 0.0
    has_begun: bool = False

    def __post_init__(self) -> None:
        if self.body.logprobs is not None:
            self.logprobs = CompletionLogprobs(
                self.context.tokenizer,
                self.body.skip_special_tokens,
                self.context.prompt_of(self.index).token_ids,
                num_top=self.body.logprobs,
                num_own=len(self.body.logprob_token_ids),
                as_ids=self.body.return_tokens_as_token_ids,
            )

    @property
    def mean_logprob(self) -> float:
        """Log probability per token."""
        return self.sum_logprobs / max(1, self.num_tokens)

    def add(self, chunk: Chunk) -> None:
        """Take a chunk of an answer in one piece."""
        self.chunks.append(chunk)
        if chunk.logprobs is not None:
            self.num_tokens += len(chunk.logprobs)
            self.sum_logprobs += sum(finite_logprob(entry.logprob) for entry in chunk.logprobs)

    def part(self, chunk: Chunk) -> dict[str, Any] | None:
        """Return the part that this chunk adds to a stream; None if it adds nothing."""
        text = chunk.text
        logprobs = []
        prompt = self.context.prompt_of(self.index)
        is_first, self.has_begun = not self.has_begun, True
        if is_first and self.body.echo:
            prompt_text = self._prompt_text()
            text = prompt_text + text
            if self.logprobs is not None:
                entries = chunk.prompt_logprobs or (None,) * len(prompt.token_ids)
                logprobs.append(self.logprobs.render_prompt(prompt.token_ids, entries, prompt_text))
        if self.logprobs is not None and chunk.logprobs:
            logprobs.append(self.logprobs.render(chunk.token_ids, chunk.logprobs))
        if not text and not logprobs and chunk.finish_reason is None and not self.body.return_token_ids:
            return None
        part = _text_part(self.index, text) | {
            "logprobs": join_logprobs(logprobs) if self.logprobs is not None else None,
            "finish_reason": finish_reason(chunk),
            "stop_reason": chunk.stop_reason,
        }
        if self.body.return_token_ids:
            part["token_ids"] = list(chunk.token_ids)
            if is_first:
                part["prompt_token_ids"] = list(prompt.token_ids)
        return part

    def whole(self) -> dict[str, Any]:
        """Return the choice in one piece."""
        parts = [part for part in map(self.part, self.chunks) if part is not None]
        whole: dict[str, Any] = {
            "index": self.index,
            "text": "".join(part["text"] for part in parts),
            "logprobs": None,
            "finish_reason": parts[-1]["finish_reason"],
            "stop_reason": parts[-1]["stop_reason"],
            # vLLM's clients read them whether or not they were requested
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
        if self.body.prompt_logprobs is not None:
            entries, num_top = self.chunks[0].prompt_logprobs, self.body.prompt_logprobs
            whole["prompt_logprobs"] = prompt_logprobs(self.context.tokenizer, entries or (), num_top)
        if self.logprobs is not None:
            whole["logprobs"] = join_logprobs(part["logprobs"] for part in parts)
        if self.body.return_token_ids:
            whole["token_ids"] = [token_id for part in parts for token_id in part["token_ids"]]
            whole["prompt_token_ids"] = list(self.context.prompt_of(self.index).token_ids)
        return whole

    def _prompt_text(self) -> str:
        prompt = self.context.prompt_of(self.index)
        if prompt.text is not None:
            return prompt.text
        return self.context.tokenizer.decode(prompt.token_ids, skip_special_tokens=prompt.is_cut_text)
