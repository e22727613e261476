"""What was acknowledged is there after a restart, and after a kill."""

from __future__ import annotations

import os
import signal

import httpx2
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.frames import fresh_prompts
from loraserve.demo.pack import adapter_dirs


def answer(server: ServerProcess, key: str, model: str, prompt: str) -> str:
    with Client(server.url, api_key=key) as client:
        completion = client.completions.create(model=model, prompt=prompt, max_tokens=48, temperature=0)
        return completion.choices[0].text


def test_acknowledged_pushes_are_served_after_kill(tmp_path):
    server = ServerProcess(tmp_path / "data")
    server.start()
    try:
        key = server.make_tenant("acme")
        with Client(server.url, api_key=key) as client:
            pushed = [client.adapters.push(str(adapter_dirs()[name]), name=name) for name in ("sql", "french")]
        frame = fresh_prompts(1, 77)[0]
        before = {name: answer(server, key, name, frame.prompt) for name in ("sql", "french")}
        server.kill()
        server.start()
        assert {name: answer(server, key, name, frame.prompt) for name in ("sql", "french")} == before
        with Client(server.url, api_key=key) as client:
            for version in pushed:
                again = client.adapters.push(str(adapter_dirs()[version.name]), name=version.name)
                assert (again.version, again.digest) == (version.version, version.digest)
        assert server.stop() == 0
        server.start()
        assert httpx2.get(f"{server.url}/livez").status_code == 200
        assert server.stop() == 0
    finally:
        server.kill()


def test_hangup_disturbs_no_answer_and_is_logged(tmp_path):
    server = ServerProcess(tmp_path / "data")
    server.start()
    try:
        key = server.make_tenant("acme")
        with Client(server.url, api_key=key) as client:
            client.adapters.push(str(adapter_dirs()["sql"]), name="sql")
        engine = server.engine_pid()
        for pid in (server.process.pid, engine):
            os.kill(pid, signal.SIGHUP)
        assert answer(server, key, "sql", fresh_prompts(1, 77)[0].prompt)
        assert server.engine_pid() == engine
        assert "the settings were read again; changed: none" in server.log.read_text()
        assert server.stop() == 0
    finally:
        server.kill()
