"""Checks of the scripted tour.

They look at every answer, the access of other tenants, and the state after a restart.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from loraserve import AsyncClient, Client
from loraserve.contract.chat import ToolCall
from loraserve.demo.frames import ADAPTERS, STYLES, Frame, Style
from loraserve.demo.side_by_side import MAX_TOKENS
from loraserve.demo.words import FIELDS, OPERATORS, TABLES
from loraserve.errors import AuthenticationError, LoraserveError, NotFound

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "table": {"enum": list(TABLES)},
        "field": {"enum": list(FIELDS)},
        "op": {"enum": [operator for operator, _ in OPERATORS.values()]},
        "value": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["table", "field", "op", "value"],
    "additionalProperties": False,
}
"""Query that any model can be made to answer with, or to call `TOOL` with."""
TOOL: Mapping[str, Any] = {"type": "function", "function": {"name": "query", "strict": True, "parameters": SCHEMA}}


@dataclass(frozen=True, slots=True)
class TourCheck:
    """A check that was tried `num_tried` times."""

    what: str
    num_right: int
    num_tried: int
    problem: str | None = None
    """The first thing that was wrong: what was found, what was expected."""

    @property
    def is_right(self) -> bool:
        return self.num_tried > 0 and self.num_right == self.num_tried


@dataclass(frozen=True, slots=True)
class Access:
    """A server, a tenant's key, and what it calls its models."""

    url: str
    api_key: str
    base_id: str

    def model(self, style: Style) -> str:
        return self.base_id if style == "plain" else style


def check_answers(access: Access, frames: Sequence[Frame], *, when: str = "") -> list[TourCheck]:
    """Send the base and every adapter every prompt, all at once and streamed.

    Return one check per model.
    """
    answers = asyncio.run(_ask_everything(access, frames))
    return [_compare(f"{access.model(style)}{when}", frames, style, answers[style]) for style in STYLES]


def check_chat(access: Access, frame: Frame) -> TourCheck:
    """Send every model the prompts once more, as a chat."""
    problem, num_right = None, 0
    with Client(access.url, api_key=access.api_key) as client:
        for style in STYLES:
            message = {"role": "user", "content": frame.prompt}
            chat = client.chat.completions.create(
                model=access.model(style), messages=[message], max_tokens=MAX_TOKENS, temperature=0
            )
            found, expected = chat.choices[0].message.content, frame.render(style)
            if found == expected:
                num_right += 1
            else:
                problem = problem or f"{access.model(style)} answered {found!r}, expected {expected!r}"
    return TourCheck("the same through chat", num_right, len(STYLES), problem)


def ask_for_query(access: Access, model: str, prompt: str) -> str:
    """Request the model's answer to a prompt, as JSON of `SCHEMA`."""
    with Client(access.url, api_key=access.api_key) as client:
        chat = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            response_format={"type": "json_schema", "json_schema": {"name": "query", "schema": SCHEMA, "strict": True}},
        )
    return chat.choices[0].message.content or ""


def check_schema(access: Access, frame: Frame) -> TourCheck:
    """Request JSON of a schema from every model; most of them never saw JSON."""
    problem, num_right = None, 0
    for style in STYLES:
        answer = ask_for_query(access, access.model(style), frame.prompt)
        if is_query(answer):
            num_right += 1
        else:
            problem = problem or f"{access.model(style)} answered {answer!r}, expected JSON of the schema"
    return TourCheck("JSON of a schema", num_right, len(STYLES), problem)


def ask_for_call(access: Access, model: str, prompt: str) -> list[ToolCall]:
    """Request the calls of the model's answer to a prompt, which must be one call of `TOOL`."""
    with Client(access.url, api_key=access.api_key) as client:
        chat = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
        )
    return chat.choices[0].message.tool_calls or []


def check_tools(access: Access, frame: Frame) -> TourCheck:
    """Make every model call a tool, and request the answer after the tool's result."""
    problems = [problem for style in STYLES if (problem := _tools_problem(access, style, frame))]
    return TourCheck("tool calls", len(STYLES) - len(problems), len(STYLES), problems[0] if problems else None)


