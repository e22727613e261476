"""llama-index, by OpenAILike and OpenAILikeEmbedding.

Without `from __future__ import annotations`: it reads the types of a tool's function.
"""

from typing import Any

import openai
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from probe import (
    BASE_URL,
    DESCRIPTION,
    JSON_MODEL,
    KEY,
    MAX_TOKENS,
    QUESTION,
    RESULT,
    TEXT_MODEL,
    Field,
    Operator,
    Table,
    feature,
    query_type,
    run,
)

COMMON: dict[str, Any] = {"api_base": BASE_URL, "api_key": KEY, "temperature": 0, "max_tokens": MAX_TOKENS}
COMMON |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 512, "max_retries": 0}
text = OpenAILike(model=TEXT_MODEL, **COMMON)
json_ = OpenAILike(model=JSON_MODEL, should_use_structured_outputs=True, **COMMON)
ASKED = [ChatMessage(role="user", content=QUESTION)]
Query = query_type()
SEEN: list[dict[str, Any]] = []


def query(table: Table, field: Field, op: Operator, value: int) -> str:
    SEEN.append({"table": table, "field": field, "op": op, "value": value})
    return RESULT


TOOL = FunctionTool.from_defaults(query, name="query", description=DESCRIPTION)


@feature
def chat() -> str:
    return text.chat(ASKED).message.content


@feature
def stream() -> list[str]:
    return [chunk.delta or "" for chunk in text.stream_chat(ASKED)]


@feature
def call() -> dict[str, Any]:
    answer = json_.chat_with_tools([TOOL], user_msg=QUESTION, tool_required=True)
    (made,) = json_.get_tool_calls_from_response(answer)
    return {"name": made.tool_name, "arguments": made.tool_kwargs}


@feature
def stream_call() -> dict[str, Any]:
    *_, last = json_.stream_chat_with_tools([TOOL], user_msg=QUESTION, tool_required=True)
    (made,) = json_.get_tool_calls_from_response(last)
    return {"name": made.tool_name, "arguments": made.tool_kwargs}


@feature
def result() -> str:
    first = json_.chat_with_tools([TOOL], user_msg=QUESTION, tool_required=True)
    (made,) = json_.get_tool_calls_from_response(first)
    output = ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_call_id": made.tool_id})
    return text.chat_with_tools([TOOL], chat_history=[*ASKED, first.message, output]).message.content


@feature
async def agent() -> dict[str, Any]:
    SEEN.clear()
    handler = FunctionAgent(tools=[TOOL], llm=json_, initial_tool_choice="required").run(QUESTION)
    results = [
        event.tool_output.content async for event in handler.stream_events() if isinstance(event, ToolCallResult)
    ]
    return {"calls": list(SEEN), "results": results, "text": (await handler).response.content}


@feature
def parse() -> dict[str, Any]:
    return json_.as_structured_llm(Query).chat(ASKED).raw.model_dump()


@feature
def stream_parse() -> dict[str, Any]:
    *_, last = json_.as_structured_llm(Query).stream_chat(ASKED)
    return last.raw.model_dump()


@feature
def embeddings() -> list[list[float]]:
    maker = OpenAILikeEmbedding(model_name=TEXT_MODEL, api_base=BASE_URL, api_key=KEY, max_retries=0)
    return maker.get_text_embedding_batch([QUESTION, "greet Anna"])


@feature
def completion() -> str:
    return OpenAILike(model=TEXT_MODEL, **{**COMMON, "is_chat_model": False}).complete(QUESTION).text


@feature
def logprobs() -> list[Any]:
    asked = OpenAILike(model=TEXT_MODEL, logprobs=True, top_logprobs=2, **COMMON)
    return [[item[0].token, item[0].logprob] for item in asked.chat(ASKED).logprobs]


@feature
def unknown_model() -> str:
    try:
        OpenAILike(model="absent", **COMMON).chat(ASKED)
    except openai.NotFoundError as error:
        return error.message
    raise AssertionError("an absent model answered")


run()
