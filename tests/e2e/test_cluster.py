"""A cluster on Ray Serve: adapters are found, and streams outlive replicas."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import pytest
from ray_cluster import ENGINE, INGRESS, REPLICA, RayCluster
from server_process import events

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
KILLED = (REPLICA, ENGINE, REPLICA, ENGINE)
FLAGS = (
    *("--memory-budget", "64MiB", "--host-cache", "64MiB", "--max-num-seqs", "32", "--cpus-per-replica", "0.5"),
    *("--replicas", "2", "--min-replicas", "1", "--max-replicas", "3", "--target-requests", "20"),
    *("--scale-up-delay", "2", "--scale-down-delay", "15", "--drain-s", "0.2", "--log-level", "warning"),
)


@dataclass(frozen=True)
class Question:
    model: str
    prompt: str
    seed: int
    max_tokens: int

    @property
    def body(self) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": self.prompt,
            "seed": self.seed,
            # greedy, and by counted randomness
            "temperature": float(self.seed % 2),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


@dataclass(frozen=True)
class StreamedAnswer:
    text: str
    prompt_tokens: int
    completion_tokens: int


@dataclass
class Progress:
    """What came of streams so far."""

    num_tokens: int = 0
    num_ended: int = 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    cluster = RayCluster(tmp_path_factory.mktemp("cluster") / "data", flags=FLAGS).start()
    yield cluster
    assert cluster.stop() == 0, cluster.tail()


@pytest.fixture(scope="module")
def key(cluster: RayCluster) -> str:
    return make_owner(cluster, "acme")


def questions(num: int, *, max_tokens: int, first: int = 0) -> list[Question]:
    models = [base_dir().name, *(style for style in STYLES if style in adapter_dirs())]
    prompts = fresh_prompts(num, 1000 + first)
    return [
        Question(models[i % len(models)], prompts[i].prompt, seed=first + i, max_tokens=max_tokens) for i in range(num)
    ]


async def stream(client: httpx2.AsyncClient, question: Question, progress: Progress) -> StreamedAnswer:
    lines = []
    async with client.stream("POST", "/v1/completions", json=question.body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            lines.append(line)
            progress.num_tokens += sum(
                len(choice["token_ids"]) for event in events([line]) for choice in event.get("choices", ())
            )
    progress.num_ended += 1
    assert lines[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in lines[-3:], lines[-4:]
    found = events(lines)
    errors = [event["error"] for event in found if "error" in event]
    assert not errors, errors
    usage = found[-1]["usage"]
    assert isinstance(usage, dict)
    text = "".join(choice["text"] for event in found for choice in event["choices"])  # type: ignore[attr-defined]
    return StreamedAnswer(text, usage["prompt_tokens"], usage["completion_tokens"])


async def ask_all(
    url: str, key: str, asked: list[Question], *, at_once: int = NUM_STREAMS, progress: Progress | None = None
) -> list[StreamedAnswer]:
    room, progress = asyncio.Semaphore(at_once), progress or Progress()
    limits = httpx2.Limits(max_connections=at_once)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=240, limits=limits) as client:

        async def one(question: Question) -> StreamedAnswer:
            async with room:
                return await stream(client, question, progress)

        return await asyncio.gather(*map(one, asked))


def usage(cluster: RayCluster, key: str) -> tuple[int, int, int]:
    """Requests, prompt tokens and completion tokens that the tenant was billed for."""
    answer = httpx2.get(f"{cluster.url}/api/v1/usage", headers={"authorization": f"Bearer {key}"}, timeout=60)
    rows = answer.raise_for_status().json()["data"]
    requests, prompt, completion = (
        sum(row[name] for row in rows) for name in ("num_requests", "prompt_tokens", "completion_tokens")
    )
    return requests, prompt, completion


def check_billed_once(cluster: RayCluster, key: str, answers: list[StreamedAnswer]) -> None:
    expected = (
        len(answers),
        sum(answer.prompt_tokens for answer in answers),
        sum(answer.completion_tokens for answer in answers),
    )
    deadline = time.monotonic() + 10
    while usage(cluster, key) != expected and time.monotonic() < deadline:
        time.sleep(0.3)
    # what is billed twice comes later
    time.sleep(1.5)
    assert usage(cluster, key) == expected


def check_same(asked: list[Question], answers: list[StreamedAnswer], solo: list[StreamedAnswer]) -> None:
    different = [i for i, (one, other) in enumerate(zip(answers, solo, strict=False)) if one.text != other.text]
    assert not different, [(asked[i], solo[i].text, answers[i].text) for i in different[:2]]


def make_owner(cluster: RayCluster, name: str) -> str:
    """Make a tenant with the seven adapters, and return its key."""
    key = cluster.make_tenant(name)
    with Client(cluster.url, api_key=key) as client:
        for style, path in adapter_dirs().items():
            client.adapters.push(str(path), name=style)
    return key


@dataclass(frozen=True)
class Solo:
    """Questions, and the answer that each has when it is the only one."""

    asked: list[Question]
    answers: list[StreamedAnswer]


@pytest.fixture(scope="module")
def solo(cluster: RayCluster, key: str) -> Solo:
    asked = questions(NUM_STREAMS, max_tokens=120)
    return Solo(asked, asyncio.run(ask_all(cluster.url, key, asked, at_once=1)))


def test_both_replicas_answer_and_find_adapters(cluster: RayCluster, key: str) -> None:
    asked = questions(28, max_tokens=16)
    answers = asyncio.run(ask_all(cluster.url, key, asked, at_once=14))
    assert all(answer.completion_tokens == 16 for answer in answers)
    metrics = cluster.metrics()
    loads = {name: value for name, value in metrics.items() if name.startswith("loraserve_cluster_replica_loads")}
    assert len(loads) >= 2, loads
    assert sum(value for name, value in metrics.items() if name.startswith("loraserve_cluster_routed")) >= 28


def test_streams_outlive_killed_replicas_and_engines(cluster: RayCluster, solo: Solo) -> None:
    """Kill replicas and engines at random under 64 streams.

    No stream breaks, each text is the one that the request has alone, each token is billed once.
    """
    billed = make_owner(cluster, "killed")
    rng = random.Random(7)
    num_tokens = sum(answer.completion_tokens for answer in solo.answers)
    num_live = []

    async def run() -> list[StreamedAnswer]:
        progress = Progress()
        asking = asyncio.create_task(ask_all(cluster.url, billed, solo.asked, progress=progress))
        # at random places of the streams, however fast they are
        for kind, part in zip(KILLED, sorted(rng.uniform(0.0, 0.5) for _ in KILLED), strict=True):
            while progress.num_tokens < part * num_tokens and not asking.done():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(cluster.kill, kind, which=rng.randrange(4))
            num_live.append(len(solo.asked) - progress.num_ended)
        return await asking

    answers = asyncio.run(run())
    assert all(num_live), f"streams that ran at each kill: {num_live}"
    check_same(solo.asked, answers, solo.answers)
    assert cluster.metrics()['loraserve_cluster_replays_total{cause="lost"}'] > 0
    check_billed_once(cluster, billed, answers)


def test_streams_go_on_through_a_rolling_restart(cluster: RayCluster, solo: Solo) -> None:
    """Replace the ingress and every replica while streams come one after the other."""
    cluster.wait_for(1)
    billed = make_owner(cluster, "restarted")
    before = set(cluster.pids(REPLICA)) | set(cluster.pids(INGRESS))

    async def run() -> list[StreamedAnswer]:
        assert cluster.run("restart").returncode == 0
        answers: list[StreamedAnswer] = []
        while before & (set(cluster.pids(REPLICA)) | set(cluster.pids(INGRESS))):
            found = await ask_all(cluster.url, billed, solo.asked[:12], at_once=6)
            check_same(solo.asked, found, solo.answers)
            answers += found
        return answers

    answers = asyncio.run(run())
    check_billed_once(cluster, billed, answers)


def test_long_streams_move_from_replicas_that_are_scaled_away(cluster: RayCluster, solo: Solo) -> None:
    billed = make_owner(cluster, "scaled")
    moved = cluster.metrics()['loraserve_cluster_replays_total{cause="moved"}']

    async def ask_until(num_replicas: int, asked: list[Question]) -> list[StreamedAnswer]:
        """Ask again and again until there are so many replicas."""
        found: list[StreamedAnswer] = []
        deadline = time.monotonic() + 180
        while (num := await asyncio.to_thread(cluster.num_ready)) != num_replicas:
            assert time.monotonic() < deadline, f"{num} replicas, not {num_replicas}:\n{cluster.tail()}"
            answers = await ask_all(cluster.url, billed, asked)
            check_same(asked, answers, solo.answers)
            found += answers
        return found

    answers = asyncio.run(ask_until(3, solo.asked))
    answers += asyncio.run(ask_until(1, solo.asked[:6]))
    assert cluster.metrics()['loraserve_cluster_replays_total{cause="moved"}'] > moved
    check_billed_once(cluster, billed, answers)
