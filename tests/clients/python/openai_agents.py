"""openai-agents, on responses (its default) or with the option ``chat``."""

from __future__ import annotations

import json
from typing import Any

from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, NotFoundError
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

set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=60), use_for_tracing=False)
if "chat" in SCRIPT_OPTIONS:
    set_default_openai_api("chat_completions")
Query = query_type()
SETTINGS = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)
text = Agent(name="text", instructions="Be brief.", model=TEXT_MODEL, model_settings=SETTINGS)


@function_tool
def query(table: Table, field: Field, op: Operator, value: int) -> str:
    """Rows of a table whose number lies on one side of another."""
    return RESULT


@feature
async def chat() -> str:
    return (await Runner.run(text, QUESTION)).final_output


@feature
async def stream() -> list[str]:
    answer = Runner.run_streamed(text, QUESTION)
    events = [event.data async for event in answer.stream_events() if event.type == "raw_response_event"]
    return [event.delta for event in events if event.type == "response.output_text.delta"]


def _steps(answer: Any) -> dict[str, Any]:
    items = answer.new_items
    return {
        "calls": [json.loads(item.raw_item.arguments) for item in items if item.type == "tool_call_item"],
        "results": [item.output for item in items if item.type == "tool_call_output_item"],
        "text": answer.final_output,
    }


def _caller(**fields: Any) -> Agent[Any]:
    settings = ModelSettings(temperature=0, max_tokens=MAX_TOKENS, tool_choice="required", parallel_tool_calls=False)
    return Agent(name="caller", model=JSON_MODEL, tools=[query], model_settings=settings, **fields)


@feature
async def call() -> dict[str, Any]:
    answer = await Runner.run(_caller(tool_use_behavior="stop_on_first_tool"), QUESTION)
    return {"name": "query", "arguments": _steps(answer)["calls"][0]}


@feature
async def agent() -> dict[str, Any]:
    # the first step has to call; after a call the client itself resets tool_choice
    return _steps(await Runner.run(_caller(), QUESTION))


@feature
async def stream_agent() -> dict[str, Any]:
    answer = Runner.run_streamed(_caller(), QUESTION)
    async for _ in answer.stream_events():
        pass
    return _steps(answer)


@feature
async def parse() -> dict[str, Any]:
    asked = Agent(name="parser", model=JSON_MODEL, model_settings=SETTINGS, output_type=AgentOutputSchema(Query))
    return (await Runner.run(asked, QUESTION)).final_output.model_dump()


@feature
async def stream_parse() -> dict[str, Any]:
    asked = Agent(name="parser", model=JSON_MODEL, model_settings=SETTINGS, output_type=AgentOutputSchema(Query))
    answer = Runner.run_streamed(asked, QUESTION)
    async for _ in answer.stream_events():
        pass
    return answer.final_output.model_dump()


@feature
async def unknown_model() -> str:
    try:
        await Runner.run(Agent(name="absent", model="absent"), QUESTION)
    except NotFoundError as error:
        return error.message
    raise AssertionError("an absent model answered")


run()
