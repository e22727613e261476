from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from loraserve.errors import ConfigError, InvalidRequest, NoChatTemplate
from loraserve.text.chat_template import ChatTemplate

MakeDir = Callable[..., Path]

LLAMA_LIKE = """{{- bos_token }}
{%- if tools is not none %}
    {{- "tools: " + tools | tojson(indent=2) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
    {%- if message.role == "bad" %}{{ raise_exception("no such role") }}{% endif %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
{{- strftime_now("%Y") }}
"""
MESSAGES = [
    {"role": "system", "content": " be brief "},
    {"role": "tool", "content": "skipped"},
    {"role": "user", "content": "list <the> tickets 中"},
]


def make_template(path: Path, source: str, **kwargs: object) -> ChatTemplate:
    (path / "chat_template.jinja").write_text(source)
    return ChatTemplate(path, now=lambda: datetime(2031, 1, 1), **kwargs)  # type: ignore[arg-type]


def test_rendering_equals_transformers(make_model_dir: MakeDir) -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    path = make_model_dir("byte_level", {"bos_token": "<|bos|>"})
    tools = [{"type": "function", "function": {"name": "é<>&", "z": 1, "a": [1, None, True]}}]
    (path / "chat_template.jinja").write_text(LLAMA_LIKE)
    ours = ChatTemplate(path)
    theirs, _ = transformers.render_jinja_template(
        [MESSAGES], tools=tools, chat_template=LLAMA_LIKE, add_generation_prompt=True, bos_token="<|bos|>"
    )
    assert ours.render(MESSAGES, True, tools) == theirs[0]


@pytest.mark.parametrize("source", [LLAMA_LIKE, LLAMA_LIKE.replace(" | trim", "")])
@pytest.mark.parametrize("content", ["The tickets are: ", "  one\n", "<|eot|> is said"])
def test_a_last_message_is_continued_as_transformers_does(make_model_dir: MakeDir, source: str, content: str) -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    path = make_model_dir("byte_level", {"bos_token": "<|bos|>"})
    (path / "chat_template.jinja").write_text(source)
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    theirs, _ = transformers.render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=False,
        continue_final_message=True,
        bos_token="<|bos|>",
    )
    assert ChatTemplate(path).render_continued(messages) == theirs[0]


def test_last_message_omitted_by_template_is_not_continued(tmp_path: Path) -> None:
    template = make_template(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match="leaves out the last message") as caught:
        template.render_continued(MESSAGES)
    assert caught.value.param == "continue_final_message"


def test_the_generation_prompt_is_optional(tmp_path: Path) -> None:
    template = make_template(tmp_path, LLAMA_LIKE)
    assert template.render(MESSAGES, True).endswith("<|assistant|>\n2031")
    assert "<|assistant|>" not in template.render(MESSAGES, False)


def test_generation_block_renders_as_content(tmp_path: Path) -> None:
    template = make_template(tmp_path, "{% generation %}{{ messages[0].content }}{% endgeneration %}!")
    assert template.render([{"role": "user", "content": "hi"}]) == "hi!"


def test_the_template_in_tokenizer_config_is_found(make_model_dir: MakeDir) -> None:
    path = make_model_dir("byte_level", {"chat_template": [{"name": "default", "template": "{{ messages|length }}"}]})
    assert ChatTemplate(path).render([{"role": "user", "content": "x"}]) == "1"


def test_the_file_stands_before_the_config(make_model_dir: MakeDir) -> None:
    path = make_model_dir("byte_level", {"chat_template": "from config"})
    (path / "chat_template.jinja").write_text("from file")
    assert ChatTemplate(path).render([]) == "from file"


# SmolVLM's, and LLaVA's
PARTS = {
    "smolvlm": "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    "llava": "{% for message in messages %}{{ message['role'].upper() + ': '}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
}


@pytest.mark.parametrize("name", PARTS)
def test_template_of_parts_gets_texts(name: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    expected = {
        "smolvlm": "<|im_start|>User: Hi<end_of_utterance>\nAssistant: Yes?<end_of_utterance>\nAssistant:",
        "llava": "USER: Hi ASSISTANT: Yes? ASSISTANT:",
    }
    assert make_template(tmp_path, PARTS[name]).render(messages) == expected[name]


def test_first_requests_variables_decide_no_format(tmp_path: Path) -> None:
    source = "{% set ns = namespace(n=0) %}" + PARTS["llava"]
    template = make_template(tmp_path, source)
    with pytest.raises(InvalidRequest):
        template.render([{"role": "user", "content": "Hi"}], variables={"namespace": 1})
    assert template.render([{"role": "user", "content": "Hi"}]) == "USER: Hi ASSISTANT:"


def test_system_message_is_passed_as_parts_when_needed(tmp_path: Path) -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content[0].text }}{% else %}"
    source += "{{ m.content if m.content is string else m.content[0].text }}{% endif %}{% endfor %}"
    messages = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"}]
    assert make_template(tmp_path, source).render(messages) == "Be brief. Hi"


