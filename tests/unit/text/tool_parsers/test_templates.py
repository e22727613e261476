"""Templates of the families' shape: what they are taken for, and their own calls, read back.

The templates are written for these tests after the families' own, in the markers and words that
matter here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tool_answers import MARKERS, TOOLS, answer_of, decoded

from loraserve.text.chat_format import ChatFormat
from loraserve.text.chat_template import ChatTemplate
from loraserve.text.reasoning import reasoning_format
from loraserve.text.tokenizer import Tokenizer

FAMILIES = {
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "pythonic": "pythonic",
    "mistral": "mistral",
    "mistral_v11": "mistral",
    "granite": "granite",
    "phi4_mini": "phi4_mini_json",
    "phi4_mini_json": "phi4_mini_json",
    "functiongemma": "functiongemma",
    "qwen3_coder": "qwen3_coder",
}
"""Templates, and the format of their calls."""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SHOWN = [
    {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": "é <b>",
            "parameters": tool.parameters or {"type": "object", "properties": {}},
        },
    }
    for tool in TOOLS
]
ARGUMENTS = {"city": 'Ångström "q" <x>', "days": 3, "flags": [True, False], "unit": "celsius"}


@pytest.fixture(scope="session")
def source_of(templates_dir: Path) -> Callable[[str], str]:
    return lambda name: (templates_dir / f"{name}.jinja").read_text()


@pytest.fixture(scope="session")
def templates_dir() -> Path:
    return Path(__file__).resolve().parent.parent / "templates"


@pytest.fixture
def make_format(
    make_tokenizer: Callable[..., Tokenizer], source_of: Callable[[str], str], tmp_path: Path
) -> Callable[..., ChatFormat]:
    def make(name: str) -> ChatFormat:
        markers = [marker for marker in MARKERS if marker != "[ARGS]" or name == "mistral_v11"]
        tokenizer = make_tokenizer("special", markers)
        tokenizer.config.update(SPECIAL)
        (tmp_path / "chat_template.jinja").write_text(source_of(name))
        return ChatFormat(ChatTemplate(tmp_path, tokenizer), tokenizer)

    return make


def conversation(*calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    made = [
        {"id": f"call{n}aaaa", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return [
        {"role": "user", "content": "What's the weather?"},
        {"role": "assistant", "content": "", "tool_calls": made},
        {"role": "tool", "content": "{}", "tool_call_id": made[0]["id"], "name": calls[0][0]},
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_template_identifies_tool_family(make_format: Callable[..., ChatFormat], name: str) -> None:
    chat_format = make_format(name)
    assert chat_format.tools is not None
    assert chat_format.tools.name == FAMILIES[name]
    assert chat_format.template.takes_tools


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_reach_prompt_as_in_transformers(
    make_format: Callable[..., ChatFormat], source_of: Callable[[str], str], name: str
) -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = conversation(("get_weather", ARGUMENTS))
    ours = make_format(name).template.render(messages, True, SHOWN)
    assert "get_weather" in ours
    if name == "phi4_mini":
        functions = json.dumps([tool["function"] for tool in SHOWN], ensure_ascii=False)
        messages = [{"role": "system", "content": "", "tools": functions}, *messages]
    theirs, _ = transformers.render_jinja_template(
        [messages], tools=SHOWN, chat_template=source_of(name), add_generation_prompt=True, **SPECIAL
    )
    assert ours == theirs[0]


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_templates_own_calls_are_read_back(
    make_format: Callable[..., ChatFormat], name: str, is_parallel: bool
) -> None:
    chat_format = make_format(name)
    assert chat_format.tools is not None
    calls = [("get_weather", ARGUMENTS), *([("get_time", {})] if is_parallel else [])]
    if is_parallel and name == "llama3_json":
        pytest.skip("the family's templates take one call a message")
    messages = conversation(*calls)[:2]
    if not chat_format.template.takes_tool_calls:
        functions = [call["function"] for call in messages[1].pop("tool_calls")]
        messages[1]["content"] = chat_format.tools.written(functions)
    before = chat_format.template.render(messages[:1], True)
    whole = chat_format.template.render(messages, False)
    assert whole.startswith(before)
    turn = whole[len(before) :]
    for end in ("<|im_end|>\n", "<|eot_id|>", "<end_of_turn>\n", "</s>", "<|end_of_text|>\n", "<|end|>"):
        turn = turn.removesuffix("\n").removesuffix(end.rstrip("\n"))
    answer = decoded(answer_of(chat_format.tools.parser(TOOLS), [turn]))
    assert answer == {"calls": [list(call) for call in calls]}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% if message.reasoning_content %}<think></think>{% endif %}", "qwen3"),
        ("[THINK]", "mistral"),
        ("<|start_of_role|> Here is my thought process:", "granite"),
        ("nothing of that kind", None),
    ],
)
def test_a_template_tells_of_reasoning(source: str, name: str | None) -> None:
    found = reasoning_format("auto", source)
    assert (found and found.name) == name
