"""langgraph: a graph of a model and its tools, over langchain's model of OpenAI."""

from __future__ import annotations

import json
from typing import Any

import openai
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from probe import (
    BASE_URL,
    DESCRIPTION,
    JSON_MODEL,
    KEY,
    MAX_TOKENS,
    MESSAGES,
    RESULT,
    TEXT_MODEL,
    feature,
    query_type,
    run,
)

ASKED: Any = {"messages": MESSAGES}
made_calls: list[dict[str, Any]] = []


def _query(**arguments: Any) -> str:
    made_calls.append(arguments)
    return RESULT


TOOL = StructuredTool.from_function(_query, name="query", description=DESCRIPTION, args_schema=query_type())


def model(name: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=name, base_url=BASE_URL, api_key=KEY, temperature=0, max_tokens=MAX_TOKENS, max_retries=0, timeout=60
    )


def chatbot(name: str) -> Any:
    """Return a graph of one node."""
    graph = StateGraph(MessagesState)
    graph.add_node("chatbot", lambda state: {"messages": [model(name).invoke(state["messages"])]})
    graph.add_edge(START, "chatbot")
    return graph.compile()


def looped() -> Any:
    """Return a graph of the model and its tool, which requires a call of the first step."""

    def answer(state: MessagesState) -> dict[str, Any]:
        is_first = not any(isinstance(message, ToolMessage) for message in state["messages"])
        bound = model(JSON_MODEL).bind_tools([TOOL], tool_choice="required" if is_first else "auto")
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("chatbot", answer)
    graph.add_node("tools", ToolNode([TOOL]))
    graph.add_edge(START, "chatbot")
    graph.add_conditional_edges("chatbot", tools_condition)
    graph.add_edge("tools", "chatbot")
    return graph.compile()


@feature
def chat() -> str:
    return chatbot(TEXT_MODEL).invoke(ASKED)["messages"][-1].content


@feature
def stream() -> list[str]:
    return [chunk.content for chunk, _ in chatbot(TEXT_MODEL).stream(ASKED, stream_mode="messages")]


@feature
def agent() -> dict[str, Any]:
    made_calls.clear()
    messages = looped().invoke(ASKED)["messages"]
    results = [message.content for message in messages if isinstance(message, ToolMessage)]
    return {"calls": list(made_calls), "results": results, "text": messages[-1].content}


@feature
def stream_agent() -> dict[str, Any]:
    made_calls.clear()
    results, pieces = [], []
    for message, _ in looped().stream(ASKED, stream_mode="messages"):
        if isinstance(message, ToolMessage):
            results.append(message.content)
        elif isinstance(message, (AIMessage, AIMessageChunk)):
            pieces.append(message.content)
    assert len([piece for piece in pieces if piece]) > 1, json.dumps(pieces)
    return {"calls": list(made_calls), "results": results, "text": "".join(pieces)}


@feature
def unknown_model() -> str:
    try:
        chatbot("absent").invoke(ASKED)
    except openai.NotFoundError as error:
        return error.message
    raise AssertionError("an absent model answered")


run()
