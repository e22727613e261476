"""Two servers on one PostgreSQL and one store: what one acknowledges, the other does too,
soon and whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import eq
from pathlib import Path
from typing import TypeVar

import httpx2
import pytest
from s3_server import S3Server
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client
from loraserve.demo.frames import fresh_prompts
from loraserve.demo.pack import adapter_dirs
from loraserve.limits import LIMITS

pytestmark = pytest.mark.postgres

T = TypeVar("T")
FLAGS = ("--memory-budget", "32MiB", "--host-cache", "32MiB", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
PROMPT = fresh_prompts(1, 77)[0].prompt


@dataclass
class Replicas:
    """Two servers, and a tenant's key that both know."""

    a: ServerProcess
    b: ServerProcess
    key: str

    @property
    def both(self) -> tuple[ServerProcess, ServerProcess]:
        return self.a, self.b


@dataclass(frozen=True)
class Answer:
    status: int
    adapter: str
    """The header x-loraserve-adapter: NAME@VERSION."""
    text: str
    code: str


def ask(server: ServerProcess, key: str, model: str, *, max_tokens: int = 8, **fields: object) -> Answer:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0} | fields
    headers = {"authorization": f"Bearer {key}"}
    response = httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    found = response.json()
    is_fine = response.status_code == 200
    text = found["choices"][0]["text"] if is_fine else ""
    code = "" if is_fine else found["error"]["code"]
    return Answer(response.status_code, response.headers.get("x-loraserve-adapter", ""), text, code)


def push(server: ServerProcess, key: str, style: str, name: str, **how: object) -> int:
    """Publish the pack's adapter `style` as a version of `name`; its number."""
    with Client(server.url, api_key=key) as client:
        version = client.adapters.push(str(adapter_dirs()[style]), name=name, **how).version  # type: ignore[arg-type]
    assert version is not None
    return version


def management(server: ServerProcess, key: str) -> httpx2.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=f"{server.url}/api/v1", headers=headers, timeout=60)


def last_old_s(ask_once: Callable[[], T], is_new: Callable[[T], bool], *, within_s: float) -> float:
    """Seconds from now to the start of the last request that still had the old answer; 0: none had.

    Fails where it never ends.
    """
    began = time.monotonic()
    last = 0.0
    while True:
        asked_s = time.monotonic() - began
        if is_new(found := ask_once()):
            return last
        last = asked_s
        assert asked_s < within_s, f"after {asked_s:.1f} s still: {found}"
        time.sleep(0.01)


def at_once(*calls: Callable[[], T]) -> list[T]:
    """Every call's result; they begin together."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


@pytest.fixture(scope="module", params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables that say where the blobs are."""
    if request.param == "file":
        yield {"LORASERVE_STORE_URL": tmp_path_factory.mktemp("blobs").as_uri()}
        return
    pytest.importorskip("moto", reason="moto isn't installed")
    pytest.importorskip("obstore", reason="obstore isn't installed")
    with S3Server() as s3:
        yield {"LORASERVE_STORE_URL": f"s3://{s3.make_bucket()}/blobs", **s3.variables}


