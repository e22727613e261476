"""POST /generate, /generate_stream and /, as LoRAX and TGI answer them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api.errors import generate_envelope
from loraserve.api.http.sse import event
from loraserve.api.inference.answering.answer import StreamableAnswer
from loraserve.api.inference.answering.delivery import Delivery
from loraserve.api.inference.answering.generation import Generation
from loraserve.api.inference.answering.metering import RequestUsage
from loraserve.api.inference.context import InferenceContext, resolve_model
from loraserve.api.inference.fields import json_fields, parse_body
from loraserve.api.inference.prompts import PromptCut, PromptReader
from loraserve.api.inference.quota import admitted_caller, reserve
from loraserve.api.inference.sampling import choose_max_tokens, read_sampling
from loraserve.api.lorax.schemas import GenerateBody, GenerateParameters, check_parameters, completion_body
from loraserve.api.lorax.sequence import Sequence
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest, LoraserveError
from loraserve.tenancy.identity.auth import Caller

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk

router = APIRouter()

_PARAMETERS = "parameters"
_FIELD_OF = {"model": "adapter_id", "logprobs": "return_k_alternatives"}
"""Parameters that a completion calls otherwise."""


@router.post("/generate", response_model=None)
async def generate(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Generate text that follows the inputs, with an adapter or the base.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such adapter.
        AdapterQuarantined: it isn't served.
        Overloaded: the queue is full.
        RateLimited: the tenant's share is used up.
    """
    return await _generate(request, caller, raw)


@router.post("/generate_stream", response_model=None)
async def generate_stream(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Generate text as a stream with one event per token.

    Raises:
        LoraserveError: as /generate.
    """
    return await _generate(request, caller, raw | {"stream": True})


@router.post("/", response_model=None)
async def generate_compatible(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Generate text as a list of one answer, or as a stream: what LoRAX's and TGI's clients call.

    Raises:
        LoraserveError: as /generate.
    """
    return await _generate(request, caller, raw, is_listed=True)


async def _generate(request: Request, caller: Caller, raw: Mapping[str, Any], *, is_listed: bool = False) -> Response:
    services = services_of(request)
    base = services.engine.base
    body, ignored = parse_body(GenerateBody, raw)
    parameters = body.parameters
    with _in_parameters():
        _, more_ignored = parse_body(GenerateParameters, raw.get(_PARAMETERS) or {})
        check_parameters(parameters, is_stream=body.stream)
        asked = completion_body(body, base.id)
        model = await resolve_model(services, caller, asked.model)
        prompt_logprobs = 0 if parameters.decoder_input_details else None
        sampling = read_sampling(
            asked,
            model.tokenizer.num_ids(base.vocab_size),
            logprobs=asked.logprobs,
            prompt_logprobs=prompt_logprobs,
            # as TGI: parameters have defaults of their own here; the file defines how answers end
            defaults=model.defaults.only_ends(),
        )
    reader = PromptReader(services, caller.tenant, len(await request.body()), model.tokenizer)
    with _in_inputs():
        cut = None if parameters.truncate is None else PromptCut(parameters.truncate)
        prompts = await reader.prompts(body.inputs, add_special_tokens=True, cut=cut)
        num_prompt_tokens = len(prompts[0].token_ids)
        max_tokens = [choose_max_tokens(asked.max_tokens, None, num_prompt_tokens, base, "inputs")]
    admitted = reserve(request, prompts, max_tokens, asked.n, is_bounded=asked.max_tokens is not None)

    context = InferenceContext.begin("gen-", services, asked, model, prompts, (*ignored, *more_ignored))
    requests = context.requests(caller, sampling, max_tokens)
    generation = Generation(services, requests, target=context.target)
    seeds = [one.params.seed if parameters.is_sampled else None for one in requests]
    sequences = [Sequence(context, parameters, index, seed) for index, seed in enumerate(seeds)]
    usage = RequestUsage(context, caller, admitted)

    answer = _GeneratedAnswer(context, sequences, is_stream=body.stream, is_listed=is_listed)
    return await Delivery(request, generation, answer, usage).respond()


class _GeneratedAnswer(StreamableAnswer):
    """Generated text with its details, or an event a token."""

    # these clients read each line as an event, and have no end but the stream's
    ending = b""

    def __init__(
        self,
        context: InferenceContext,
        sequences: list[Sequence],
        *,
        is_stream: bool,
        is_listed: bool,
    ) -> None:
        self.is_stream = is_stream
        self._context, self._sequences, self._is_listed = context, sequences, is_listed

    def headers(self, first: Chunk | None) -> dict[str, str]:
        own = {} if first is None else self._context.target.lorax_headers()
        return {**self._context.headers(first), **own}

    def add(self, index: int, chunk: Chunk) -> None:
        self._sequences[index].add(chunk)

    def whole(self) -> Any:
        best = max(self._sequences, key=lambda sequence: sequence.mean_logprob)
        generated = best.whole([sequence for sequence in self._sequences if sequence is not best])
        return [generated] if self._is_listed else generated

    def render(self, index: int, chunk: Chunk) -> bytes:
        return b"".join(map(event, self._sequences[index].events(chunk)))

    def failure(self, error: LoraserveError) -> bytes:
        return event(generate_envelope(error))


@contextlib.contextmanager
def _in_parameters() -> Iterator[None]:
    """Name a wrong field by its path in the body."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            error.param = f"{_PARAMETERS}.{_FIELD_OF.get(error.param, error.param)}"
        raise


@contextlib.contextmanager
def _in_inputs() -> Iterator[None]:
    """Name the prompt as the body does."""
    try:
        yield
    except InvalidRequest as error:
        error.param = "inputs"
        raise
