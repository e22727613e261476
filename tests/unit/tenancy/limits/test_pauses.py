from __future__ import annotations

import asyncio

from loraserve.tenancy.limits.pauses import Pauses


async def test_paused_tenant_waits_until_resumed_alone() -> None:
    pauses = Pauses(60.0)
    pauses.begin("acme")
    await pauses.wait("globex")
    waiting = [asyncio.create_task(pauses.wait("acme")) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert (pauses.is_paused("acme"), pauses.num_paused) == (True, 1)
    assert not any(task.done() for task in waiting)
    pauses.end("acme")
    await asyncio.gather(*waiting)
    assert (pauses.is_paused("acme"), pauses.num_paused) == (False, 0)
    pauses.end("acme")


async def test_unended_pause_expires_in_time() -> None:
    pauses = Pauses(0.05)
    pauses.begin("acme")
    await asyncio.wait_for(pauses.wait("acme"), 60)
    assert not pauses.is_paused("acme")


async def test_a_pause_begun_again_lasts_longer() -> None:
    now = [0.0]
    pauses = Pauses(10.0, clock=lambda: now[0])
    pauses.begin("acme")
    now[0] = 9.0
    pauses.begin("acme")
    now[0] = 18.0
    assert pauses.is_paused("acme")
    now[0] = 19.5
    assert not pauses.is_paused("acme")
