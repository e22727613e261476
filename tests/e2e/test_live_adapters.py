"""A trainer's loop against a real server: ephemeral adapters swap under running streams, and a kill
leaves nothing of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_process import ServerProcess, events

from loraserve.demo.frames import fresh_prompts
from loraserve.demo.pack import adapter_dirs

NAMES = ("sql", "french", "pirate")
"""Adapters of the pack, as the policies of a trainer's steps."""


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server that reads adapters below a folder; a parameter is more of its flags."""
    for name in adapter_dirs():
        shutil.copytree(adapter_dirs()[name], tmp_path / "runs" / name)
    server = ServerProcess(tmp_path / "data")
    server.flags += ("--lora-dir", str(tmp_path / "runs"), *getattr(request, "param", ()))
    server.start()
    yield server
    server.kill()


def load(server: ServerProcess, key: str, path: str, name: str = "policy", **query: Any) -> httpx2.Response:
    """Load the tensors of one of the pack's adapters as an ephemeral one."""
    folder = adapter_dirs()[path]
    files = {
        "config": (folder / "adapter_config.json").read_bytes(),
        "weights": (folder / "adapter_model.safetensors").read_bytes(),
    }
    return httpx2.post(
        f"{server.url}/load_lora_adapter_from_tensors",
        files=files,
        params={"lora_name": name, "ephemeral": "true", "load_inplace": "true", **query},
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )


def unload(server: ServerProcess, headers: dict[str, str]) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "policy"}, headers=headers)


