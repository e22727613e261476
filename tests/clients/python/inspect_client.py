"""inspect-ai, by the provider ``openai-api/`` or (option ``vllm``) ``vllm/BASE:ADAPTER``."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from probe import (
    BASE_URL,
    DESCRIPTION,
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

_SCRATCH = tempfile.TemporaryDirectory(prefix="inspect-", ignore_cleanup_errors=True)
SERVICE = "VLLM" if "vllm" in SCRIPT_OPTIONS else "LORASERVE"
os.environ |= {"HOME": _SCRATCH.name, f"{SERVICE}_BASE_URL": BASE_URL, f"{SERVICE}_API_KEY": KEY}

import inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageTool, ChatMessageUser, GenerateConfig, Model, ResponseSchema, get_model
from inspect_ai.scorer import exact
from inspect_ai.solver import generate
from inspect_ai.tool import ToolFunction, tool
from inspect_ai.util import json_schema

SURE = GenerateConfig(temperature=0, max_tokens=MAX_TOKENS, max_retries=0)
FORCED = ToolFunction("query")
Query = query_type()


def model(name: str) -> Model:
    return get_model(f"vllm/base:{name}" if SERVICE == "VLLM" else f"openai-api/loraserve/{name}", config=SURE)


@tool
def query() -> Any:
    async def execute(table: Table, field: Field, op: Operator, value: int) -> str:
        """Count rows.

        Args:
            table: A table.
            field: Its field.
            op: Side of the number.
            value: The number.
        """
        return RESULT

    return execute


@feature
def chat() -> str:
    """Evaluate a task of one sample, as the command does."""
    task = inspect_ai.Task(
        dataset=[Sample(input=QUESTION, target="SELECT * FROM tickets WHERE age > 81;")],
        solver=[generate()],
        scorer=exact(),
    )
    (log,) = inspect_ai.eval(task, model=model(TEXT_MODEL), log_dir=_SCRATCH.name, display="none")
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["mean"].value == 1
    (sample,) = log.samples
    return sample.output.completion


@feature
async def call() -> dict[str, Any]:
    output = await model(JSON_MODEL).generate(QUESTION, tools=[query()], tool_choice=FORCED)
    (made,) = output.message.tool_calls
    return {"name": made.function, "arguments": made.arguments}


@feature
async def result() -> str:
    first = await model(JSON_MODEL).generate(QUESTION, tools=[query()], tool_choice=FORCED)
    (made,) = first.message.tool_calls
    answer = ChatMessageTool(content=RESULT, tool_call_id=made.id, function=made.function)
    second = await model(TEXT_MODEL).generate([ChatMessageUser(content=QUESTION), first.message, answer])
    return second.completion


@feature
async def parse() -> dict[str, Any]:
    schema = ResponseSchema(name="query", json_schema=json_schema(Query), description=DESCRIPTION)
    output = await model(JSON_MODEL).generate(QUESTION, config=GenerateConfig(response_schema=schema))
    return Query.model_validate_json(output.completion).model_dump()


@feature
async def logprobs() -> list[Any]:
    output = await model(TEXT_MODEL).generate(QUESTION, config=GenerateConfig(logprobs=True, top_logprobs=2))
    return [[item.token, item.logprob] for item in output.choices[0].logprobs.content]


@feature
async def unknown_model() -> str:
    try:
        await model("absent").generate(QUESTION)
    # of openai or, where the provider lists the adapters first, its own
    except Exception as error:
        return str(error)
    raise AssertionError("an absent model answered")


run()
