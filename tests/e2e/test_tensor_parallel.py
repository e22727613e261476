"""A base that is cut into parts, over HTTP: any mix of requests, each answered as by one process,
also when one of the processes dies.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

from loraserve.demo.pack import adapter_dirs

from .conftest import push_all
from .test_many_streams import Work, base_id, connect, make_work, settle, solo, stream

FLAGS = ("--memory-budget", "32MiB", "--host-cache", "64MiB", "--max-num-seqs", "16", "--max-num-batched-tokens", "96")


def start(data: Path, *flags: str) -> tuple[ServerProcess, str]:
    server = ServerProcess(data, flags=(*FLAGS, *flags))
    server.start()
    key = server.make_tenant("acme")
    push_all(server.url, key)
    return server, key


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, str]]:
    """A server on the bundled base, of which two processes have a half each."""
    server, key = start(tmp_path_factory.mktemp("cut") / "data", "--tensor-parallel", "2")
    yield server, key
    assert server.stop() == 0


def followers(engine_pid: int) -> list[int]:
    """Return the pids of an engine's other ranks."""
    children = Path(f"/proc/{engine_pid}/task").glob("*/children")
    pids = {int(pid) for path in children for pid in path.read_text().split()}
    return sorted(pid for pid in pids if b"parallel.follower" in Path(f"/proc/{pid}/cmdline").read_bytes())


async def answers(server: ServerProcess, key: str, works: list[Work]) -> list[str]:
    async with connect(server, key) as client:
        base = await base_id(client)
        await asyncio.gather(*(stream(client, work, base) for work in works))
        await settle(server)
    assert [work.error for work in works] == [None] * len(works)
    return [work.text for work in works]


@pytest.mark.slow
async def test_texts_match_single_process(cut: tuple[ServerProcess, str], tmp_path: Path) -> None:
    await says_what_one_process_says(*cut, tmp_path / "data")
    assert len(adapter_dirs()) == 7


@pytest.mark.slow
async def test_killing_a_rank_changes_no_streams_text(cut: tuple[ServerProcess, str]) -> None:
    await outlive_a_kill(*cut)


async def outlive_a_kill(server: ServerProcess, key: str) -> None:
    """Kill the engine's other process in the middle of streams; check that no text changes."""
    works = make_work(16, seed=6, ignore_eos=True, max_tokens=64)
    async with connect(server, key) as client:
        base = await base_id(client)
        expected = await solo(client, works, base)
        engine_pid = server.engine_pid()
        assert engine_pid is not None
        (rank,) = followers(engine_pid)
        num_events = 0

        def kill_once() -> None:
            nonlocal num_events
            num_events += 1
            if num_events == 150:
                os.kill(rank, signal.SIGKILL)

        await asyncio.gather(*(stream(client, work, base, kill_once) for work in works))
        assert num_events > 150
        assert [(work.error, work.text) for work in works] == [(None, text) for text in expected]
        restarted = server.engine_pid()
        assert restarted not in (None, engine_pid)
        assert len(followers(restarted)) == 1  # type: ignore[arg-type]
        await settle(server)


async def says_what_one_process_says(server: ServerProcess, key: str, data: Path) -> None:
    """Check a server's texts against those of another one, whose base isn't cut."""
    whole, whole_key = start(data)
    try:
        expected = await answers(whole, whole_key, make_work(24, seed=5))
    finally:
        assert whole.stop() == 0
    assert await answers(server, key, make_work(24, seed=5)) == expected
    assert server.metrics()["loraserve_invariant_violations_total"] == 0


def test_tensor_parallel_size_not_dividing_base_is_refused(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", flags=(*FLAGS, "--tensor-parallel", "3"))
    with pytest.raises(AssertionError):
        server.start()
    assert "--tensor-parallel 3" in server.tail()
    assert "can be served by" in server.tail()
