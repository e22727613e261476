"""A cluster on Ray Serve: adapters are found, and streams outlive replicas."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx2
import pytest
from ray_cluster import ENGINE, INGRESS, REPLICA, RayCluster
from streams import Question, StreamedAnswer, Streams

from loraserve import Client
from loraserve.demo.frames import STYLES, fresh_prompts
from loraserve.demo.pack import adapter_dirs, base_dir

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray isn't installed (the extra ray)"),
]

NUM_STREAMS = 64
NUM_TOKENS, LONG_TOKENS = 120, 360
WITHIN_S, CHANGED_S = 240.0, 300.0
"""Seconds for the streams that are open, and for a cluster to shrink or restart under them.

Several times what two processors need.
"""
KILLED = (REPLICA, ENGINE, REPLICA, ENGINE)
FLAGS = (
    *("--memory-budget", "64MiB", "--host-cache", "64MiB", "--max-num-seqs", "32", "--cpus-per-replica", "0.5"),
    *("--replicas", "2", "--min-replicas", "2", "--max-replicas", "3", "--target-requests", "20"),
    *("--max-ttft", "60", "--scale-up-delay", "2", "--scale-down-delay", "8", "--drain-s", "0.2"),
    *("--grace-s", "120", "--log-level", "warning"),
)

# As many requests a replica that 64 streams need two, though there are three.
WIDE = ("--replicas", "3", "--target-requests", "45", "--scale-down-delay", "15")
SLOW = {"LORASERVE_FAULTS": "engine.before_step=delay:0.03"}
"""Steps so long that replicas are behind the clients: what these have open is open there."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    cluster = RayCluster(tmp_path_factory.mktemp("cluster") / "data", flags=FLAGS).start()
    yield cluster
    assert cluster.stop() == 0, cluster.tail()


@pytest.fixture(scope="module")
def key(cluster: RayCluster) -> str:
    return make_owner(cluster, "acme")


@pytest.fixture(scope="module")
def slow_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    data_dir = tmp_path_factory.mktemp("slow") / "data"
    cluster = RayCluster(data_dir, flags=(*FLAGS, *WIDE), variables=SLOW).start()
    yield cluster
    assert cluster.stop() == 0, cluster.tail()


def questions(num: int, *, max_tokens: int | Sequence[int], first: int = 0) -> list[Question]:
    lengths = [max_tokens] * num if isinstance(max_tokens, int) else max_tokens
    models = [base_dir().name, *(style for style in STYLES if style in adapter_dirs())]
    prompts = fresh_prompts(num, 1000 + first)
    return [
        Question(models[i % len(models)], prompts[i].prompt, seed=first + i, max_tokens=lengths[i]) for i in range(num)
    ]


def usage(cluster: RayCluster, key: str) -> dict[str, tuple[int, int, int]]:
    """Return the requests, prompt and completion tokens billed to the tenant, by model."""
    url, headers = f"{cluster.url}/api/v1/usage?group_by=adapter", {"authorization": f"Bearer {key}"}
    rows = httpx2.get(url, headers=headers, timeout=60).raise_for_status().json()["data"]
    return {
        row["adapter"] or base_dir().name: (row["num_requests"], row["prompt_tokens"], row["completion_tokens"])
        for row in rows
    }


def check_billed_once(cluster: RayCluster, streams: Streams) -> None:
    requests, prompt, completion = Counter[str](), Counter[str](), Counter[str]()
    for answer in streams.answers:
        assert len(answer.token_ids) == answer.completion_tokens == answer.question.max_tokens, answer
        requests[answer.question.model] += 1
        prompt[answer.question.model] += answer.prompt_tokens
        completion[answer.question.model] += answer.completion_tokens
    expected = {model: (requests[model], prompt[model], completion[model]) for model in requests}
    deadline = time.monotonic() + 10
    while usage(cluster, streams.key) != expected and time.monotonic() < deadline:
        time.sleep(0.3)
    # what is billed twice comes later
    time.sleep(1.5)
    assert usage(cluster, streams.key) == expected


