"""The Gateway API's endpoint picker reads a real server and scores it by its adapters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import endpoint_picker as epp
import httpx2
import pytest
from endpoint_picker import Endpoint
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client
from loraserve.demo.frames import fresh_prompts
from loraserve.demo.pack import adapter_dirs

MAX_NUM_SEQS = 2
"""So few that the third request waits."""
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root: Path = tmp_path_factory.mktemp("gateway")
    flags = ("--memory-budget", "16MiB", "--host-cache", "64MiB", "--max-num-seqs", str(MAX_NUM_SEQS))
    server = ServerProcess(root / "data", flags=(*flags, "--router-metrics"))
    server.start()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def key(server: ServerProcess) -> str:
    key = server.make_tenant("acme")
    with Client(server.url, api_key=key) as client:
        for name, path in list(adapter_dirs().items())[:4]:
            client.adapters.push(str(path), name=name)
    return key


@pytest.fixture
def picker(server: ServerProcess) -> Iterator[Callable[[], dict[str, list[epp.Metric]]]]:
    """A function that scrapes as the picker does: without a key."""
    with httpx2.Client(timeout=10) as client:
        yield lambda: epp.scrape(client, f"{server.url}/metrics/router")


class Streams:
    """Requests that are asked again until they are let go.

    One alone may end sooner than it is seen.
    """

    def __init__(self, server: ServerProcess, key: str) -> None:
        self._server, self._key = server, key
        self._pool = ThreadPoolExecutor(8)
        self._done = threading.Event()
        self._running: list[Any] = []

    def ask(self, model: str, *, num_tokens: int = 400) -> None:
        self._running.append(self._pool.submit(self._stream, model, num_tokens))

    def _stream(self, model: str, num_tokens: int) -> int:
        body = {"model": model, "prompt": fresh_prompts(1, 3)[0].prompt, "max_tokens": num_tokens}
        body |= {"min_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0.0}
        headers = {"authorization": f"Bearer {self._key}"}
        with httpx2.Client(base_url=self._server.url, timeout=PATIENCE_S, headers=headers) as client:
            while True:
                with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200, response.read()
                    for _ in response.iter_lines():
                        # a client that leaves ends its request
                        if self._done.is_set():
                            return response.status_code

    def end(self) -> None:
        self._done.set()
        assert [one.result(PATIENCE_S) for one in self._running] == [200] * len(self._running)
        self._pool.shutdown()


@pytest.fixture
def streams(server: ServerProcess, key: str) -> Iterator[Streams]:
    streams = Streams(server, key)
    yield streams
    streams.end()


def until(read: Callable[[], Endpoint], is_right: Callable[[Endpoint], bool]) -> Endpoint:
    deadline = time.monotonic() + PATIENCE_S
    while not is_right(found := read()):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_an_idle_server_has_room_for_any_adapter(picker: Callable[[], Any], key: str) -> None:
    # the pushed versions' certificates are requests too
    found = until(lambda: epp.read(picker()), lambda one: (one.waiting_queue_size, one.running_requests_size) == (0, 0))
    assert found.errors == ()
    assert found.max_active_models >= 1
    assert found.active_models == found.waiting_models == frozenset()
    assert found.cache_block_size > 0
    assert found.cache_num_blocks > 0
    assert epp.score_lora_affinity(found, "sql") == 0.8
    assert epp.score_kv_cache(found) == pytest.approx(1.0)


def test_picker_scores_running_and_waiting_adapters(
    picker: Callable[[], Any], streams: Streams, server: ServerProcess, key: str, subtests: Any
) -> None:
    first, second, third, fourth = list(adapter_dirs())[:4]
    idle = epp.read(picker())
    streams.ask(first)
    until(lambda: epp.read(picker()), lambda one: first in one.active_models)
    streams.ask(f"{second}@1")
    until(lambda: epp.read(picker()), lambda one: f"{second}@1" in one.active_models)
    # there is no place for it until one of the others ends
    streams.ask(third)
    expected = {first, f"{second}@1"}
    families: dict[str, list[epp.Metric]] = {}

    def read() -> Endpoint:
        families.clear()
        families.update(picker())
        return epp.read(families)

    def is_busy(one: Endpoint) -> bool:
        # numbers and names are two reports: between two requests they can differ
        counts = (one.running_requests_size, one.waiting_queue_size)
        names = (one.active_models, one.waiting_models)
        return counts == (2, 1) and names == (expected, {third}) and one.kv_cache_usage_percent > 0

    busy = until(read, is_busy)
    assert busy.errors == ()
    with subtests.test("one series of the adapters, whose value is the time"):
        (series,) = families[epp.LORA]
        assert series.value == pytest.approx(time.time(), abs=PATIENCE_S)
        assert [name for name, _ in series.labels] == ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    with subtests.test("the older picker reads the same"):
        assert epp.read_legacy(families) == busy
    with subtests.test("scores"):
        assert epp.score_lora_affinity(busy, first) == 1.0
        # the name that this client didn't use isn't the name that runs
        has_room = busy.max_active_models > 3
        assert epp.score_lora_affinity(busy, second) == (0.8 if has_room else 0.0)
        assert epp.score_lora_affinity(busy, third) == (0.8 if has_room else 0.6)
        assert epp.score_lora_affinity(busy, fourth) == (0.8 if has_room else 0.0)
        assert epp.score_queue([idle, busy]) == [1.0, 0.0]
        assert busy.kv_cache_usage_percent <= 1


def test_adapter_sum_counts_for_each_part(picker: Callable[[], Any], streams: Streams) -> None:
    first, second = list(adapter_dirs())[:2]
    streams.ask(f"{first}+0.5*{second}")
    found = until(lambda: epp.read(picker()), lambda one: one.active_models == {first, second})
    assert epp.score_lora_affinity(found, f"{first}+0.5*{second}") == 0.8


def test_ended_adapter_is_remembered_only_by_older_picker(picker: Callable[[], Any], streams: Streams) -> None:
    name = next(iter(adapter_dirs()))
    streams.ask(name, num_tokens=200)
    # a request of the test before may be leaving
    busy = until(lambda: epp.read_legacy(picker()), lambda one: one.active_models == {name})
    streams.end()
    idle = until(lambda: epp.read(picker(), busy), lambda one: not one.active_models | one.waiting_models)
    assert epp.score_lora_affinity(idle, name) == 0.8
    assert epp.read_legacy(picker(), busy).active_models == {name}


def test_complete_scrape_is_parsable_by_picker(server: ServerProcess, key: str) -> None:
    with httpx2.Client(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client:
        families = epp.parse(client.get(f"{server.url}/metrics").text)
    assert epp.read(families).errors == ()


def test_router_metrics_exclude_tenants_and_unread_metrics(
    picker: Callable[[], Any], streams: Streams, server: ServerProcess
) -> None:
    name = next(iter(adapter_dirs()))
    streams.ask(name)
    until(lambda: epp.read(picker()), lambda one: name in one.active_models)
    families = picker()
    assert set(families) == {epp.QUEUED, epp.RUNNING, epp.KV_USAGE, epp.LORA, epp.CACHE}
    assert "acme" not in str(families)
    with httpx2.Client() as client:
        assert client.get(f"{server.url}/metrics").status_code == 401
