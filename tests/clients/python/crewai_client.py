"""crewai, by its model class and by a crew of one agent."""

from __future__ import annotations

import os
import tempfile
from typing import Any

_SCRATCH = tempfile.TemporaryDirectory(prefix="crewai-", ignore_cleanup_errors=True)
os.environ |= {"HOME": _SCRATCH.name, "CREWAI_STORAGE_DIR": _SCRATCH.name}
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true"}

from crewai import LLM, Agent, Crew, Task
from probe import BASE_URL, DESCRIPTION, JSON_MODEL, KEY, MAX_TOKENS, QUESTION, TEXT_MODEL, feature, query_type, run

Query = query_type()


def model(name: str, **options: Any) -> LLM:
    return LLM(
        model=f"openai/{name}",
        base_url=BASE_URL,
        api_key=KEY,
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
        **options,
    )


@feature
def chat() -> str:
    return model(TEXT_MODEL).call(QUESTION)


@feature
def parse() -> dict[str, Any]:
    answer = model(JSON_MODEL, response_format=Query).call(QUESTION)
    return (answer if isinstance(answer, Query) else Query.model_validate_json(answer)).model_dump()


@feature
def predict() -> dict[str, Any]:
    """Return the answer of a crew, whose prompt the bundled model does not know."""
    agent = Agent(role="Analyst", goal="Find rows", backstory="Knows tables", llm=model(JSON_MODEL))
    task = Task(description=QUESTION, expected_output=DESCRIPTION, agent=agent, response_model=Query)
    return Query.model_validate_json(Crew(agents=[agent], tasks=[task]).kickoff().raw).model_dump()


@feature
def unknown_model() -> str:
    try:
        model("absent").call(QUESTION)
    except Exception as error:
        return str(error)
    raise AssertionError("an absent model answered")


run()