def make_owner(cluster: RayCluster, name: str) -> str:
    """Make a tenant with the seven adapters, and return its key."""
    key = cluster.make_tenant(name)
    with Client(cluster.url, api_key=key) as client:
        for style, path in adapter_dirs().items():
            client.adapters.push(str(path), name=style)
    return key


@dataclass(frozen=True)
class Solo:
    """Questions, each with the answer that it has when it is the only one."""

    answers: dict[Question, StreamedAnswer]

    @property
    def asked(self) -> list[Question]:
        return list(self.answers)

    def check_same(self, answers: Sequence[StreamedAnswer]) -> None:
        different = [answer for answer in answers if answer != self.answers[answer.question]]
        assert not different, (
            f"{len(different)} of {len(answers)} answers aren't those that their questions have alone; two of them:"
            f" {[(self.answers[answer.question], answer) for answer in different[:2]]}"
        )


def ask_alone(cluster: RayCluster, key: str, asked: Sequence[Question]) -> Solo:
    answers = asyncio.run(Streams(cluster.url, key).ask(asked, at_once=1, within_s=WITHIN_S))
    return Solo({answer.question: answer for answer in answers})


@pytest.fixture(scope="module")
def solo(cluster: RayCluster, key: str) -> Solo:
    return ask_alone(cluster, key, questions(NUM_STREAMS, max_tokens=NUM_TOKENS))


