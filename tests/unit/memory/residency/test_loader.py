"""Workers load adapters, a bounded number at a time; what they made, or why they couldn't,
is taken once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loraserve.errors import AdapterTooLarge, AdapterUnavailable
from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.memory.residency.loader import LoaderPool, LoadResult
from loraserve.types import AdapterRef, TenantId

MakeLoaders = Callable[..., LoaderPool]
TENANTS = (TenantId("a"), TenantId("b"))


@pytest.fixture
def make_loaders() -> Iterator[MakeLoaders]:
    made: list[LoaderPool] = []

    def run(num_threads: int, load: Callable[[AdapterRef], LoadedAdapter]) -> LoaderPool:
        made.append(LoaderPool(num_threads, load))
        return made[-1]

    yield run
    for loaders in made:
        loaders.close()
        assert loaders.check() == []


def take(loaders: LoaderPool, num: int) -> list[LoadResult]:
    """So many results, once there are as many."""
    deadline, results = time.monotonic() + 10, []
    while len(results) < num:
        assert time.monotonic() < deadline, "a load hangs"
        results += loaders.take()
    return results


def test_load_is_in_flight_until_result_is_taken(make: Any, make_loaders: MakeLoaders) -> None:
    ref, loaded = make.ref("a"), make.loaded()
    gate = threading.Event()

    def load(_: AdapterRef) -> LoadedAdapter:
        assert gate.wait(10)
        return loaded

    loaders = make_loaders(2, load)
    loaders.start(ref, TENANTS)
    assert loaders.take() == []
    assert ref.digest in loaders
    gate.set()
    (result,) = take(loaders, 1)
    assert (result.ref, result.outcome) == (ref, loaded)
    assert result.elapsed_s > 0
    assert ref.digest not in loaders
    assert loaders.take() == []


def test_busy_loaders_count_loads_for_all_tenants(make: Any, make_loaders: MakeLoaders) -> None:
    gate = threading.Event()

    def load(_: AdapterRef) -> LoadedAdapter:
        assert gate.wait(10)
        return make.loaded()

    loaders = make_loaders(2, load)
    loaders.start(make.ref("a"), TENANTS)
    assert loaders.has_free
    loaders.start(make.ref("b"), TENANTS[:1])
    assert not loaders.has_free
    assert loaders.num_by_tenant() == {"a": 2, "b": 1}
    gate.set()
    take(loaders, 2)
    assert loaders.has_free
    assert not loaders.num_by_tenant()


@pytest.mark.parametrize(
    ("raised", "found"),
    [(AdapterTooLarge("as told"), AdapterTooLarge), (ZeroDivisionError("a secret"), AdapterUnavailable)],
)
def test_raising_load_reports_reason_and_worker_continues(
    make: Any, make_loaders: MakeLoaders, raised: Exception, found: type[Exception]
) -> None:
    bad, good = make.ref("bad"), make.ref("good")

    def load(ref: AdapterRef) -> LoadedAdapter:
        if ref == bad:
            raise raised
        return make.loaded()

    loaders = make_loaders(1, load)
    loaders.start(bad, TENANTS)
    (result,) = take(loaders, 1)
    assert type(result.outcome) is found
    assert "secret" not in str(result.outcome)
    loaders.start(good, TENANTS)
    (result,) = take(loaders, 1)
    assert isinstance(result.outcome, LoadedAdapter)


def test_result_waiter_is_notified_on_completion(make: Any) -> None:
    told = threading.Event()
    loaders = LoaderPool(1, lambda _: make.loaded(), on_done=told.set)
    loaders.start(make.ref("a"), TENANTS)
    assert told.wait(10)
    assert len(loaders.take()) == 1
    loaders.close()


def test_more_loads_than_threads_are_found_by_check(make: Any) -> None:
    loaders = LoaderPool(1, lambda _: make.loaded())
    loaders.start(make.ref("a"), TENANTS)
    assert loaders.check() == []
    loaders.start(make.ref("b"), TENANTS)
    assert loaders.check() == ["loaders: 2 loads are in flight on 1 threads"]
    loaders.close()
