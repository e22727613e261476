"""Resumable uploads, where requests meet."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from adapters_store import LocalStore
from loraserve.errors import UploadDigestMismatch
from loraserve.registry.registry import Registry
from loraserve.registry.uploads import resumable
from loraserve.types import TenantId

DATA = bytes(range(200))


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


class Gate:
    """Where a completion waits after it has read its chunks."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 10)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Sequence[Gate]:
    """One for each completion, in their order."""
    gates, numbers = [Gate() for _ in range(3)], iter(range(3))
    assemble = resumable.assemble

    def wait(*args: Any) -> Any:
        gate = gates[next(numbers)]
        found = assemble(*args)
        gate.reached.set()
        gate.opened.wait(10)
        return found

    monkeypatch.setattr(resumable, "assemble", wait)
    return gates


async def test_late_completion_with_discarded_bytes_changes_no_upload(
    registry: Registry, store: LocalStore, acme: TenantId, gates: Sequence[Gate]
) -> None:
    uploads = registry.uploads.resumable
    upload, _ = await uploads.create(acme, hashlib.sha256(DATA).hexdigest(), 200, actor="test")

    async def send(data: bytes, start: int, end: int) -> resumable.UploadRecord:
        return await uploads.receive(acme, upload.id, start, end, 200, pieces(data[start:end]))

    wrong = bytes(200)
    await send(wrong, 0, 50)
    late = asyncio.create_task(send(wrong, 50, 200))
    await gates[0].until_reached()
    gates[1].opened.set()
    with pytest.raises(UploadDigestMismatch):
        await uploads.finish(acme, upload.id)
    await send(DATA, 0, 30)
    last = asyncio.create_task(send(DATA, 30, 200))
    await gates[2].until_reached()
    gates[0].opened.set()
    found = await late
    assert (found.received, found.is_complete) == (200, False)
    gates[2].opened.set()
    assert (await last).is_complete
    assert bytes(store.read(upload.sha256)) == DATA
