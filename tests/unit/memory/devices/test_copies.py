"""Copies to a GPU wait for the step that was launched last,
and an event of their own says when they have landed.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from loraserve.memory.devices.copies import MAX_IDLE_PINNED_BYTES, CudaCopies, DirectCopies


class Recorder:
    """Stands for torch.cuda's streams and events; `calls` is what the device was told, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.landed: set[str] = set()
        self.num_events = 0
        recorder = self

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_event(self, event: Event) -> None:
                recorder.calls.append(f"{self.name} waits for {event.name}")

        class Event:
            def __init__(self) -> None:
                self.name = f"event{recorder.num_events}"
                recorder.num_events += 1

            def record(self, stream: Stream) -> None:
                recorder.calls.append(f"{self.name} behind {stream.name}")

            def query(self) -> bool:
                return self.name in recorder.landed

        @contextmanager
        def current(stream: Stream) -> Any:
            recorder.calls.append(f"into {stream.name}")
            yield
            recorder.calls.append("out")

        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies"))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("steps"))
        monkeypatch.setattr(torch.cuda, "stream", current)


def test_copy_waits_for_last_step_and_records_event(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    copies = CudaCopies(torch.device("cuda"))
    copies.step_launched()
    result, has_landed = copies.start(lambda: recorder.calls.append("copy") or 7)
    assert result == 7
    assert recorder.calls == [
        # what was cleared before is waited for too
        "event0 behind steps",
        "event0 behind steps",
        "copies waits for event0",
        "into copies",
        "copy",
        "out",
        "event1 behind copies",
    ]
    assert not has_landed()
    recorder.landed.add("event1")
    assert has_landed()


def test_pinned_memory_counts_allocator_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder(monkeypatch)
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in (1, 4096, 4097)]
    assert CudaCopies(torch.device("cuda")).host_bytes(tensors) == 1 + 4096 + 8192
    assert DirectCopies().host_bytes(tensors) == 1 + 4096 + 4097


@pytest.mark.parametrize("idle_bytes", [MAX_IDLE_PINNED_BYTES, MAX_IDLE_PINNED_BYTES + 1])
def test_idle_pinned_memory_is_returned(monkeypatch: pytest.MonkeyPatch, idle_bytes: int) -> None:
    Recorder(monkeypatch)
    given_back: list[bool] = []
    stats = {"allocated_bytes.current": idle_bytes + 5, "active_bytes.current": 5}
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: given_back.append(True), raising=False)
    CudaCopies(torch.device("cuda")).trim()
    assert bool(given_back) == (idle_bytes > MAX_IDLE_PINNED_BYTES)
