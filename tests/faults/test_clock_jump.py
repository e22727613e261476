"""The time of day jumps by a day, forwards and back, under a running server:
nothing times out, nothing is forgotten.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx2
import jumping_clock
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

DAY_S = 86_400
FLAGS = ("--memory-budget", "32MiB", "--host-cache", "32MiB", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")


def jump(clock: Path, ahead_s: float) -> None:
    """In one piece: whoever reads the file sees the one time or the other."""
    new = clock.with_suffix(".new")
    new.write_text(str(ahead_s))
    os.replace(new, clock)


def test_running_and_waiting_requests_survive_clock_jump(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    jump(clock, 0)
    path = os.pathsep.join([*jumping_clock.__path__, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"JUMPING_CLOCK": str(clock), "PYTHONPATH": path}
    server = ServerProcess(tmp_path / "data", flags=FLAGS, variables=variables, is_forked=False)
    server.start()
    try:
        key = server.make_tenant("acme")
        with Client(server.url, api_key=key) as client:
            for style in ("sql", "french"):
                client.adapters.push(str(adapter_dirs()[style]), name=style)

        def complete(model: str) -> dict[str, Any]:
            # a timeout that is far off, and isn't a day
            body = {"model": model, "prompt": "list the tickets", "max_tokens": 64, "temperature": 0, "timeout": 600}
            headers = {"authorization": f"Bearer {key}"}
            url = f"{server.url}/v1/completions"
            answer = httpx2.post(url, json=body | {"ignore_eos": True}, headers=headers, timeout=60)
            found: dict[str, Any] = answer.raise_for_status().json()
            return found

        models = ["sql", "french"] * 4
        before = [complete(model)["choices"] for model in models[:2]] * 4
        for ahead_s in (DAY_S, -DAY_S):
            # two run at a time, the others wait
            with ThreadPoolExecutor(len(models)) as pool:
                answers = [pool.submit(complete, model) for model in models]
                wait(answers, return_when=FIRST_COMPLETED)
                jump(clock, ahead_s)
                assert [answer.result()["choices"] for answer in answers] == before
            # it did jump
            assert abs(complete("sql")["created"] - time.time() - ahead_s) < DAY_S / 2
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            assert httpx2.get(f"{server.url}/readyz").status_code == 200
            residency = httpx2.get(f"{server.url}/api/v1/residency?resident=true", headers=headers).json()["data"]
            assert {one["name"]: one["tier"] for one in residency} == {"sql": "device", "french": "device"}
            assert all(0 <= one["last_used_s"] < DAY_S / 2 for one in residency)
        assert server.metrics()["loraserve_engine_restarts_total"] == 0
        assert server.stop() == 0
    finally:
        server.kill()
