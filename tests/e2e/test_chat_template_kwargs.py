"""Chat templates and their variables, from flags, versions and requests to the prompt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx2
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs, base_dir

TEMPLATE = "<|user|>{{ messages[0].content }} {{ mood | default('') }} {{ style | default('') }}<|assistant|>"


def test_request_version_and_server_set_variables(tmp_path: Path) -> None:
    model = shutil.copytree(base_dir(), tmp_path / "base")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    flags = ("--memory-budget", "64MiB", "--host-cache", "64MiB")
    variables = {"mood": "calm", "style": "short"}
    server = ServerProcess(
        tmp_path / "data", model=model, flags=(*flags, "--default-chat-template-kwargs", json.dumps(variables))
    )
    server.start()
    try:
        key = server.make_tenant("acme")
        http = httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"})
        with Client(server.url, api_key=key) as client, http:
            name, folder = next(iter(adapter_dirs().items()))
            shown = client.adapters.push(folder, name=name, chat_template_kwargs={"mood": "glad"})
            assert shown.chat_template_kwargs == {"mood": "glad"}
            assert client.adapters.push(folder, name=name, chat_template_kwargs={"mood": "glad"}).is_unchanged
            assert client.base().chat_template_kwargs == variables
            base = client.base().id
            server.kill()
            server.start()
            for asked, request, prompt in (
                (base, {}, "hi calm short"),
                (name, {}, "hi glad short"),
                (name, {"mood": "sad"}, "hi sad short"),
            ):
                messages = [{"role": "user", "content": "hi"}]
                body = {"model": asked, "messages": messages, "chat_template_kwargs": request}
                plain = {"prompt": f"<|user|>{prompt}<|assistant|>", "add_special_tokens": False}
                answer = http.post("/tokenize", json=body).json()
                assert answer["tokens"] == http.post("/tokenize", json=plain).json()["tokens"]
                chat = client.chat.completions.create(
                    model=asked, messages=messages, max_tokens=1, chat_template_kwargs=request
                )
                assert chat.usage is not None
                assert chat.usage.prompt_tokens == answer["count"]
    finally:
        assert server.stop() == 0


def test_file_is_template_of_base(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    flags = ("--memory-budget", "64MiB", "--host-cache", "64MiB", "--chat-template", str(file))
    server = ServerProcess(tmp_path / "data", flags=flags)
    refused = server.run("serve")
    assert refused.returncode == 2
    assert f"--chat-template {file} can't be read" in refused.stderr
    file.write_text(TEMPLATE)
    server.start()
    try:
        key = server.make_tenant("acme")
        http = httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"})
        with Client(server.url, api_key=key) as client, http:
            assert client.base().chat_template_file == "own.jinja"
            plain = {"prompt": "<|user|>hi  <|assistant|>", "add_special_tokens": False}
            tokens = http.post("/tokenize", json=plain).json()["tokens"]
            answer = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
            assert answer.json()["tokens"] == tokens
    finally:
        assert server.stop() == 0
