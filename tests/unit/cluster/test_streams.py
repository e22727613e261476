"""Requests on replicas whose outputs come by links, and what becomes of them if one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from loraserve.cluster.routing.members import Members
from loraserve.cluster.routing.routed_request import RoutedRequest
from loraserve.engine_client import messages as m
from loraserve.engine_client.live_request import LiveRequest
from loraserve.errors import EngineUnavailable
from loraserve.types import AdapterRef, FinishReason, RequestId, SamplingParams, TenantId, TokenOutput

if TYPE_CHECKING:
    from loraserve.cluster.relay.streams import ReplicaStreams

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Pydantic, when Ray is imported
ONE, TWO = "one", "two"
WITHIN_S = 10.0


@dataclass(eq=False)
class Response:
    """Serve's response, which a cancellation doesn't end, as Serve sometimes has it."""

    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_cancelled: bool = False

    def __await__(self) -> Any:
        return self.done.__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass(eq=False)
class Calls:
    """Takes `ReplicaCalls`' place: the test says what replicas do.

    Attributes:
        added: requests that were sent, in their order.
        links: what each replica's link brings; an exception breaks it, None ends it.
    """

    added: list[m.AddRequest] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    links: dict[str, asyncio.Queue[list[TokenOutput] | Exception | None]] = field(default_factory=dict)
    num_links: int = 0

    def compute(self, add: m.AddRequest, placement: RoutedRequest) -> Response:
        self.added.append(add)
        self.responses.append(Response())
        return self.responses[-1]

    async def batches(self, replica_id: str) -> AsyncGenerator[list[TokenOutput], None]:
        self.num_links += 1
        yield []
        while True:
            found = await self.links.setdefault(replica_id, asyncio.Queue()).get()
            if found is None:
                return
            if isinstance(found, Exception):
                raise found
            yield found

    def home(self, ref: AdapterRef | None) -> str | None:
        return None


@dataclass(eq=False)
class Cluster:
    calls: Calls
    table: Members
    streams: ReplicaStreams
    began: list[LiveRequest]

    async def accept(self, replica_id: str, num: int = 1) -> RequestId:
        """Have a replica accept the request that was sent as the `num`-th; return its id there."""
        async with asyncio.timeout(WITHIN_S):
            while len(self.calls.added) < num:
                await asyncio.sleep(0.001)
        request_id = self.calls.added[num - 1].request_id
        self.table.note_routed(RoutedRequest(request_id=request_id, tenant=TenantId("t")), replica_id)
        return request_id

    async def send(self, replica_id: str, found: list[TokenOutput] | Exception | None) -> None:
        """Have a link bring something, and let it arrive."""
        await self.calls.links.setdefault(replica_id, asyncio.Queue()).put(found)
        await asyncio.sleep(0.01)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    pytest.importorskip("ray", reason="the extra ray")
    from loraserve.cluster.relay.streams import ReplicaStreams

    calls, table, began = Calls(), Members(), list[LiveRequest]()
    table.update([(ONE, {}), (TWO, {})])
    streams = ReplicaStreams(calls, table, began.append)  # type: ignore[arg-type]
    table.on_routed = streams.note_routed
    yield Cluster(calls, table, streams, began)
    await streams.close()


@pytest.fixture
async def live(cluster: Cluster) -> AsyncIterator[LiveRequest]:
    """A request that the streams compute."""
    live = LiveRequest(
        m.GenerateRequest(
            request_id=RequestId("r"),
            tenant=TenantId("t"),
            adapter=None,
            prompt_token_ids=(5,),
            params=SamplingParams(max_tokens=3),
        )
    )
    computing = asyncio.create_task(cluster.streams.compute(live))
    yield live
    computing.cancel()
    await asyncio.gather(computing, return_exceptions=True)


def output(request_id: RequestId, *token_ids: int, finish_reason: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(request_id=request_id, token_ids=token_ids, finish_reason=finish_reason)


async def test_outputs_come_by_the_link(cluster: Cluster, live: LiveRequest) -> None:
    there = await cluster.accept(ONE)
    await cluster.send(ONE, [output(there, 1), output(RequestId("another"), 9)])
    await cluster.send(ONE, [output(there, 2, finish_reason=FinishReason.LENGTH)])
    assert live.output_token_ids == [1, 2]
    assert live.is_finished
    assert cluster.began == [live]
    assert cluster.streams.num_replays == {"lost": 0, "moved": 0}
    assert not cluster.calls.responses[0].is_cancelled


async def test_request_moves_at_once_from_any_replica(cluster: Cluster, live: LiveRequest) -> None:
    there = await cluster.accept(ONE)
    await cluster.send(ONE, [output(there, 1)])
    cluster.streams.move(ONE)
    elsewhere = await cluster.accept(TWO, 2)
    assert elsewhere != there
    assert cluster.calls.added[1].output_token_ids == (1,)
    assert cluster.calls.responses[0].is_cancelled
    # the replica that it left goes on with it
    await cluster.send(ONE, [output(there, 2)])
    await cluster.send(TWO, [output(elsewhere, 2, finish_reason=FinishReason.LENGTH)])
    assert live.output_token_ids == [1, 2]
    assert cluster.streams.num_replays == {"lost": 0, "moved": 1}


async def test_request_continues_elsewhere_when_link_breaks(cluster: Cluster, live: LiveRequest) -> None:
    from ray.exceptions import RayActorError

    there = await cluster.accept(ONE)
    await cluster.send(ONE, [output(there, 1)])
    await cluster.send(ONE, RayActorError())
    await cluster.accept(TWO, 2)
    assert cluster.calls.added[1].output_token_ids == (1,)
    assert cluster.streams.num_replays == {"lost": 1, "moved": 0}


async def test_request_continues_elsewhere_when_replica_dies(cluster: Cluster, live: LiveRequest) -> None:
    from ray.exceptions import RayActorError

    await cluster.accept(ONE)
    cluster.calls.responses[0].done.set_exception(RayActorError())
    await cluster.accept(TWO, 2)
    assert cluster.streams.num_replays == {"lost": 1, "moved": 0}


async def test_last_output_may_follow_end_of_call(cluster: Cluster, live: LiveRequest) -> None:
    there = await cluster.accept(ONE)
    cluster.calls.responses[0].done.set_result(None)
    await asyncio.sleep(0.01)
    await cluster.send(ONE, [output(there, 1, finish_reason=FinishReason.LENGTH)])
    assert live.is_finished
    assert len(cluster.calls.added) == 1


async def test_request_continues_elsewhere_when_last_output_is_missing(
    cluster: Cluster, live: LiveRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loraserve.cluster.relay import streams

    monkeypatch.setattr(streams, "_LAST_S", 0.02)
    await cluster.accept(ONE)
    cluster.calls.responses[0].done.set_result(None)
    await cluster.accept(TWO, 2)
    assert cluster.streams.num_replays == {"lost": 1, "moved": 0}


async def test_ended_link_is_reopened(cluster: Cluster, live: LiveRequest) -> None:
    there = await cluster.accept(ONE)
    await cluster.send(ONE, None)
    await cluster.send(ONE, [output(there, 1, finish_reason=FinishReason.LENGTH)])
    assert cluster.calls.num_links == 2
    assert live.output_token_ids == [1]
    await cluster.send(ONE, None)
    assert cluster.calls.num_links == 2


async def test_no_link_opens_to_departed_replica(cluster: Cluster, live: LiveRequest) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not cluster.calls.added:
            await asyncio.sleep(0.001)
    cluster.table.update([(TWO, {})])
    await cluster.accept(ONE)
    await cluster.accept(TWO, 2)
    assert cluster.streams.num_replays == {"lost": 1, "moved": 0}
    assert set(cluster.calls.links) <= {TWO}


async def test_replica_without_engine_forwards_request(cluster: Cluster, live: LiveRequest) -> None:
    there = await cluster.accept(ONE)
    failed = TokenOutput(
        request_id=there,
        finish_reason=FinishReason.ERROR,
        error_code=EngineUnavailable.code,
        error_message="no engine",
    )
    await cluster.send(ONE, [failed])
    await cluster.accept(TWO, 2)
    assert not live.is_finished
    assert live.error is None
