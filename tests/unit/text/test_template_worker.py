from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loraserve.errors import InvalidRequest
from loraserve.text import template_worker
from loraserve.text.template_worker import InspectTemplate, RenderMessages, TemplateAnswer, Templates, TemplateSetup
from loraserve.text.version_template import VersionTemplate

TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt and mood is not defined %}{{- '<|assistant|>' }}{% endif %}
"""
MESSAGES = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "list <the> tickets 中"}]


@pytest.fixture
def templates() -> Templates:
    return Templates(TemplateSetup(special_tokens={"bos_token": "<|bos|>"}))


def ask(templates: Templates, source: str, *args: Any, **kwargs: Any) -> TemplateAnswer:
    """Send the question as the server does."""
    question = VersionTemplate("sql@3", source, ()).question("acme", *args, **kwargs)
    return templates.answer(msgspec.json.decode(question, type=RenderMessages))


def test_rendering_equals_transformers(templates: Templates) -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = [{"type": "function", "function": {"name": "é<>&", "z": 1, "a": [1, None, True, 1 << 70, 1.0]}}]
    theirs, _ = transformers.render_jinja_template(
        [MESSAGES], tools=tools, chat_template=TEMPLATE, add_generation_prompt=True, bos_token="<|bos|>"
    )
    assert ask(templates, TEMPLATE, MESSAGES, True, tools).text == theirs[0]


def test_inspection_reports_variables_read_by_template(templates: Templates) -> None:
    answer = templates.answer(InspectTemplate(source=TEMPLATE, tenant="acme"))
    assert (answer.problems, answer.error) == ((), None)
    assert set(answer.read) == {"messages", "bos_token", "tools", "add_generation_prompt", "mood"}


def test_a_message_is_continued(templates: Templates) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "well, "}]
    answer = ask(templates, TEMPLATE, messages, continues_last=True)
    assert answer.text.endswith("<|assistant|>\nwell,")


def test_template_variables_are_passed_but_fields_are_protected(templates: Templates) -> None:
    assert not ask(templates, TEMPLATE, MESSAGES, variables={"mood": 1}).text.endswith("<|assistant|>")
    with pytest.raises(InvalidRequest, match="can't set tools"):
        ask(templates, TEMPLATE, MESSAGES, variables={"tools": []})


def test_a_refusal_names_the_version(templates: Templates) -> None:
    answer = ask(templates, "{{ raise_exception('no') }}", MESSAGES)
    assert answer.error == "The chat template of sql@3 refuses these messages: no."
    answer = ask(templates, "{{ 'a' * 10000000 }}", MESSAGES)
    assert (answer.error or "").startswith("These messages make the chat template of sql@3 exceed its limits")


def test_compiled_templates_are_neither_shared_nor_monopolized(templates: Templates, monkeypatch) -> None:
    made = []
    compile = template_worker.CompiledTemplate

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(args[0]["default"])
        return compile(*args, **kwargs)

    monkeypatch.setattr(template_worker, "CompiledTemplate", counting)
    for tenant in ("acme", "acme", "globex", "globex"):
        templates.answer(InspectTemplate(source=TEMPLATE, tenant=tenant))
    assert made == [TEMPLATE, TEMPLATE]
    for number in range(100):
        templates.answer(InspectTemplate(source=f"{number}", tenant="globex"))
    made.clear()
    ask(templates, TEMPLATE, MESSAGES)
    assert made == []


def test_rendering_leaves_no_state_for_next_rendering(templates: Templates) -> None:
    source = "{% set seen = namespace(n=0) %}{% set seen.n = seen.n + 1 %}{{ seen.n }}{{ range.mark }}"
    assert [ask(templates, source, MESSAGES).text for _ in range(2)] == ["1", "1"]
    for attack in ("{{ messages.append(1) }}", "{{ tools.clear() }}", "{{ range.__init__.__globals__ }}"):
        assert ask(templates, attack, MESSAGES, True, [{}]).error