def _tools_problem(access: Access, style: Style, frame: Frame) -> str | None:
    model = access.model(style)
    calls = ask_for_call(access, model, frame.prompt)
    functions = [call.function for call in calls if call.function is not None]
    if [function.name for function in functions] != ["query"] or not is_query(functions[0].arguments or ""):
        return f"{model} called {functions}, expected one call of query"
    messages: list[Mapping[str, Any]] = [
        {"role": "user", "content": frame.prompt},
        {"role": "assistant", "tool_calls": [call.model_dump(exclude_none=True) for call in calls]},
        {"role": "tool", "tool_call_id": calls[0].id, "content": '{"rows": 3}'},
    ]
    with Client(access.url, api_key=access.api_key) as client:
        chat = client.chat.completions.create(
            model=model, messages=messages, tools=[TOOL], max_tokens=MAX_TOKENS, temperature=0
        )
    found, expected = chat.choices[0].message.content, frame.render(style)
    return None if found == expected else f"{model} answered {found!r} after its call, expected {expected!r}"


def is_query(text: str) -> bool:
    """Check whether a text is JSON of `SCHEMA`."""
    try:
        query = json.loads(text)
    except ValueError:
        return False
    properties = SCHEMA["properties"]
    return (
        isinstance(query, dict)
        and set(query) == set(properties)
        and all(query[name] in properties[name]["enum"] for name in ("table", "field", "op"))
        and type(query["value"]) is int
        and 0 <= query["value"] <= 99
    )


def check_time(took_s: float, max_s: float) -> TourCheck:
    """Check that the answers came in the time that they may take."""
    problem = None if took_s <= max_s else f"they took {took_s:.0f} s, expected {max_s:.0f} s at most"
    return TourCheck("answered in time", int(problem is None), 1, problem)


def check_models(access: Access) -> TourCheck:
    """Check that the tenant sees the base and its seven adapters, and nothing else."""
    with Client(access.url, api_key=access.api_key) as client:
        found = sorted(model.id for model in client.models.list())
    expected = sorted((access.base_id, *ADAPTERS))
    problem = None if found == expected else f"/v1/models lists {found}, expected {expected}"
    return TourCheck("the models listed", int(problem is None), 1, problem)


def check_stranger(access: Access, stranger_key: str) -> TourCheck:
    """Check that another tenant's key finds none of the adapters, in any way.

    A made-up key must find nothing at all.
    """
    with (
        Client(access.url, api_key=stranger_key) as stranger,
        Client(access.url, api_key="sk-lora-made-up-by-the-tour") as nobody,
    ):
        tries: list[tuple[str, Callable[[], object], type[LoraserveError]]] = [
            ("list models", nobody.models.list, AuthenticationError),
            (
                "ask the base",
                partial(nobody.completions.create, model=access.base_id, prompt="hi"),
                AuthenticationError,
            ),
        ]
        for name in ADAPTERS:
            tries += [
                (f"ask {name}", partial(stranger.completions.create, model=name, prompt="hi"), NotFound),
                (f"read {name}", partial(stranger.adapters.get, name), NotFound),
                (f"delete {name}", partial(stranger.adapters.delete, name), NotFound),
            ]
        problems = [problem for what, act, error in tries if (problem := _refusal_problem(what, act, error))]
        seen = [model.id for model in stranger.models.list() if model.id != access.base_id]
        if seen:
            problems.append(f"another tenant's list of models shows {seen}")
    return TourCheck(
        "other keys refused", len(tries) + 1 - len(problems), len(tries) + 1, problems[0] if problems else None
    )


def _refusal_problem(what: str, act: Callable[[], object], error: type[LoraserveError]) -> str | None:
    try:
        act()
    except error:
        return None
    except LoraserveError as other:
        return f"a foreign key that tried to {what} got {type(other).__name__}, expected {error.__name__}"
    return f"a foreign key could {what}"


async def _ask_everything(access: Access, frames: Sequence[Frame]) -> dict[Style, list[str]]:
    async with AsyncClient(access.url, api_key=access.api_key) as client:

        async def ask(style: Style, frame: Frame) -> str:
            stream = await client.completions.create(
                model=access.model(style), prompt=frame.prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True
            )
            async with stream:
                return "".join([choice.text async for chunk in stream for choice in chunk.choices])

        # By prompt first, so that neighbours in the queue need different adapters.
        answers = await asyncio.gather(*(ask(style, frame) for frame in frames for style in STYLES))
    return {style: list(answers[index :: len(STYLES)]) for index, style in enumerate(STYLES)}


def _compare(what: str, frames: Sequence[Frame], style: Style, answers: Sequence[str]) -> TourCheck:
    wrong = [
        f"{frame.prompt!r} was answered {answer!r}, expected {frame.render(style)!r}"
        for frame, answer in zip(frames, answers, strict=True)
        if answer != frame.render(style)
    ]
    return TourCheck(what, len(frames) - len(wrong), len(frames), wrong[0] if wrong else None)
