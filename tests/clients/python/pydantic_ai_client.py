"""pydantic-ai, with models of chats or (option ``responses``) of responses."""

from __future__ import annotations

from typing import Any

from probe import (
    BASE_URL,
    JSON_MODEL,
    KEY,
    MAX_TOKENS,
    QUESTION,
    RESULT,
    SCRIPT_OPTIONS,
    TEXT_MODEL,
    Field,
    Operator,
    Table,
    feature,
    query_type,
    run,
)
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
Model: Any = OpenAIResponsesModel if "responses" in SCRIPT_OPTIONS else OpenAIChatModel
SETTINGS: Any = {"temperature": 0, "max_tokens": MAX_TOKENS}
text = Model(TEXT_MODEL, provider=provider, settings=SETTINGS)
json_ = Model(JSON_MODEL, provider=provider, settings=SETTINGS)
Query = query_type()


class CallFirst(AbstractCapability[None]):
    """Require a call in the first step, as pydantic-ai's documentation does."""

    def get_model_settings(self) -> Any:
        return lambda context: {"tool_choice": "required"} if context.run_step == 1 else {"tool_choice": "auto"}


@feature
async def chat() -> str:
    return (await Agent(text, instructions="Be brief.").run(QUESTION)).output


@feature
async def stream() -> list[str]:
    async with Agent(text).run_stream(QUESTION) as answer:
        return [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]


@feature
async def call() -> dict[str, Any]:
    answer = await Agent(json_, output_type=ToolOutput(Query, name="query")).run(QUESTION)
    return {"name": "query", "arguments": answer.output.model_dump()}


@feature
async def stream_call() -> dict[str, Any]:
    async with Agent(json_, output_type=ToolOutput(Query, name="query")).run_stream(QUESTION) as answer:
        return {"name": "query", "arguments": (await answer.get_output()).model_dump()}


@feature
async def agent() -> dict[str, Any]:
    calls = []
    asked = Agent(json_, capabilities=[CallFirst()])

    @asked.tool_plain
    def query(table: Table, field: Field, op: Operator, value: int) -> str:
        calls.append({"table": table, "field": field, "op": op, "value": value})
        return RESULT

    answer = await asked.run(QUESTION)
    parts = [part for message in answer.all_messages() for part in message.parts]
    return {
        "calls": calls,
        "results": [part.content for part in parts if part.part_kind == "tool-return"],
        "text": answer.output,
    }


@feature
async def parse() -> dict[str, Any]:
    return (await Agent(json_, output_type=NativeOutput(Query)).run(QUESTION)).output.model_dump()


@feature
async def stream_parse() -> dict[str, Any]:
    async with Agent(json_, output_type=NativeOutput(Query)).run_stream(QUESTION) as answer:
        values = [value async for value in answer.stream_output(debounce_by=None)]
    return values[-1].model_dump()


@feature
async def embeddings() -> list[list[float]]:
    embedder = Embedder(OpenAIEmbeddingModel(TEXT_MODEL, provider=provider))
    return [list(vector) for vector in (await embedder.embed_documents([QUESTION, "greet Anna"])).embeddings]


@feature
async def logprobs() -> list[Any]:
    settings: Any = {**SETTINGS, "openai_logprobs": True, "openai_top_logprobs": 2}
    answer = (await Agent(text, model_settings=settings).run(QUESTION)).response
    return [[item["token"], item["logprob"]] for item in (answer.provider_details or {})["logprobs"]]


@feature
async def unknown_model() -> str:
    try:
        await Agent(Model("absent", provider=provider)).run(QUESTION)
    except ModelHTTPError as error:
        return str(error) if error.status_code == 404 else ""
    raise AssertionError("an absent model answered")


run()