@pytest.fixture(scope="module")
def replicas(
    store: dict[str, str], make_postgres_url: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    """Both are started at the same time on an empty database."""
    root: Path = tmp_path_factory.mktemp("replicas")
    variables = {"LORASERVE_DATABASE_URL": make_postgres_url(), **store}
    servers = [ServerProcess(root / name, flags=FLAGS, variables=variables) for name in "ab"]
    try:
        at_once(*(server.start for server in servers))
        yield Replicas(servers[0], servers[1], servers[0].make_tenant("acme"))
        assert at_once(*(server.stop for server in servers)) == [0, 0]
    finally:
        for server in servers:
            server.kill()


@pytest.fixture
def name() -> str:
    """An adapter's name that no other test uses."""
    return f"adapter-{uuid.uuid4().hex[:8]}"


def test_push_reaches_other_replica_within_2_seconds(replicas: Replicas, name: str) -> None:
    assert ask(replicas.b, replicas.key, name).code == "model_not_found"
    push(replicas.a, replicas.key, "sql", name)
    new = last_old_s(lambda: ask(replicas.b, replicas.key, name), lambda found: found.status == 200, within_s=10)
    assert new < LIMITS.resolve_cache_s
    assert ask(replicas.b, replicas.key, name) == ask(replicas.a, replicas.key, name)


def test_second_version_reaches_other_replica_within_2_seconds(replicas: Replicas, name: str) -> None:
    push(replicas.a, replicas.key, "sql", name)
    assert ask(replicas.b, replicas.key, name).adapter == f"{name}@1"
    push(replicas.a, replicas.key, "french", name)
    old = last_old_s(
        lambda: ask(replicas.b, replicas.key, name), lambda found: found.adapter == f"{name}@2", within_s=10
    )
    assert old < LIMITS.resolve_cache_s


def test_concurrent_alias_moves_from_same_state_succeed_once(replicas: Replicas, name: str) -> None:
    push(replicas.a, replicas.key, "sql", name)
    push(replicas.a, replicas.key, "french", name)
    path = f"/adapters/{name}/aliases/live"

    def move(server: ServerProcess) -> list[tuple[str, str, int]]:
        """Every move that was done: from which state to which, and the version."""
        done = []
        with management(server, replicas.key) as client:
            for _ in range(10):
                found = client.get(path)
                version = 3 - found.json()["version"]
                moved = client.put(path, json={"version": version}, headers={"If-Match": found.headers["etag"]})
                assert moved.status_code in (200, 412)
                if moved.status_code == 200:
                    done.append((found.headers["etag"], moved.headers["etag"], version))
        return done

    moves = at_once(*(partial(move, server) for server in replicas.both * 2))
    done = [one for each in moves for one in each]
    assert len({before for before, _, _ in done}) == len({after for _, after, _ in done}) == len(done) > 0
    # one chain: each state but the last was left once
    last = {after: version for _, after, version in done if after not in {before for before, _, _ in done}}
    assert len(last) == 1
    for server in replicas.both:
        with management(server, replicas.key) as client:
            found = client.get(path)
            assert {found.headers["etag"]: found.json()["version"]} == last


def test_answer_during_alias_move_comes_from_named_version(replicas: Replicas, name: str) -> None:
    texts = {}
    for number, style in ((1, "sql"), (2, "french")):
        assert push(replicas.a, replicas.key, style, name) == number
        texts[f"{name}@{number}"] = ask(replicas.a, replicas.key, f"{name}@{number}").text
    assert len(set(texts.values())) == 2
    is_over = threading.Event()

    def move() -> list[Answer]:
        with management(replicas.a, replicas.key) as client:
            for number in range(12):
                body = {"version": number % 2 + 1}
                client.put(f"/adapters/{name}/aliases/live", json=body).raise_for_status()
                time.sleep(0.2)
        is_over.set()
        return []

    def listen(server: ServerProcess) -> list[Answer]:
        answers = []
        while not is_over.is_set():
            answers.append(ask(server, replicas.key, name))
        return answers

    found = at_once(move, lambda: listen(replicas.a), lambda: listen(replicas.b))
    for answers in found[1:]:
        assert {answer.status for answer in answers} == {200}
        assert all(answer.text == texts[answer.adapter] for answer in answers)
    assert {answer.adapter for answers in found for answer in answers} == set(texts)
    # the last move was to version 2
    last_old_s(lambda: ask(replicas.b, replicas.key, name), lambda answer: answer.adapter == f"{name}@2", within_s=10)


def test_deletion_reaches_other_replica_while_running_streams_finish(replicas: Replicas, name: str) -> None:
    push(replicas.a, replicas.key, "sql", name)
    whole = ask(replicas.b, replicas.key, name, max_tokens=64, ignore_eos=True).text
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, replicas.b, replicas.key, name, max_tokens=64, ignore_eos=True)
        time.sleep(0.05)
        with management(replicas.a, replicas.key) as client:
            assert client.delete(f"/adapters/{name}").status_code == 204
        assert (running.result().status, running.result().text) == (200, whole)
    absent = last_old_s(lambda: ask(replicas.b, replicas.key, name), lambda found: found.status == 404, within_s=10)
    assert absent < LIMITS.resolve_cache_s