@pytest.fixture(scope="module")
def mixed(cluster: RayCluster, key: str) -> Solo:
    """As many questions, with answers of all lengths: at any time some are far from their ends."""
    lengths = [LONG_TOKENS * (i + 6) // (NUM_STREAMS + 5) for i in range(NUM_STREAMS)]
    return ask_alone(cluster, key, questions(NUM_STREAMS, max_tokens=lengths, first=500))


def test_two_replicas_answer_and_find_adapters(cluster: RayCluster, key: str) -> None:
    asked = questions(28, max_tokens=16)
    answers = asyncio.run(Streams(cluster.url, key).ask(asked, at_once=14, within_s=WITHIN_S))
    assert all(answer.completion_tokens == 16 for answer in answers)
    metrics = cluster.metrics()
    loads = {name: value for name, value in metrics.items() if name.startswith("loraserve_cluster_replica_loads")}
    assert len(loads) >= 2, loads
    assert sum(value for name, value in metrics.items() if name.startswith("loraserve_cluster_routed")) >= 28


def test_connections_wait_while_there_is_no_ingress(cluster: RayCluster) -> None:
    killed = cluster.kill(INGRESS)
    # the first one isn't refused, and none after it until the new ingress is ready
    deadline = time.monotonic() + WITHIN_S
    while httpx2.get(f"{cluster.url}/readyz", timeout=WITHIN_S).status_code != httpx2.codes.OK:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert killed not in cluster.pids(INGRESS)


def test_streams_move_from_replica_removed_by_scaling(mixed: Solo, slow_cluster: RayCluster) -> None:
    """Take one of three replicas away while 64 streams of all lengths are open."""
    assert slow_cluster.num_ready() == 3
    streams = Streams(slow_cluster.url, make_owner(slow_cluster, "scaled"))

    async def run() -> None:
        async with streams.kept_up(mixed.asked, within_s=WITHIN_S):
            deadline = time.monotonic() + CHANGED_S
            while (found := await asyncio.to_thread(slow_cluster.num_ready)) != 2:
                assert time.monotonic() < deadline, f"{found} replicas, not 2; {streams}\n{slow_cluster.tail()}"
                await asyncio.sleep(0.3)

    asyncio.run(run())
    assert num_moved(slow_cluster) > 0, "no stream was open at the replica that left"
    mixed.check_same(streams.answers)
    check_billed_once(slow_cluster, streams)


def test_streams_go_on_through_a_rolling_restart(mixed: Solo, slow_cluster: RayCluster) -> None:
    """Replace the ingress and all replicas while 64 streams of all lengths are open.

    Where one ends another one begins, until all is new.
    """
    streams = Streams(slow_cluster.url, make_owner(slow_cluster, "restarted"))

    async def run() -> None:
        async with streams.kept_up(mixed.asked, within_s=WITHIN_S):
            before = processes(slow_cluster)
            assert (await asyncio.to_thread(slow_cluster.run, "restart")).returncode == 0
            deadline = time.monotonic() + CHANGED_S
            while left := before.keys() & (await asyncio.to_thread(processes, slow_cluster)).keys():
                assert time.monotonic() < deadline, (
                    f"not replaced after {CHANGED_S:.0f} s: {[(pid, before[pid]) for pid in left]}; {streams}\n"
                    f"{slow_cluster.tail()}"
                )
                await asyncio.sleep(1.0)
            assert Counter(before.values())[REPLICA] >= 2

    asyncio.run(run())
    mixed.check_same(streams.answers)
    check_billed_once(slow_cluster, streams)


def test_abandoned_answers_are_not_computed_further(slow_cluster: RayCluster) -> None:
    """Have 64 clients go away, as their streams are open: the replicas let go of all of them."""
    asked = questions(NUM_STREAMS, max_tokens=LONG_TOKENS, first=800)
    key = make_owner(slow_cluster, "gone")
    before = num_computed(slow_cluster)

    async def leave() -> None:
        streams = Streams(slow_cluster.url, key)
        asking = asyncio.create_task(streams.ask(asked, at_once=NUM_STREAMS, within_s=WITHIN_S))
        while streams.num_tokens < NUM_STREAMS * LONG_TOKENS / 20:
            await asyncio.sleep(0.05)
        assert len(streams.live) == NUM_STREAMS
        asking.cancel()
        await asyncio.wait([asking])

    asyncio.run(leave())
    deadline = time.monotonic() + WITHIN_S
    # what is reported from time to time
    time.sleep(3.0)
    while num_running(slow_cluster):
        assert time.monotonic() < deadline, "streams that clients left run"
        time.sleep(0.2)
    assert num_computed(slow_cluster) - before < NUM_STREAMS * LONG_TOKENS / 2


def test_streams_outlive_killed_replicas_and_engines(solo: Solo, slow_cluster: RayCluster) -> None:
    """Kill replicas and engines at random under 64 streams; where one ends another one begins.

    No stream breaks, each text is the one that the request has alone, each token is billed once.
    """
    streams = Streams(slow_cluster.url, make_owner(slow_cluster, "killed"))
    rng = random.Random(7)
    num_tokens = sum(answer.completion_tokens for answer in solo.answers.values())

    async def run() -> None:
        async with streams.kept_up(solo.asked, within_s=WITHIN_S):
            for kind in KILLED:
                # at random places of the streams, however fast they are
                place = streams.num_tokens + rng.uniform(0.0, 0.2) * num_tokens
                while streams.num_tokens < place:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(slow_cluster.kill, kind, which=rng.randrange(4))
                killed_s = time.monotonic()
                # two deaths without a token in between would look like a request that kills engines
                while any(one.began_s < killed_s and not one.has_token_since(killed_s) for one in streams.live):
                    await asyncio.sleep(0.01)

    asyncio.run(run())
    solo.check_same(streams.answers)
    assert slow_cluster.metrics()['loraserve_cluster_replays_total{cause="lost"}'] > 0, "no stream was open at a kill"
    check_billed_once(slow_cluster, streams)


def processes(cluster: RayCluster) -> dict[int, bytes]:
    """Return the kinds of the ingress and the replicas, by process id."""
    return {pid: kind for kind in (INGRESS, REPLICA) for pid in cluster.pids(kind)}


def num_running(cluster: RayCluster) -> float:
    """Count the requests at the replicas, as of their last reports."""
    found = cluster.metrics().items()
    return sum(value for name, value in found if name.startswith("loraserve_cluster_replica_requests"))


def num_computed(cluster: RayCluster) -> float:
    """Count the tokens that the replicas sampled, as of their last reports."""
    return cluster.metrics()["loraserve_engine_generation_tokens_total"]


def num_moved(cluster: RayCluster) -> int:
    """Count the streams that went on elsewhere since their replica left."""
    return int(cluster.metrics()['loraserve_cluster_replays_total{cause="moved"}'])
