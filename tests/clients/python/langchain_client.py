"""langchain-openai, and an agent of langchain."""

from __future__ import annotations

from typing import Any

import openai
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from probe import (
    BASE_URL,
    DESCRIPTION,
    JSON_MODEL,
    KEY,
    MAX_TOKENS,
    MESSAGES,
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

COMMON: dict[str, Any] = {"base_url": BASE_URL, "api_key": KEY, "temperature": 0, "max_retries": 0, "timeout": 60}
text: Any = ChatOpenAI(model=TEXT_MODEL, **COMMON)
json_: Any = ChatOpenAI(model=JSON_MODEL, max_tokens=MAX_TOKENS, **COMMON)
Query = query_type()


@tool(description=DESCRIPTION)
def query(table: Table, field: Field, op: Operator, value: int) -> str:
    return RESULT


@feature
def chat() -> str:
    return text.invoke(QUESTION).content


@feature
def stream() -> list[str]:
    return [chunk.content for chunk in text.stream(QUESTION)]


@feature
def call() -> dict[str, Any]:
    (made,) = json_.bind_tools([query], tool_choice="query", strict=True).invoke(QUESTION).tool_calls
    return {"name": made["name"], "arguments": made["args"]}


@feature
def stream_call() -> dict[str, Any]:
    chunks = list(json_.bind_tools([query], tool_choice="any").stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    (made,) = whole.tool_calls
    return {"name": made["name"], "arguments": made["args"]}


@feature
def result() -> str:
    first = json_.bind_tools([query], tool_choice="any").invoke(MESSAGES)
    (made,) = first.tool_calls
    messages = [*MESSAGES, first, ToolMessage(RESULT, tool_call_id=made["id"])]
    return text.bind_tools([query]).invoke(messages).content


@feature
def agent() -> dict[str, Any]:
    @wrap_model_call
    def call_first(request: Any, handler: Any) -> Any:
        is_first = not any(isinstance(message, AIMessage) for message in request.messages)
        return handler(request.override(tool_choice="any") if is_first else request)

    answer = create_agent(json_, [query], middleware=[call_first]).invoke({"messages": MESSAGES})
    messages = answer["messages"]
    return {
        "calls": [call["args"] for message in messages for call in getattr(message, "tool_calls", ())],
        "results": [message.content for message in messages if isinstance(message, ToolMessage)],
        "text": messages[-1].content,
    }


@feature
def parse() -> dict[str, Any]:
    return json_.with_structured_output(Query).invoke(QUESTION).model_dump()


@feature
def stream_parse() -> dict[str, Any]:
    return list(json_.with_structured_output(Query).stream(QUESTION))[-1].model_dump()


@feature
def embeddings() -> list[list[float]]:
    # by default texts are cut into OpenAI's tokens, which are of no other model
    maker = OpenAIEmbeddings(model=TEXT_MODEL, base_url=BASE_URL, api_key=KEY, check_embedding_ctx_length=False)
    return maker.embed_documents([QUESTION, "greet Anna"])


@feature
def logprobs() -> list[Any]:
    answer = text.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    return [[item["token"], item["logprob"]] for item in answer.response_metadata["logprobs"]["content"]]


@feature
def completion() -> str:
    return OpenAI(model=TEXT_MODEL, max_tokens=48, **COMMON).invoke(QUESTION)


@feature
def unknown_model() -> str:
    try:
        ChatOpenAI(model="absent", **COMMON).invoke(QUESTION)
    except openai.NotFoundError as error:
        return error.message
    raise AssertionError("an absent model answered")


run()
