"""Verifications as the server asks for them: certificates, refusals for good,
and what is worth another try.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from loraserve.engine_client import client as client_module
from loraserve.errors import AdapterCorrupt, AdapterRejected, EngineDied, EngineUnavailable
from loraserve.limits import LIMITS

from .conftest import World, make_ref
from .test_client import collect, make, prompt, running, until
from .verification.test_verification import edited, of_another_base


async def test_certificates_and_refusals_come_beside_streams(world: World) -> None:
    async with running(world, heartbeat_s=0.05) as client:
        stream = asyncio.create_task(collect(client, make(world, prompt(3), "mixed", max_tokens=100)))
        found = await asyncio.gather(*(client.verify(world.refs[name]) for name in ("r8", "r1", "rs")))
        assert [certificate.verdict for certificate in found] == ["passed"] * 3
        assert all(certificate.seconds > 0 for certificate in found)
        assert (await stream)[1] == world.expected("mixed", prompt(3), 100)
        with pytest.raises(AdapterCorrupt):
            await client.verify(make_ref("gone"))
        with pytest.raises(AdapterRejected, match="hidden size 63"):
            await client.verify(edited(world, "r1", of_another_base))


async def test_abandoned_verification_leaves_no_state(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(world, heartbeat_s=0.05) as client:
        task = asyncio.create_task(client.verify(world.refs["r8"]))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        monkeypatch.setattr(client_module, "LIMITS", replace(LIMITS, verification_timeout_s=0.001))
        with pytest.raises(EngineUnavailable, match="within"):
            await client.verify(world.refs["rs"])
        await asyncio.sleep(0.1)
        await until(lambda: client.stats.num_running == client.stats.num_waiting == client.stats.num_pins == 0)
        monkeypatch.undo()
        assert (await client.verify(world.refs["rs"])).verdict == "passed"


async def test_engine_death_in_verification_is_reported(world: World) -> None:
    async with running(world) as client:
        task = asyncio.create_task(client.verify(world.refs["r8"]))
        await asyncio.sleep(0.005)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await task
        # nothing is known against who asks while it is away
        with pytest.raises(EngineUnavailable) as caught:
            await client.verify(world.refs["r8"])
        assert not isinstance(caught.value, EngineDied)
        await until(lambda: client.is_ready)
        assert (await client.verify(world.refs["r8"])).verdict == "passed"