def test_template_of_texts_gets_no_parts(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}parts{% endif %}{% endfor %}"
    )
    assert make_template(tmp_path, source).render([{"role": "user", "content": "Hi"}]) == "Hi"


def test_template_of_processor_is_found(make_model_dir: MakeDir) -> None:
    directory = make_model_dir("byte_level", {})
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}!"}))
    assert ChatTemplate(directory).render([{"role": "user", "content": "Hi"}]) == "Hi!"


def test_variables_reach_the_template(tmp_path: Path) -> None:
    template = make_template(tmp_path, "{% if enable_thinking is defined and not enable_thinking %}fast{% endif %}")
    assert template.render([], variables={"enable_thinking": False}) == "fast"


def test_messages_cannot_be_overridden_by_a_variable(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't set tools"):
        make_template(tmp_path, "x").render([], variables={"tools": []})


def test_model_without_template_suggests_completions_endpoint(tmp_path: Path) -> None:
    with pytest.raises(NoChatTemplate, match=r"no chat template.*/v1/completions"):
        ChatTemplate(tmp_path).render([])


def test_the_templates_own_refusal_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such role"):
        make_template(tmp_path, LLAMA_LIKE).render([{"role": "bad", "content": ""}])


def test_template_failing_on_messages_is_a_bad_request(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't render"):
        make_template(tmp_path, "{{ messages[0].content + 1 }}").render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{{ j }}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% set x = j %}{% endfor %}{% endfor %}",
        "{{ 'x' * 100000000 }}",
        "{% set ns = namespace(s='x') %}{% for i in range(90) %}{% set ns.s = ns.s * 4096 %}{% endfor %}{{ ns.s }}",
    ],
)
def test_a_runaway_template_is_stopped(tmp_path: Path, source: str) -> None:
    with pytest.raises(InvalidRequest, match="exceed its limits"):
        make_template(tmp_path, source, timeout_s=0.2, max_output_chars=100_000).render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 2 ** 999999999 }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(tmp_path: Path, source: str) -> None:
    with pytest.raises(InvalidRequest):
        make_template(tmp_path, source).render([])


def test_an_invalid_template_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        make_template(tmp_path, "{% for %}")


def test_template_reports_variables_read(make_model_dir: MakeDir) -> None:
    source = "{% set seen = reasoning_effort %}{{ messages[0].content }}{{ seen }}{# verbosity #}"
    template = make_template(make_model_dir("byte_level", {}), source)
    assert template.reads("reasoning_effort")
    assert not template.reads("verbosity")
    assert not template.reads("seen")


def test_file_replaces_template_of_directory(make_model_dir: MakeDir, tmp_path: Path) -> None:
    path = make_model_dir("byte_level", {"chat_template": [{"name": "tool_use", "template": "tools"}]})
    (path / "chat_template.jinja").write_text(LLAMA_LIKE)
    file = tmp_path / "own.jinja"
    file.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    template = ChatTemplate(path, file=file)
    assert template.render(MESSAGES[2:]) == "[list <the> tickets 中]"
    # a template for tools is the directory's too
    assert template.render(MESSAGES[2:], tools=[{"type": "function"}]) == "[list <the> tickets 中]"


def test_file_may_need_message_of_system(make_model_dir: MakeDir, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages }}")
    assert ChatTemplate(make_model_dir("byte_level"), file=file).is_available


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't be read: No such file or directory"),
        (b"{% if %}", "is not valid Jinja: Expected an expression"),
        (b'{"chat_template": "{}"}', "can't show a user's message: its text isn't in the prompt"),
        (b"{{ raise_exception('never') }}", "can't show a user's message: The model's chat template refuses"),
        (b"\xff\xfe", "isn't text in UTF-8"),
        (b" " * ((1 << 20) + 1), "is larger than 1048576 bytes"),
    ],
)
def test_unusable_file_is_refused(make_model_dir: MakeDir, tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ChatTemplate(make_model_dir("byte_level"), file=file)
    assert str(caught.value).startswith(f"--chat-template {file} {words}")