def stream(
    server: ServerProcess, key: str, model: str, prompt: str, begun: threading.Event | None = None
) -> tuple[str, str]:
    """What answers, and its text."""
    body = {"model": model, "prompt": prompt, "max_tokens": 160, "temperature": 0, "stream": True, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    lines = []
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            lines.append(line)
            if begun is not None:
                begun.set()
    text = "".join(event["choices"][0]["text"] for event in events(lines))  # type: ignore[index]
    return answer.headers["x-loraserve-adapter"], text


def eventually(is_true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it didn't happen in time"
        time.sleep(0.05)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def num_rows(data: Path) -> dict[str, int]:
    with sqlite3.connect(f"file:{data / 'registry.db'}?mode=ro", uri=True) as database:
        tables = ("adapters", "adapter_versions", "aliases", "uploads", "doomed_blobs")
        return {table: database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


def test_policies_swap_under_streams_and_vanish_after_kill(server: ServerProcess) -> None:
    key = server.make_tenant("acme")
    headers = {"Authorization": f"Bearer {key}"}
    prompt = fresh_prompts(1, 77)[0].prompt
    # what each answers as an ordinary adapter, loaded by vLLM's route
    expected = {}
    for name in NAMES:
        body: dict[str, Any] = {"lora_name": name, "lora_path": name, "load_inplace": False}
        loaded = httpx2.post(f"{server.url}/v1/load_lora_adapter", json=body, headers=headers, timeout=60)
        assert loaded.status_code == 200, loaded.text
        expected[name] = stream(server, key, name, prompt)[1]
    assert len(set(expected.values())) == len(NAMES)
    before, stored = num_rows(server.data_dir), files(server.data_dir / "blobs")
    with ThreadPoolExecutor(len(NAMES)) as threads:
        running = []
        for name in NAMES:
            answer = load(server, key, name)
            assert answer.status_code == 200, answer.text
            begun = threading.Event()
            running.append(threads.submit(stream, server, key, "policy", prompt, begun))
            assert begun.wait(30)
    assert [one.result() for one in running] == [(f"policy@{i}", expected[name]) for i, name in enumerate(NAMES, 1)]
    assert num_rows(server.data_dir) == before

    # an engine that takes the place of a killed one continues on a version that was unloaded
    engine = server.engine_pid()
    assert engine is not None
    with ThreadPoolExecutor(1) as threads:
        begun = threading.Event()
        replayed = threads.submit(stream, server, key, "policy", prompt, begun)
        assert begun.wait(30)
        # a few more tokens, and the stream would be complete
        os.kill(engine, signal.SIGSTOP)
        assert unload(server, headers).status_code == 200
        os.kill(engine, signal.SIGKILL)
    assert replayed.result() == (f"policy@{len(NAMES)}", expected[NAMES[-1]])
    # on a busy machine the stream was complete already, and the new engine may not be ready
    eventually(lambda: server.engine_pid() not in (None, engine) and server.is_ready())

    # a client that leaves holds nothing either
    assert load(server, key, NAMES[0]).status_code == 200
    body = {"model": "policy", "prompt": prompt, "max_tokens": 100, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    assert unload(server, headers).status_code == 200

    def is_free() -> bool:
        metrics = server.metrics()
        rooms = (f'loraserve_shares_held{{room="ephemeral_{what}"}}' for what in ("versions", "bytes"))
        return all(metrics[room] == 0 for room in rooms)

    eventually(is_free)

    # killed while some are loaded
    for name in NAMES:
        assert load(server, key, name, f"e-{name}").status_code == 200
        assert stream(server, key, f"e-{name}", prompt) == (f"e-{name}@1", expected[name])
    server.kill()
    assert num_rows(server.data_dir) == before
    server.start()
    listed = httpx2.get(f"{server.url}/v1/models", headers=headers)
    models = {model["id"] for model in listed.json()["data"]}
    assert set(NAMES) <= models
    assert not any(model.startswith(("e-", "policy")) for model in models)
    assert is_free()
    gone = httpx2.post(
        f"{server.url}/v1/completions", json={"model": "e-sql", "prompt": "x"}, headers=headers, timeout=60
    )
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert files(server.data_dir / "blobs") == stored


@pytest.mark.parametrize("server", [("--ephemeral-loads",)], indirect=True)
def test_vllm_only_trainer_rolls_out_each_policy(server: ServerProcess, tmp_path: Path) -> None:
    """What TRL's AsyncGRPO sends: no key but the URL's, a folder and a name for each policy, its
    rollouts as token ids, and an unload of the policy before while rollouts on it still run.
    """
    url = server.url.replace("://", f"://x:{server.make_tenant('acme')}@")
    prompt = fresh_prompts(1, 77)[0].prompt
    assert httpx2.get(f"{url}/health").status_code == 200
    assert httpx2.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] > 0
    tokens = httpx2.post(f"{url}/tokenize", json={"model": "base", "prompt": prompt}).json()["tokens"]

    def roll_out(model: str, **more: Any) -> tuple[str, list[int]]:
        body = {"model": model, "prompt": tokens, "max_tokens": 120, "temperature": 1.0, "n": 1}
        body |= {"return_token_ids": True, "logprobs": 0, **more}
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        assert len(ids) == len(logprobs) > 0
        assert all(logprob <= 0 for logprob in logprobs)
        return answer.headers["x-loraserve-adapter"], ids

    # missing names are no error to it
    httpx2.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "policy-0"})
    greedy = []
    with ThreadPoolExecutor(8) as threads:
        running = []
        for step, name in enumerate(NAMES, 1):
            folder = str(tmp_path / "runs" / name)
            body = {"lora_name": f"policy-{step}", "lora_path": folder, "load_inplace": False}
            loaded = httpx2.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60)
            assert loaded.status_code == 200, loaded.text
            greedy.append(roll_out(f"policy-{step}", temperature=0))
            running.extend(threads.submit(roll_out, f"policy-{step}", ignore_eos=True) for _ in range(2))
            eventually(lambda: server.metrics()["vllm:num_requests_running"] > 0 or all(r.done() for r in running))
            httpx2.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": f"policy-{step - 1}"})
        answered = [one.result()[0] for one in running]
    assert answered == [f"policy-{step}@1" for step in (1, 1, 2, 2, 3, 3)]
    assert [adapter for adapter, _ in greedy] == ["policy-1@1", "policy-2@1", "policy-3@1"]
    assert len({tuple(ids) for _, ids in greedy}) == len(NAMES)
    listed = httpx2.get(f"{url}/v1/models").json()["data"]
    assert [model["id"] for model in listed if model["parent"] is not None] == ["policy-3"]
    assert num_rows(server.data_dir)["adapters"] == 0
