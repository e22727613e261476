"""A tenant's client that changes its adapters at random,
and knows what each must be at any moment, killed servers or not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import httpx2
from expected_state import LIVE, Expected

from adapters_store import LocalStore

SHARED = "shared"
"""An adapter of two versions, whose alias `LIVE` all workers move."""
ALIASES = ("stable", "canary")


@dataclass
class Files:
    """The files of an adapter that no other upload has:
    a blob that is missing isn't there by chance.
    """

    config: bytes
    weights: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.weights).hexdigest()

    @property
    def blobs(self) -> tuple[str, str]:
        return hashlib.sha256(self.config).hexdigest(), self.sha256


@dataclass
class Publish:
    """One that was begun."""

    files: Files
    is_promoting: bool
    key: str
    """Its Idempotency-Key."""
    is_resumable: bool
    """Whether the weights are sent in pieces first, or all in one form."""
    upload: str = ""
    """The announced upload's id, once an answer said it."""
    received: int = 0
    """Bytes that an answer said are there."""


@dataclass
class Worker:
    """Changes adapters of its own, one call at a time, so that it knows what each must be: `state`,
    or with the call that no answer came to, `pending`.
    """

    number: int
    client: httpx2.AsyncClient
    rng: random.Random
    make_files: Callable[[], Files]
    shared_moves: dict[int, int]
    """Revision → version, of every acknowledged move of the alias that all workers move."""
    is_restoring: bool = True
    """False: what is deleted is gone for good."""
    state: Expected = field(default_factory=Expected)
    pending: Expected | None = None
    files: dict[str, Files] = field(default_factory=dict)
    """By the weights' SHA-256."""
    digests: dict[str, str] = field(default_factory=dict)
    num_acknowledged: int = 0
    publish: Publish | None = None
    """Under way."""

    @property
    def name(self) -> str:
        return f"worker-{self.number}"

    async def work(self) -> None:
        """Go on until the server is gone."""
        try:
            while True:
                await self.rng.choice(self._possible())()
        except httpx2.TransportError:
            return

    def _possible(self) -> list[Callable[[], Awaitable[None]]]:
        state, unused = self.state, set(self.state.versions) - set(self.state.aliases.values())
        possible: list[Callable[[], Awaitable[None]]] = [self._publish] * (1 if len(state.versions) > 8 else 4)
        possible += [self._move_shared] * 2
        possible += [self._move] * 4 if state.versions else []
        possible += [self._publish_again] if state.versions else []
        possible += [self._delete_alias] if state.aliases else []
        possible += [self._delete_version] if unused else []
        possible += [self._roll_back] * 2 if state.can_roll_back() else []
        if self.is_restoring:
            possible += [self._restore_version] if state.is_there and state.can_restore() else []
            possible += [self._restore] * 4 if state.before_delete is not None else []
        possible += [self.delete] if len(state.versions) > 2 else []
        return possible

    async def _publish(self) -> None:
        files = self.make_files()
        self.files[files.sha256] = files
        await self._begin_publish(files, is_promoting=self.rng.random() < 0.5)

    async def _publish_again(self) -> None:
        weights = self.rng.choice(sorted(self.state.versions.values()))
        await self._begin_publish(self.files[weights], is_promoting=True)

    async def _begin_publish(self, files: Files, *, is_promoting: bool) -> None:
        key = f"{self.name}-{self.rng.getrandbits(64):x}"
        self.publish = Publish(files, is_promoting, key, is_resumable=self.rng.random() < 0.5)
        await self._send_files(self.publish)

    async def _send_files(self, publish: Publish) -> None:
        files = publish.files
        headers = {"Idempotency-Key": publish.key}
        path = f"/adapters/{self.name}/versions?promote={publish.is_promoting}".lower()
        if publish.is_resumable:
            await self._send_pieces(publish)
            self.pending = self.state.published(files.sha256, is_promoting=publish.is_promoting)
            body = {"config": json.loads(files.config), "blob": files.sha256}
            answer = await self.client.post(path, json=body, headers=headers)
        else:
            self.pending = self.state.published(files.sha256, is_promoting=publish.is_promoting)
            boundary, whole = multipart(files)
            headers |= {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": str(len(whole))}
            pieces = in_pieces(whole, self.rng.randrange(1, 6))
            answer = await self.client.post(path, content=pieces, headers=headers)
        assert answer.status_code in (200, 201), answer.text
        published = answer.json()
        assert self.pending.versions[published["version"]] == files.sha256
        assert self.digests.setdefault(files.sha256, published["digest"]) == published["digest"]
        self._acknowledge()
        if publish.upload:
            gone = await self.client.delete(f"/uploads/{publish.upload}")
            assert gone.status_code in (204, 404), gone.text

    async def _send_pieces(self, publish: Publish) -> None:
        """All bytes of the weights, from the first that the server hasn't;
        it has all that it said that it has.
        """
        weights, size = publish.files.weights, len(publish.files.weights)
        body = {"sha256": publish.files.sha256, "size": size}
        announced = await self.client.post("/uploads", json=body, headers={"Idempotency-Key": f"{publish.key}-upload"})
        assert announced.status_code in (200, 201), announced.text
        assert publish.upload in ("", announced.json()["id"])
        publish.upload = announced.json()["id"]
        found = (await self.client.get(f"/uploads/{publish.upload}")).json()
        assert found["received"] >= publish.received, "an acknowledged piece is lost"
        publish.received = found["received"]
        while publish.received < size:
            end = min(size, publish.received + self.rng.randrange(1, 1 + size // 2))
            answer = await self.client.patch(
                f"/uploads/{publish.upload}",
                content=in_pieces(weights[publish.received : end], self.rng.randrange(1, 4)),
                headers={
                    "Content-Range": f"bytes {publish.received}-{end - 1}/{size}",
                    "Content-Length": str(end - publish.received),
                },
            )
            assert answer.status_code == 200, answer.text
            publish.received = answer.json()["received"]
            assert publish.received == end
            self.num_acknowledged += 1
        found = (await self.client.get(f"/uploads/{publish.upload}")).json()
        assert found["is_complete"]

    async def _move(self) -> None:
        alias, version = self.rng.choice((LIVE, *ALIASES)), self.rng.choice(sorted(self.state.versions))
        self.pending = self.state.moved(alias, version)
        answer = await self.client.put(f"/adapters/{self.name}/aliases/{alias}", json={"version": version})
        assert answer.status_code in (200, 201), answer.text
        self._acknowledge()

    async def _roll_back(self) -> None:
        alias = self.rng.choice(self.state.can_roll_back())
        self.pending = self.state.rolled_back(alias)
        await self._expect_200(f"/adapters/{self.name}/aliases/{alias}/rollback")

    async def _restore_version(self) -> None:
        number = self.rng.choice(self.state.can_restore())
        self.pending = self.state.with_restored(number)
        await self._expect_200(f"/adapters/{self.name}/versions/{number}/restore")

    async def _restore(self) -> None:
        self.pending = self.state.restored()
        await self._expect_200(f"/adapters/{self.name}/restore")

    async def _expect_200(self, path: str) -> None:
        answer = await self.client.post(path)
        assert answer.status_code == 200, answer.text
        self._acknowledge()

    async def _delete_alias(self) -> None:
        alias = self.rng.choice(sorted(self.state.aliases))
        self.pending = self.state.without_alias(alias)
        await self._expect_204(f"/adapters/{self.name}/aliases/{alias}")

    async def _delete_version(self) -> None:
        number = self.rng.choice(sorted(set(self.state.versions) - set(self.state.aliases.values())))
        self.pending = self.state.without_version(number)
        await self._expect_204(f"/adapters/{self.name}/versions/{number}")

    async def delete(self) -> None:
        self.pending = self.state.deleted()
        await self._expect_204(f"/adapters/{self.name}")

    async def _expect_204(self, path: str) -> None:
        answer = await self.client.delete(path)
        assert answer.status_code == 204, answer.text
        self._acknowledge()

    async def _move_shared(self) -> None:
        """Move the alias that others move too, if it is still what it was when it was read."""
        path = f"/adapters/{SHARED}/aliases/{LIVE}"
        found = await self.client.get(path)
        version = 3 - found.json()["version"]
        answer = await self.client.put(path, json={"version": version}, headers={"If-Match": found.headers["etag"]})
        assert answer.status_code in (200, 412), answer.text
        if answer.status_code == 200:
            revision = revision_of(answer)
            assert revision not in self.shared_moves, "two moves were acknowledged with one revision"
            self.shared_moves[revision] = version
            self.num_acknowledged += 1

    def _acknowledge(self) -> None:
        assert self.pending is not None
        self.state, self.pending, self.publish = self.pending, None, None
        self.num_acknowledged += 1

    async def settle(self, store: LocalStore) -> None:
        """After a restart: what is there is what was acknowledged,
        or that and the whole of the call without an answer.
        """
        found = await self._look()
        known = [state for state in (self.state, self.pending) if state is not None]
        assert any(same(found, state) for state in known), f"{self.name} is {found}, which is none of {known}"
        if self.pending is not None and same(found, self.pending):
            self.state = self.pending
        for weights in self.state.versions.values():
            for blob in self.files[weights].blobs:
                # `read` re-hashes
                store.read(blob)
        self.pending = None
        if self.publish is not None:
            # The same requests again, as a client does that got no answer, are one publish.
            await self._send_files(self.publish)
            assert same(await self._look(), self.state)

    async def _look(self) -> Expected:
        adapter = await self.client.get(f"/adapters/{self.name}")
        if adapter.status_code == 404:
            assert (await self.client.get(f"/adapters/{self.name}/versions")).status_code == 404
            return Expected()
        versions = (await self.client.get(f"/adapters/{self.name}/versions?limit=200")).json()["data"]
        weights = {digest: sha for sha, digest in self.digests.items()}
        numbers = {one["version"]: weights.get(one["digest"], "") for one in versions}
        assert all(one["state"] == "ready" for one in versions)
        return Expected(numbers, adapter.json()["aliases"], is_there=True)


def same(found: Expected, expected: Expected) -> bool:
    """Of a version whose publish wasn't acknowledged, the digest isn't known yet:
    its number says which it is.
    """
    return (
        found.is_there == expected.is_there
        and found.aliases == expected.aliases
        and found.versions.keys() == expected.versions.keys()
        and all(weights in ("", expected.versions[number]) for number, weights in found.versions.items())
    )


def revision_of(answer: httpx2.Response) -> int:
    return int(answer.headers["etag"].strip('"').removeprefix("r"))


def multipart(files: Files) -> tuple[str, bytes]:
    boundary = hashlib.sha256(files.weights).hexdigest()
    parts = [("config", "adapter_config.json", files.config), ("weights", "adapter_model.safetensors", files.weights)]
    body = b""
    for field_name, file_name, content in parts:
        disposition = f'Content-Disposition: form-data; name="{field_name}"; filename="{file_name}"'
        body += f"--{boundary}\r\n{disposition}\r\n\r\n".encode() + content + b"\r\n"
    return boundary, body + f"--{boundary}--\r\n".encode()


async def in_pieces(body: bytes, num_pieces: int) -> AsyncIterator[bytes]:
    """The body with pauses, so that kills fall between its bytes too."""
    size = -(-len(body) // num_pieces)
    for start in range(0, len(body), size):
        yield body[start : start + size]
        await asyncio.sleep(0.002)
