"""One tenant's slow or broken work is waited for by itself alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from loraserve.tenancy.limits.processes import TenantProcesses
from loraserve.text.workers.process import WorkerStartFailed


class FakeProcess:
    """A process that starts when its gate is open, and ends when a test says so."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.is_running = False
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.fails = False

    async def start(self, timeout_s: float) -> None:
        if self.is_running:
            return
        await self.may_start.wait()
        if self.fails:
            raise WorkerStartFailed
        self.num_starts += 1
        self.is_running = True

    async def close(self) -> None:
        self.is_running = False


class Bench:
    """Processes, and questions that end when a test says so."""

    def __init__(self) -> None:
        self.made: list[FakeProcess] = []
        self.processes = TenantProcesses(self._make)  # type: ignore[arg-type]
        self.asked: list[str] = []

    def _make(self) -> FakeProcess:
        self.made.append(FakeProcess())
        return self.made[-1]

    def ask(self, tenant: str, *, ends_process: bool = False) -> Question:
        return Question(self, tenant, ends_process)


class Question:
    def __init__(self, bench: Bench, tenant: str, ends_process: bool) -> None:
        self.may_end = asyncio.Event()
        self.began = asyncio.Event()
        self.started_itself = False

        async def run() -> None:
            async with bench.processes.take(tenant) as process:
                bench.asked.append(tenant)
                self.started_itself = not process.is_running
                await process.start(1.0)
                self.began.set()
                await self.may_end.wait()
                if ends_process:
                    await process.close()

        self.task = asyncio.create_task(run())

    async def finish(self) -> None:
        self.may_end.set()
        await self.task


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.processes.close()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_slow_tenant_delays_no_other_tenants_question(bench: Bench) -> None:
    slow = [bench.ask("slow") for _ in range(10)]
    await settle()
    for tenant in ("b", "c", "b", "d"):
        quick = bench.ask(tenant)
        async with asyncio.timeout(1):
            await quick.began.wait()
        await quick.finish()
    assert bench.asked == ["slow", "b", "c", "b", "d"]
    assert sum(one.began.is_set() for one in slow) == 1
    for one in slow:
        await one.finish()


async def test_process_ending_tenant_waits_alone_for_restart(bench: Bench) -> None:
    first = bench.ask("breaks", ends_process=True)
    await settle()
    bench.made[0].may_start.clear()
    await first.finish()
    again = bench.ask("breaks")
    for tenant in ("b", "c"):
        quick = bench.ask(tenant)
        async with asyncio.timeout(1):
            await quick.began.wait()
        await quick.finish()
    assert bench.asked == ["breaks", "b", "c"]
    assert not again.began.is_set()
    bench.made[0].may_start.set()
    async with asyncio.timeout(1):
        await again.began.wait()
    # it was started again in that tenant's turn, not in a question
    assert not again.started_itself
    assert bench.made[0].num_starts == 2
    await again.finish()


async def test_process_restarts_in_tenants_share_after_client_leaves(bench: Bench) -> None:
    first = bench.ask("breaks", ends_process=True)
    await settle()
    bench.made[0].is_running = False
    first.task.cancel()
    await asyncio.gather(first.task, return_exceptions=True)
    quick = bench.ask("b")
    await settle()
    assert bench.made[0].num_starts == 2
    await quick.finish()


async def test_question_waits_once_per_slow_tenant(bench: Bench) -> None:
    slow = {tenant: [bench.ask(tenant) for _ in range(5)] for tenant in ("s1", "s2", "s3", "s4")}
    await settle()
    quick = bench.ask("b")
    await settle()
    num_ended = 0
    while not quick.began.is_set():
        running = next(one for many in slow.values() for one in many if one.began.is_set() and not one.task.done())
        await running.finish()
        await settle()
        num_ended += 1
    # the two that ran, and one of each tenant
    assert num_ended <= 2 + 4
    assert all(bench.asked.count(tenant) <= 2 for tenant in slow)
    await quick.finish()
    for many in slow.values():
        for one in many:
            one.may_end.set()
    await asyncio.gather(*(one.task for many in slow.values() for one in many))


async def test_failed_restart_returns_process_slot(bench: Bench) -> None:
    first = bench.ask("a", ends_process=True)
    await settle()
    bench.made[0].fails = True
    await first.finish()
    await settle()
    bench.made[0].fails = False
    again = bench.ask("a")
    async with asyncio.timeout(1):
        await again.began.wait()
    await again.finish()
    assert len(bench.made) == 1
