"""langchain-ollama."""

from __future__ import annotations

from typing import Any

import ollama
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from probe import (
    DESCRIPTION,
    JSON_MODEL,
    KEY,
    MAX_TOKENS,
    QUESTION,
    RESULT,
    TEXT_MODEL,
    URL,
    Field,
    Operator,
    Table,
    feature,
    query_type,
    run,
)

SERVER: dict[str, Any] = {"base_url": URL, "client_kwargs": {"headers": {"Authorization": f"Bearer {KEY}"}}}
COMMON: dict[str, Any] = {**SERVER, "temperature": 0, "num_predict": MAX_TOKENS, "validate_model_on_init": True}
text: Any = ChatOllama(model=TEXT_MODEL, **COMMON)
json_: Any = ChatOllama(model=JSON_MODEL, **COMMON)
Query = query_type()


@tool(description=DESCRIPTION)
def query(table: Table, field: Field, op: Operator, value: int) -> str:
    return RESULT


@feature
def chat() -> str:
    answer = text.invoke(QUESTION)
    assert answer.usage_metadata["output_tokens"] > 5
    return answer.content


@feature
def stream() -> list[str]:
    return [chunk.content for chunk in text.stream(QUESTION)]


@feature
def result() -> str:
    arguments = {"table": "tickets", "field": "age", "op": ">", "value": 81}
    call = AIMessage("", tool_calls=[{"name": "query", "args": arguments, "id": "one"}])
    messages = [HumanMessage(QUESTION), call, ToolMessage(RESULT, tool_call_id="one")]
    return text.bind_tools([query]).invoke(messages).content


@feature
def parse() -> dict[str, Any]:
    return json_.with_structured_output(Query, method="json_schema").invoke(QUESTION).model_dump()


@feature
def stream_parse() -> dict[str, Any]:
    return list(json_.with_structured_output(Query, method="json_schema").stream(QUESTION))[-1].model_dump()


@feature
def embeddings() -> list[list[float]]:
    return OllamaEmbeddings(model=TEXT_MODEL, **SERVER).embed_documents([QUESTION, "greet Anna"])


@feature
def completion() -> str:
    return OllamaLLM(model=TEXT_MODEL, **COMMON).invoke(QUESTION)


@feature
def unknown_model() -> str:
    try:
        ChatOllama(model="absent", **{**COMMON, "validate_model_on_init": False}).invoke(QUESTION)
    except ollama.ResponseError as error:
        return error.error
    raise AssertionError("an absent model answered")


run()
