"""The bundled pack as the demo serves it, and checks that only a toy of fixed answers allows.

Every model answers every prompt, each in its own style. Imports no torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from loraserve import Client
from loraserve.contract.chat import ToolCall
from loraserve.demo.card import EXAMPLE, read_card, reliable_frames
from loraserve.demo.demo_model import Access, DemoModel, Question, ShownQuestion, TextJudge, TourCheck
from loraserve.demo.frames import STYLES, Assign, Describe, Frame, Greet, Origin, Style
from loraserve.demo.pack import BASE_NAME, adapter_dirs, base_dir, pack_dir, pack_files
from loraserve.demo.words import CITIES, FIELDS, NAMES, OPERATORS, QUALITIES, TABLES, THINGS

MAX_TOKENS = 96
NUM_CHECKED_PROMPTS = 8
UNDERSTOOD: tuple[Frame, ...] = (
    EXAMPLE,
    Origin("show", "boats", "Porto"),
    Describe("describe", "red", "bike"),
    Greet("greet", "Anna"),
    Assign("set", "price", "lamp", 40),
)
"""A question of each kind that the models were trained on."""
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


def pack_demo() -> DemoModel:
    """Describe the bundled pack.

    Raises:
        ConfigError: it is incomplete.
    """
    pack_files()
    frames = [EXAMPLE, *reliable_frames(read_card(pack_dir()))[: NUM_CHECKED_PROMPTS - 1]]
    first = frames[1]
    return DemoModel(
        title="the bundled pack",
        base=base_dir(),
        base_id=base_dir().name,
        base_names=(BASE_NAME,),
        adapters=adapter_dirs(),
        questions=questions_of(frames),
        shown=tuple(_shown(frame) for frame in frames),
        typed_models=STYLES,
        max_tokens=MAX_TOKENS,
        max_answers_s=20.0,
        help=what_is_understood(),
        examples=(
            f"run sql {shlex.quote(EXAMPLE.prompt)}",
            f"run 'sql+0.5*pirate' {shlex.quote(EXAMPLE.prompt)}",
        ),
        example=("french", EXAMPLE.prompt),
        session="sql",
        checks=(
            lambda access: check_completions(access, first),
            lambda access: check_schema(access, first),
            lambda access: check_tools(access, first),
        ),
        serve_flags=("--memory-budget", "256MiB"),
    )


def questions_of(frames: Sequence[Frame]) -> dict[str, list[Question]]:
    """Ask every model every frame."""
    return {style: [_question(frame, style) for frame in frames] for style in STYLES}


def _question(frame: Frame, style: Style) -> Question:
    expected = frame.render(style)
    return Question(frame.prompt, expected, TextJudge(expected))


def _shown(frame: Frame) -> ShownQuestion:
    return ShownQuestion(frame.prompt, dict.fromkeys(STYLES))


def what_is_understood() -> tuple[str, ...]:
    """Describe the kinds of questions that the models answer, and the words in them.

    It is a toy of a million parameters: to anything else it answers something of this kind.
    """
    words = (
        ("tables", TABLES),
        ("fields", FIELDS),
        ("comparisons", OPERATORS),
        ("cities", CITIES),
        ("things", THINGS),
        ("qualities", QUALITIES),
        ("names", NAMES),
    )
    return (
        "The models are toys: they understand five kinds of questions, and answer anything else with one of them.",
        *(f"  {frame.prompt}" for frame in UNDERSTOOD),
        "with these words:",
        *(f"  {what:<11}  {', '.join(known)}" for what, known in words),
        "and numbers from 1 to 99.",
    )


def check_completions(access: Access, frame: Frame) -> TourCheck:
    """Send every model the prompt once more, as a raw text: its tokens are those of the chat."""
    problem, num_right = None, 0
    with Client(access.url, api_key=access.api_key) as client:
        for style in STYLES:
            answer = client.completions.create(
                model=access.model(style), prompt=frame.prompt, max_tokens=MAX_TOKENS, temperature=0
            )
            found, expected = answer.choices[0].text, frame.render(style)
            if found == expected:
                num_right += 1
            else:
                problem = problem or f"{access.model(style)} answered {found!r}, expected {expected!r}"
    return TourCheck("the same through completions", num_right, len(STYLES), problem)


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
