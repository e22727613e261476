"""vLLM's pause and resume, as trainers call them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest
from trainer import Trainer
from whole_app import write_small

from loraserve.api.services import Services
from loraserve.tenancy.limits.pauses import Pauses


async def test_paused_requests_get_version_loaded_during_pause(acme: Trainer, globex: Trainer, folder: Path) -> None:
    write_small(folder / "step-2", 0.25)
    await acme.load()
    await globex.load()
    assert (await acme.post("/pause?mode=keep")).json() == {"status": "paused"}
    waiting = [asyncio.create_task(acme.version()) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    assert await globex.version() == "policy@1"
    assert (await acme.get("/is_paused")).json() == {"is_paused": True}
    assert (await globex.get("/is_paused")).json() == {"is_paused": False}
    assert (await acme.load(path="step-2", load_inplace=True)).status_code == 200
    assert (await acme.post("/resume")).json() == {"status": "resumed"}
    assert await asyncio.gather(*waiting) == ["policy@2", "policy@2"]
    assert (await acme.post("/resume")).status_code == 200


async def test_pause_ends_after_timeout(acme: Trainer, services: Services) -> None:
    await acme.load()
    services.pauses = Pauses(0.05)
    await acme.post("/pause?mode=keep")
    assert await asyncio.wait_for(acme.version(), 60) == "policy@1"


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause", "mode"),
        ("/pause?mode=abort", "mode"),
        ("/pause?mode=wait", "mode"),
        ("/pause?mode=keep&wait_for_inflight_requests=true", "mode"),
        ("/pause?mode=keep&odd=1", "odd"),
    ],
)
async def test_other_ways_to_pause_are_refused_by_name(acme: Trainer, path: str, param: str) -> None:
    answer = await acme.post(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await acme.get("/is_paused")).json() == {"is_paused": False}


async def test_pausing_takes_a_key(client: httpx2.AsyncClient) -> None:
    for path in ("/pause?mode=keep", "/resume"):
        assert (await client.post(path)).status_code == 401