def test_key_creation_and_revocation_reach_other_replica_promptly(
    replicas: Replicas,
) -> None:
    with management(replicas.a, ADMIN_KEY) as admin:
        made = admin.post("/tenants/acme/keys", json={"name": "short-lived"}).raise_for_status().json()

        def is_refused() -> bool:
            with management(replicas.b, made["key"]) as client:
                return client.get("/adapters").status_code == 401

        assert not is_refused()
        assert admin.delete(f"/tenants/acme/keys/{made['id']}").status_code == 204
        assert last_old_s(is_refused, bool, within_s=15) < LIMITS.auth_cache_s


def test_simultaneous_pushes_of_same_bytes_are_single_version(replicas: Replicas, name: str) -> None:
    numbers = at_once(*(partial(push, server, replicas.key, "sql", name) for server in replicas.both))
    assert numbers == [1, 1]


def test_simultaneous_pushes_of_different_bytes_are_two_versions(replicas: Replicas, name: str) -> None:
    numbers = at_once(
        lambda: push(replicas.a, replicas.key, "sql", name), lambda: push(replicas.b, replicas.key, "french", name)
    )
    assert sorted(numbers) == [1, 2]
    answers = [ask(server, replicas.key, f"{name}@{number}") for server in replicas.both for number in (1, 2)]
    assert {answer.status for answer in answers} == {200}
    assert answers[:2] == answers[2:]


def test_sampled_answer_is_same_on_two_replicas(replicas: Replicas, name: str) -> None:
    push(replicas.a, replicas.key, "sql", name)
    drawn = [
        ask(server, replicas.key, f"{name}@1", max_tokens=24, temperature=1.5, seed=3, ignore_eos=True)
        for server in replicas.both
    ]
    assert drawn[0].status == 200
    assert drawn[0] == drawn[1]


def test_replica_survives_peer_kill_and_peer_catches_up(replicas: Replicas, name: str) -> None:
    push(replicas.a, replicas.key, "sql", name)
    replicas.a.kill()
    push(replicas.b, replicas.key, "french", name)
    assert ask(replicas.b, replicas.key, name).adapter == f"{name}@2"
    replicas.a.start()
    assert ask(replicas.a, replicas.key, name) == ask(replicas.b, replicas.key, name)


