"""A version's own chat template, parsers and defaults, in chats with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx2
import jinja2
import pytest

from loraserve.api.services import Services
from loraserve.limits import LIMITS
from loraserve.registry.model_name import parse_model
from loraserve.registry.registry import Registry

BASE = "org/base:1"
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
OTHER = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"
HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<tool_call>"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "hi"}]
pytestmark = pytest.mark.usefixtures("no_leaks")


async def chat(client: httpx2.AsyncClient, model: str, **body: Any) -> httpx2.Response:
    return await client.post("/v1/chat/completions", json={"model": model, "messages": MESSAGES, "seed": 1, **body})


def prompts_of(engine: Any) -> list[str]:
    return [engine.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False) for one in engine.seen]


async def test_each_version_uses_own_chat_template(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    one = await publish("sql", chat_template=TEMPLATE.encode())
    two = await publish("sql", chat_template=OTHER.encode())
    engine.step_s = 0.01
    answers = await asyncio.gather(
        *(chat(client, model) for model in (f"sql@{one}", f"sql@{two}", "sql@1", BASE, f"sql@{one}"))
    )
    assert [answer.status_code for answer in answers] == [200] * 5
    by_version = {
        one.adapter and one.adapter.version: text for one, text in zip(engine.seen, prompts_of(engine), strict=True)
    }
    assert by_version[one] == "[user] hi\n"
    assert by_version[two] == "<user> hi\n"
    assert by_version[1] == by_version[None] == "<|user|>hi\n<|assistant|>"


@pytest.mark.parametrize(
    "written",
    [
        pytest.param("{{ message.content }}", id="no role"),
        pytest.param(
            "[{{ message.role }}]{% if message.role == 'user' %}{{ message.content }}{% endif %}", id="no text"
        ),
    ],
)
async def test_role_is_refused_when_template_omits_message(
    client: httpx2.AsyncClient, publish: Callable[..., Any], written: str
) -> None:
    template = "{% for message in messages %}" + written + "{% endfor %}"
    version = await publish("sql", chat_template=template.encode())
    # what it leaves out stands elsewhere, too
    messages = [{"role": "user", "content": "Does the critic say no?"}, {"role": "critic", "content": "no"}]
    error = (await chat(client, f"sql@{version}", messages=messages)).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "invalid_value")
    assert "'critic'" in error["message"]
    assert (await chat(client, f"sql@{version}")).status_code == 200


async def test_custom_role_may_be_written_as_json(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    """As Llama 3's template writes what its interpreter answers."""
    template = (
        "{% for message in messages %}<{{ message.role }}>{% if message.role == 'ipython' %}"
        "{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    version = await publish("sql", chat_template=template.encode())
    messages = [*MESSAGES, {"role": "ipython", "content": 'a "b"\nc'}]
    assert (await chat(client, f"sql@{version}", messages=messages)).status_code == 200
    assert prompts_of(engine) == ['<user>hi<ipython>"a \\"b\\"\\nc"']


async def test_template_is_read_once_for_concurrent_requests(
    client: httpx2.AsyncClient, publish: Callable[..., Any], services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await publish("sql", chat_template=TEMPLATE.encode())
    read, asked = services.store.read, list[str]()

    def counting(digest: Any) -> Any:
        asked.append(digest)
        return read(digest)

    monkeypatch.setattr(services.store, "read", counting)
    await asyncio.gather(*(chat(client, f"sql@{version}") for _ in range(8)))
    await chat(client, f"sql@{version}")
    assert len(asked) == 1


async def test_tokenize_shows_the_versions_own_prompt(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    version = await publish("sql", chat_template=TEMPLATE.encode())
    answer = await client.post("/tokenize", json={"model": f"sql@{version}", "messages": MESSAGES})
    assert engine.tokenizer.decode(answer.json()["tokens"]) == "[user] hi\n"
    answer = await client.post("/tokenize", json={"model": "sql@1", "messages": MESSAGES})
    assert "[user]" not in engine.tokenizer.decode(answer.json()["tokens"])


async def test_last_message_is_continued_by_version_template(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    version = await publish("sql", chat_template=TEMPLATE.encode())
    answer = await chat(
        client,
        f"sql@{version}",
        messages=[*MESSAGES, {"role": "assistant", "content": "well"}],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert answer.status_code == 200
    assert prompts_of(engine) == ["[user] hi\n[assistant] well"]


VARIABLES = "{{ mood | default('none') }}/{{ style | default('none') }}/{{ reasoning_effort | default('none') }}"


@pytest.mark.parametrize("own_template", [True, False], ids=["own", "base"])
async def test_template_variables_merge_over_version_and_server(
    client: httpx2.AsyncClient,
    publish: Callable[..., Any],
    engine: Any,
    services: Services,
    own_template: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services.chat_format.variables = {"mood": "server", "style": "server", "reasoning_effort": "server"}
    if not own_template:
        templates = services.chat_format.template._templates  # type: ignore[union-attr]
        monkeypatch.setitem(templates, "default", jinja2.Template(VARIABLES))
    extras = {"chat_template": VARIABLES.encode()} if own_template else {}
    version = await publish("sql", **extras, chat_template_kwargs=b'{"mood": "version", "style": "version"}')
    model, kwargs = f"sql@{version}", {"chat_template_kwargs": {"mood": "request"}}
    expected = "version/version/server", "request/version/server"
    for path, fields in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ):
        for more in ({}, kwargs):
            answer = await client.post(path, json={"model": model, **fields, **more})
            assert answer.status_code == 200, answer.text
        assert prompts_of(engine)[-2:] == list(expected)
    for more, text in zip(({}, kwargs), expected, strict=True):
        tokens = (await client.post("/tokenize", json={"model": model, "messages": MESSAGES, **more})).json()["tokens"]
        assert engine.tokenizer.decode(tokens) == text
    await chat(client, model, reasoning_effort="low")
    assert prompts_of(engine)[-1] == "version/version/low"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
async def test_reserved_template_variable_is_refused(client: httpx2.AsyncClient, path: str, name: str) -> None:
    body = {"model": BASE, "messages": MESSAGES, "chat_template_kwargs": {name: 1}}
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert f"can't set {name}" in answer.json()["error"]["message"]


async def test_sum_uses_base_template_unless_parts_agree(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    await publish("one", 1, chat_template=TEMPLATE.encode())
    await publish("two", 2, chat_template=TEMPLATE.encode())
    await publish("three", 3, chat_template=OTHER.encode())
    for model in ("one+two", "one+three", "one+sql"):
        assert (await chat(client, model)).status_code == 200
    assert prompts_of(engine) == ["[user] hi\n", *["<|user|>hi\n<|assistant|>"] * 2]


async def test_version_tool_parser_parses_answers(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
    engine.script = '[TOOL_CALLS]find{"q": 1}'
    hermes = await publish("sql", chat_template=HERMES.encode())
    mistral = await publish("sql", chat_template=HERMES.encode(), tool_parser=b"mistral")
    bare = await publish("sql", tool_parser=b"mistral")
    one = (await chat(client, f"sql@{hermes}", tools=tools)).json()["choices"][0]
    two = (await chat(client, f"sql@{mistral}", tools=tools)).json()["choices"][0]
    assert (one["finish_reason"], one["message"]["content"]) == ("stop", engine.script)
    assert two["finish_reason"] == "tool_calls"
    assert two["message"]["tool_calls"][0]["function"]["name"] == "find"
    # the base's template reads no tools
    assert (await chat(client, f"sql@{bare}", tools=tools)).json()["error"]["param"] == "tools"


async def test_a_messages_thinking_follows_the_versions_own_template(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    switch = "{% if enable_thinking %}think! {% endif %}{{ messages[0].content }}"
    one, two = await publish("sql", chat_template=switch.encode()), await publish("sql", chat_template=OTHER.encode())
    body = {"max_tokens": 4, "messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    for model, prompt, ignored in (
        (f"sql@{one}", "think! hi", "thinking.budget_tokens"),
        (f"sql@{two}", "<user> hi\n", "thinking"),
        (BASE, "<|user|>hi\n<|assistant|>", "thinking"),
    ):
        answer = await client.post("/v1/messages", json={"model": model, **body})
        assert (answer.status_code, answer.headers["x-loraserve-ignored"]) == (200, ignored)
        assert prompts_of(engine)[-1] == prompt
        counted = await client.post(
            "/v1/messages/count_tokens", json={"model": model, "messages": MESSAGES, "thinking": body["thinking"]}
        )
        assert counted.json()["input_tokens"] == len(engine.seen[-1].prompt_token_ids)
    # what the body says itself goes first
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    await client.post("/v1/messages", json={"model": f"sql@{one}", **body, **kwargs})
    assert prompts_of(engine)[-1] == "hi"


NO_THINKING: dict[str, dict[str, Any]] = {
    "OpenAI": {"reasoning_effort": "none"},
    "OpenRouter": {"reasoning": {"enabled": False}},
    "OpenRouter's effort": {"reasoning": {"effort": "none"}},
    "Z.ai": {"thinking": {"type": "disabled"}},
    "Qwen": {"enable_thinking": False},
    "Ollama": {"think": False},
    "the first": {"reasoning_effort": "none", "think": True},
}


@pytest.mark.parametrize("client_of", NO_THINKING)
@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
async def test_every_clients_switch_ends_thinking(
    client_of: str, switch: str, client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    template = f"{{% if {switch} is not defined or {switch} %}}think! {{% endif %}}{{{{ messages[0].content }}}}"
    version, deaf = await publish("sql", chat_template=template.encode()), await publish("sql")
    await chat(client, f"sql@{version}")
    assert prompts_of(engine)[-1] == "think! hi"
    answer = await chat(client, f"sql@{version}", **NO_THINKING[client_of])
    assert "x-loraserve-ignored" not in answer.headers
    assert prompts_of(engine)[-1] == "hi"
    # the template's own variable goes first
    await chat(client, f"sql@{version}", **NO_THINKING[client_of], chat_template_kwargs={switch: True})
    assert prompts_of(engine)[-1] == "think! hi"
    # a template without a switch: said
    unheard = await chat(client, f"sql@{deaf}", **NO_THINKING[client_of])
    assert unheard.headers["x-loraserve-ignored"] == ", ".join(NO_THINKING[client_of])


async def test_effort_reaches_template_from_any_field(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    version = await publish("sql", chat_template=b"{{ reasoning_effort }}: {{ messages[0].content }}")
    for fields in ({"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}, {"think": "low"}):
        answer = await chat(client, f"sql@{version}", **fields)
        assert (answer.headers.get("x-loraserve-ignored"), prompts_of(engine)[-1]) == (None, "low: hi")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"enabled": 1}}, "reasoning.enabled"),
        ({"reasoning": {"effort": ""}}, "reasoning.effort"),
        ({"thinking": True}, "thinking.type"),
        ({"thinking": {"type": "off"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"think": 1}, "think"),
        ({"think": "x" * 33}, "think"),
    ],
)
async def test_wrong_thinking_switch_is_refused(fields: dict[str, Any], param: str, client: httpx2.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json={"model": BASE, "messages": MESSAGES, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_version_defaults_apply_where_request_is_silent(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any, base: Any
) -> None:
    config = {
        "temperature": 0.3,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "max_new_tokens": 3,
        "eos_token_id": [5, base.eos_token_ids[0]],
        "stop_strings": ["!"],
    }
    version = await publish("sql", generation_config=json.dumps(config).encode())
    for path, prompt in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "x"})):
        body = {"model": f"sql@{version}", **prompt}
        assert (await client.post(f"/v1/{path}", json=body)).json()["usage"]["completion_tokens"] == 3
        said = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 2}
        await client.post(f"/v1/{path}", json=body | said | {"stop": ["?"], "stop_token_ids": [9]})
        params, asked = (one.params for one in engine.seen[-2:])
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.3, 0.5, 7, 0.1)
        assert (params.repetition_penalty, params.max_tokens) == (1.2, 3)
        assert params.stop_token_ids == (5, base.eos_token_ids[0])
        assert engine.seen[-2].stop == ("!",)
        assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (1, 1, 0, 0)
        assert (asked.repetition_penalty, asked.max_tokens) == (1, 2)
        assert asked.stop_token_ids == (9, 5, base.eos_token_ids[0])
        assert engine.seen[-1].stop == ("?",)
    await client.post("/v1/completions", json={"model": f"sql@{version}", "prompt": "x", "ignore_eos": True})
    assert engine.seen[-1].params.stop_token_ids == ()
    generated = await client.post("/generate", json={"inputs": "x", "parameters": {"adapter_id": f"sql@{version}"}})
    assert generated.status_code == 200
    params = engine.seen[-1].params
    assert (params.temperature, params.top_p) == (0, 1)
    assert params.stop_token_ids == (5, base.eos_token_ids[0])


async def test_version_without_sampling_is_greedy_by_default(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    version = await publish("sql", generation_config=b'{"do_sample": false, "temperature": 0.7}')
    await chat(client, f"sql@{version}")
    await chat(client, f"sql@{version}", temperature=0.5)
    assert [one.params.temperature for one in engine.seen] == [0, 0.5]


async def test_template_is_invisible_to_other_tenant(
    client: httpx2.AsyncClient, publish: Callable[..., Any], make_tenant: Any, engine: Any, url: str
) -> None:
    globex = await make_tenant("globex")
    await publish("sql", chat_template=TEMPLATE.encode(), generation_config=b'{"top_k": 3}')
    await publish("sql", tenant=globex)
    async with httpx2.AsyncClient(base_url=url, headers=globex.headers) as other:
        assert (await chat(other, "sql")).status_code == 200
        absent = await chat(other, "sql@2")
        missing = await chat(other, "sql@3")
    assert prompts_of(engine) == ["<|user|>hi\n<|assistant|>"]
    assert engine.seen[0].params.top_k == 0
    assert absent.status_code == missing.status_code == 404


async def test_template_refusing_messages_is_named_with_version(
    client: httpx2.AsyncClient, publish: Callable[..., Any]
) -> None:
    strict = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}x"
    version = await publish("sql", chat_template=strict.encode())
    answer = await chat(client, f"sql@{version}", messages=MESSAGES * 2)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("chat_template_failed", "messages")
    assert error["message"] == f"The chat template of sql@{version} refuses these messages: one message only."
    answer = await chat(client, f"sql@{version}", chat_template_kwargs={"messages": []})
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


async def test_killed_renderer_is_restarted(
    client: httpx2.AsyncClient, publish: Callable[..., Any], services: Any, engine: Any
) -> None:
    version = await publish("sql", chat_template=TEMPLATE.encode())
    for process in services.templates._processes._all:
        os.kill(process._process.pid, signal.SIGKILL)
    assert (await chat(client, f"sql@{version}")).status_code == 200
    assert prompts_of(engine) == ["[user] hi\n"]
    assert services.templates.num_starts == 2


async def test_hanging_template_ends_alone_while_streams_continue(
    client: httpx2.AsyncClient, publish: Callable[..., Any], services: Any, make_tenant: Any, url: str
) -> None:
    # one step of many seconds: no look at the clock ends it
    bomb = "{% if messages[0].content == 'bomb' %}{{ ([[0] * 100] * 10000) | sum(start=[]) }}{% endif %}x"
    globex = await make_tenant("globex")
    version = await publish("sql", chat_template=bomb.encode())
    other = await publish("sql", tenant=globex, chat_template=TEMPLATE.encode())
    hanging = asyncio.create_task(chat(client, f"sql@{version}", messages=[{"role": "user", "content": "bomb"}]))
    await asyncio.sleep(0.1)
    async with httpx2.AsyncClient(base_url=url, headers=globex.headers, timeout=10) as others:
        started = asyncio.get_running_loop().time()
        assert (await chat(others, f"sql@{other}")).status_code == 200
        assert asyncio.get_running_loop().time() - started < LIMITS.template_timeout_s
    assert not hanging.done()
    answer = await hanging
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "chat_template_failed"
    assert f"sql@{version}" in answer.json()["error"]["message"]
    assert services.templates.num_by_outcome["killed"] == 1


async def test_hanging_templates_of_tenant_delay_no_other_tenant(
    client: httpx2.AsyncClient, publish: Callable[..., Any], services: Any, make_tenant: Any, url: str
) -> None:
    bomb = "{% if messages[0].content == 'bomb' %}{{ ([[0] * 100] * 10000) | sum(start=[]) }}{% endif %}x"
    globex = await make_tenant("globex")
    version = await publish("sql", chat_template=bomb.encode())
    other = await publish("sql", tenant=globex, chat_template=TEMPLATE.encode())
    messages = [{"role": "user", "content": "bomb"}]
    async with (
        httpx2.AsyncClient(base_url=url, headers=globex.headers, timeout=10) as others,
        httpx2.AsyncClient(base_url=url, headers=client.headers, timeout=60) as hostile,
    ):
        assert (await chat(others, f"sql@{other}")).status_code == 200
        # each is killed, and the process started again
        hanging = [asyncio.create_task(chat(hostile, f"sql@{version}", messages=messages)) for _ in range(2)]
        while not all(task.done() for task in hanging):
            began = time.monotonic()
            assert (await chat(others, f"sql@{other}")).status_code == 200
            # it had a process at once: the one that hangs has its own for the whole time
            assert time.monotonic() - began < LIMITS.template_timeout_s
            await asyncio.sleep(0.05)
    assert services.templates.num_by_outcome["killed"] == 2
    # none of the other tenant's questions started a process
    assert services.templates.num_starts <= 4


async def test_damaged_template_bytes_quarantine_version(
    client: httpx2.AsyncClient, publish: Callable[..., Any], services: Any
) -> None:
    version = await publish("sql", chat_template=TEMPLATE.encode())
    for path in services.store.root.rglob("*"):
        if path.is_file() and path.read_bytes() == TEMPLATE.encode():
            path.chmod(0o600)
            path.write_bytes(b"x" * len(TEMPLATE))
    answer = await chat(client, f"sql@{version}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_corrupt")
    await services.registry.corruption.close()
    assert (await chat(client, f"sql@{version}")).json()["error"]["code"] == "adapter_quarantined"
    assert await publish("sql", chat_template=TEMPLATE.encode()) == version
    assert (await chat(client, f"sql@{version}")).status_code == 200


async def test_restarted_server_keeps_version_templates_and_defaults(
    client: httpx2.AsyncClient, publish: Callable[..., Any], services: Services, engine: Any, acme: Any
) -> None:
    version = await publish("sql", chat_template=TEMPLATE.encode(), generation_config=b'{"top_k": 3}')
    registry = Registry(services.registry._database, services.store, lambda: engine.base)
    again = Services(
        settings=services.settings,
        engine=services.engine,
        registry=registry,
        authenticator=services.authenticator,
        store=services.store,
        tokenizer=services.tokenizer,
        chat_format=services.chat_format,
    )
    adapter = await registry.resolve(acme.caller.tenant, parse_model(f"sql@{version}", BASE))
    try:
        chat_format = await again.version_chats.chat_format(acme.caller.tenant, adapter)
        assert chat_format.template.source == TEMPLATE
        assert (await again.version_chats.defaults(adapter)).top_k == 3
    finally:
        await again.templates.close()