def test_upload_begun_on_replica_continues_on_second_replica(replicas: Replicas, name: str) -> None:
    folder = adapter_dirs()["sql"]
    weights = (folder / "adapter_model.safetensors").read_bytes()
    config = json.loads((folder / "adapter_config.json").read_bytes())
    digest, size = hashlib.sha256(weights).hexdigest(), len(weights)
    bounds = [0, size // 3, size // 2, size]
    with management(replicas.a, replicas.key) as a, management(replicas.b, replicas.key) as b:
        path = a.post("/uploads", json={"sha256": digest, "size": size}).headers["location"].removeprefix("/api/v1")
        for client, start, end in zip((a, b, a), bounds, bounds[1:], strict=False):
            headers = {"Content-Range": f"bytes {start}-{end - 1}/{size}"}
            client.patch(path, content=weights[start:end], headers=headers).raise_for_status()
        assert b.get(path).json()["is_complete"]
        made = b.post(f"/adapters/{name}/versions", json={"config": config, "blob": digest})
        assert made.status_code == 201
    assert ask(replicas.a, replicas.key, name).status == 200


def test_split_user_gets_same_version_on_two_replicas(replicas: Replicas, name: str) -> None:
    push(replicas.a, replicas.key, "sql", name)
    push(replicas.a, replicas.key, "french", name)
    split = [{"version": 1, "weight": 50}, {"version": 2, "weight": 50}]
    with management(replicas.a, replicas.key) as client:
        client.put(f"/adapters/{name}/aliases/live", json={"split": split}).raise_for_status()
    users = [f"user-{number}" for number in range(16)]
    met = [
        [ask(server, replicas.key, name, max_tokens=1, user=user).adapter for user in users] for server in replicas.both
    ]
    assert met[0] == met[1]
    assert set(met[0]) == {f"{name}@1", f"{name}@2"}


def test_pin_reaches_other_replica_and_survives_restart(replicas: Replicas, name: str) -> None:
    push(replicas.a, replicas.key, "sql", name)

    def is_pinned(server: ServerProcess) -> bool:
        # an operator's view: a tenant's key is told of what its own use brought to memory, not an
        # operator's
        with management(server, ADMIN_KEY) as admin:
            found = admin.get("/residency?limit=200&resident=true").raise_for_status().json()["data"]
        return any(one["name"] == name and one["is_pinned"] for one in found)

    def pin(verb: str) -> None:
        with management(replicas.a, ADMIN_KEY) as admin:
            answer = admin.post(f"/adapters/{name}/versions/1/{verb}", headers={"X-Tenant": "acme"})
            assert answer.status_code in (200, 202), answer.text

    pin("pin")
    assert is_pinned(replicas.a)
    last_old_s(lambda: is_pinned(replicas.b), bool, within_s=10)
    replicas.b.kill()
    replicas.b.start()
    last_old_s(lambda: is_pinned(replicas.b), bool, within_s=10)
    pin("unpin")
    last_old_s(lambda: is_pinned(replicas.b), lambda found: not found, within_s=10)


def test_usage_of_two_replicas_is_single_sum(replicas: Replicas, name: str) -> None:
    push(replicas.a, replicas.key, "sql", name)
    for server, num_requests in zip(replicas.both, (2, 3), strict=True):
        for _ in range(num_requests):
            assert ask(server, replicas.key, f"{name}@1", max_tokens=4, ignore_eos=True).status == 200

    def used(server: ServerProcess) -> tuple[int, int]:
        with management(server, replicas.key) as client:
            rows = client.get(f"/usage?adapter={name}").raise_for_status().json()["data"]
        return sum(one["num_requests"] for one in rows), sum(one["completion_tokens"] for one in rows)

    for server in replicas.both:
        last_old_s(lambda server=server: used(server), lambda found: found == (5, 20), within_s=10)  # type: ignore[misc]


def test_replicas_together_enforce_tenant_request_rate(replicas: Replicas, name: str) -> None:
    # a server that a test before this one killed counts until it is missed, the one in its place
    # from its second beat on; what a tenant is granted at once is a share of as many
    time.sleep(LIMITS.server_silence_s + 2 * LIMITS.server_beat_s)
    for server in replicas.both:
        last_old_s(lambda server=server: server.metrics()["loraserve_servers"], partial(eq, 2.0), within_s=30)  # type: ignore[misc]
    key = replicas.a.make_tenant(name)
    push(replicas.a, key, "sql", name)
    with management(replicas.a, ADMIN_KEY) as admin:
        admin.patch(f"/tenants/{name}", json={"limits": {"requests_per_minute": 20}}).raise_for_status()
    time.sleep(LIMITS.auth_cache_s)
    began = time.monotonic()
    # twice each: what the second server lent the first in between is granted there
    asked = [[ask(server, key, name, max_tokens=1).status for _ in range(25)] for server in replicas.both * 2]
    granted = [statuses.count(200) for statuses in asked]
    # one more comes back every three seconds; the second server's part is granted again where a
    # heartbeat lent it to the first in between
    assert 18 <= sum(granted) <= 30 + math.ceil((time.monotonic() - began) / 3)
    assert all(statuses.count(429) == 25 - number for statuses, number in zip(asked, granted, strict=True))
