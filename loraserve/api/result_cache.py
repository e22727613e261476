"""Keep the finished answers of deterministic requests, each for the tenant that requested it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import msgspec
from cachetools import TLRUCache

from loraserve.db.names import name_key
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.output import Chunk
from loraserve.limits import LIMITS, Limits
from loraserve.registry.composition import versions_of
from loraserve.types import TIMEOUT, AdapterRef, Digest, FinishReason, RequestId, Struct, TenantId, TokenLogprobs

HEADER = "x-loraserve-cache"
HIT, MISS, OFF = "hit", "miss", "off"
_KEPT_BYTES = 512
"""Bytes of an answer in addition to its chunks: its key and its place in the cache."""
_TOKEN_BYTES, _ENTRY_BYTES, _CANDIDATE_BYTES = 5, 48, 14
"""Bytes of a token, of its log probability, and of another likely token's, as written."""
_ROOM_LEFT = 1 / 16
"""Part of the budget that is free after answers made room: they don't at each new one."""


class _Piece(Struct, frozen=True, array_like=True):
    """A chunk as it's kept: without how long it took."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Piece]).decode


@dataclass(frozen=True, slots=True)
class _Key:
    """Identity of an answer: all that it depends on, and the versions with which it's dropped."""

    hash: bytes
    versions: tuple[tuple[TenantId, str, Digest], ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    chunks: bytes
    ttl_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.chunks) + _KEPT_BYTES


def _size(kept: _Kept) -> int:
    return kept.num_bytes


def _end(_: _Key, kept: _Kept, now_s: float) -> float:
    return now_s + kept.ttl_s


def key_of(request: GenerateRequest, base: Digest) -> _Key:
    """Build the identity of a request's answer.

    That is its tenant, the digests of base and adapter, the tokens, and whatever decides how tokens
    are chosen, where the text ends and how it reads. Its name, its place in queues and its timeout
    aren't part of it, nor is the seed of an answer that is the likeliest one.
    """
    params = request.params
    # as sent, equal biases may come in any order
    biases = dict(sorted(params.logit_bias.items()))
    params = msgspec.structs.replace(params, logit_bias=biases, seed=0 if params.temperature == 0 else params.seed)
    adapter = request.adapter
    question = msgspec.structs.replace(
        request,
        request_id=RequestId(""),
        adapter=None,
        params=params,
        priority=0,
        weight=1.0,
        kv_share=1.0,
        max_queued=0,
        timeout_s=None,
        is_background=False,
        # the adapter's digest covers it
        tokenizer=None,
    )
    # the request has the tenant
    framed = _encode(("result", base, "" if adapter is None else adapter.digest, question))
    return _Key(hashlib.sha256(framed).digest(), _versions(adapter))


def _versions(adapter: AdapterRef | None) -> tuple[tuple[TenantId, str, Digest], ...]:
    return tuple((one.tenant, name_key(one.name), one.digest) for one in versions_of(adapter))


class ResultCache:
    """Answers in this server's memory, by tenant; nothing of one tenant's is found by another.

    A tenant has at most its part. Where all of them together have too much, the least recently
    used answer goes of the tenant that has most: one tenant can't push out those that have less.
    """

    def __init__(
        self, max_bytes: int, *, limits: Limits = LIMITS, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Make an empty cache.

        Args:
            max_bytes: budget of all tenants together; 0: nothing is kept.
        """
        self._max_bytes = max_bytes
        self._limits = limits
        self._clock = monotonic
        self._by_tenant: dict[TenantId, TLRUCache[_Key, _Kept]] = {}
        self._uses: WeakSet[CacheUse] = WeakSet()
        """Requests that may still add their answers."""
        self._most_bytes = 0
        """Upper bound of what is kept: more of it may be over."""
        self.num_by_outcome = dict.fromkeys((HIT, MISS, OFF), 0)
        """Requests that used the cache, by what came of it."""
        self.num_replayed_tokens = 0
        self.num_dropped = 0
        """Answers dropped with a version or a tenant."""

    @property
    def num_bytes(self) -> int:
        return sum(int(answers.currsize) for answers in self._by_tenant.values())

    @property
    def num_answers(self) -> int:
        return sum(len(answers) for answers in self._by_tenant.values())

    def resize(self, max_bytes: int) -> None:
        """Keep at most that many bytes from now on; what is over is dropped."""
        self._max_bytes = max_bytes
        if self._most_bytes > max_bytes:
            self._make_room()

    def begin(
        self, requests: Sequence[GenerateRequest], base: Digest, *, ttl_s: float, tenant_bytes: int | None
    ) -> CacheUse:
        """Look up the answers to one HTTP request's engine requests: all of them, or none.

        Args:
            tenant_bytes: what the tenant may have in the cache; None: nothing.
        """
        tenant = requests[0].tenant
        allowed = min(tenant_bytes or 0, int(self._max_bytes * self._limits.result_cache_share))
        if allowed <= 0:
            self.num_by_outcome[OFF] += 1
            return CacheUse(self, tenant, OFF, ttl_s)
        found = self._find(tenant, [key_of(request, base) for request in requests])
        self.num_by_outcome[MISS if found is None else HIT] += 1
        if found is not None:
            answers = [_decode(kept.chunks) for kept in found]
            self.num_replayed_tokens += sum(len(piece.token_ids) for answer in answers for piece in answer)
            return CacheUse(self, tenant, HIT, ttl_s, answers=answers)
        use = CacheUse(self, tenant, MISS, ttl_s, base=base, max_bytes=allowed)
        self._uses.add(use)
        return use

    def _find(self, tenant: TenantId, keys: Sequence[_Key]) -> list[_Kept] | None:
        answers = self._by_tenant.get(tenant)
        found = [] if answers is None else [answers.get(key) for key in keys]
        kept = [one for one in found if one is not None]
        return kept if len(kept) == len(keys) else None

    def put(self, tenant: TenantId, key: _Key, chunks: Sequence[Chunk], *, ttl_s: float, max_bytes: int) -> None:
        """Keep an answer; make room for it among the tenant's, then among those that have most."""
        kept = _Kept(_encode([_piece(chunk) for chunk in chunks]), ttl_s)
        if kept.num_bytes > min(max_bytes, self._limits.max_cached_answer_bytes + _KEPT_BYTES):
            return
        answers = self._by_tenant.get(tenant)
        if answers is None or answers.maxsize != max_bytes:
            # the limit was changed: what is there is used least recently
            older = () if answers is None else tuple(answers.items())
            answers = self._by_tenant[tenant] = TLRUCache(max_bytes, _end, timer=self._clock, getsizeof=_size)
            answers.update((name, one) for name, one in older if one.num_bytes <= max_bytes)
        answers[key] = kept
        self._most_bytes += kept.num_bytes
        if self._most_bytes > self._max_bytes:
            self._make_room()

    def _make_room(self) -> None:
        """Drop what is over, then the least recently used of the tenant that has most."""
        sizes = {name: int(answers.currsize) for name, answers in self._by_tenant.items()}
        total, most = sum(sizes.values()), self._max_bytes
        if total > most:
            most -= int(most * _ROOM_LEFT)
        while total > most:
            name = max(sizes, key=sizes.__getitem__)
            self._by_tenant[name].popitem()
            total -= sizes[name]
            sizes[name] = int(self._by_tenant[name].currsize)
            total += sizes[name]
        for name in [name for name, size in sizes.items() if not size]:
            del self._by_tenant[name]
        self._most_bytes = total

    def drop_adapter(self, owner: TenantId, name: str) -> None:
        """Drop all tenants' answers of an adapter that was changed or deleted."""
        key = name_key(name)
        self._drop(lambda version: version[:2] == (owner, key))

    def drop_version(self, digest: Digest) -> None:
        """Drop the answers of a version whose bytes are gone."""
        self._drop(lambda version: version[2] == digest)

    def drop_tenant(self, tenant: TenantId) -> None:
        """Drop a tenant's answers, and those of its adapters that it granted to others."""
        self.num_dropped += len(self._by_tenant.pop(tenant, ()))
        for use in self._uses:
            use.is_void |= use.tenant == tenant
        self._drop(lambda version: version[0] == tenant)

    def _drop(self, is_gone: Callable[[tuple[TenantId, str, Digest]], bool]) -> None:
        for answers in self._by_tenant.values():
            for key in [key for key in answers if any(map(is_gone, key.versions))]:
                self.num_dropped += answers.pop(key, None) is not None
        for use in self._uses:
            use.is_void |= any(map(is_gone, use.versions))


class CacheUse:
    """Use of the cache by one HTTP request: its answers, or a place for those that are made.

    Attributes:
        outcome: hit, miss, or off where nothing may be kept.
        is_void: a version of the request's was dropped meanwhile, and so is what it makes.
    """

    def __init__(
        self,
        cache: ResultCache,
        tenant: TenantId,
        outcome: str,
        ttl_s: float,
        *,
        answers: Sequence[Sequence[_Piece]] = (),
        base: Digest = Digest(""),
        max_bytes: int = 0,
    ) -> None:
        self._cache = cache
        self.tenant = tenant
        self.outcome = outcome
        self._ttl_s = ttl_s
        self._answers = answers
        self._base = base
        self._max_bytes = max_bytes
        self._versions: set[tuple[TenantId, str, Digest]] = set()
        self.is_void = False

    @property
    def versions(self) -> Iterator[tuple[TenantId, str, Digest]]:
        return iter(self._versions)

    @property
    def headers(self) -> Mapping[str, str]:
        return {HEADER: self.outcome}

    def record(self, request: GenerateRequest) -> Recording | None:
        """Begin to record the answer of an engine request; None: it isn't kept."""
        if self.outcome != MISS:
            return None
        key = key_of(request, self._base)
        self._versions.update(key.versions)
        return Recording(self, key, min(self._max_bytes, LIMITS.max_cached_answer_bytes))

    async def replay(self, index: int, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield an answer's chunks as the engine gave them, but for where they come from."""
        for piece in self._answers[index]:
            # as between two steps: other requests continue
            await asyncio.sleep(0)
            yield Chunk(
                text=piece.text,
                token_ids=piece.token_ids,
                logprobs=piece.logprobs,
                prompt_logprobs=piece.prompt_logprobs,
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                num_cached_tokens=len(request.prompt_token_ids),
                queue_s=0.0,
                adapter_s=0.0,
                prefill_s=0.0,
                is_replayed=True,
            )

    def keep(self, key: _Key, chunks: Sequence[Chunk]) -> None:
        if not self.is_void:
            self._cache.put(self.tenant, key, chunks, ttl_s=self._ttl_s, max_bytes=self._max_bytes)


class Recording:
    """An answer as it comes, as long as it isn't too large to keep."""

    def __init__(self, use: CacheUse, key: _Key, max_bytes: int) -> None:
        self._use = use
        self._key = key
        self._room = max_bytes
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        """Take the answer's next chunk; the last one lets it be kept.

        An answer that its own timeout cut short, or that didn't end by itself, isn't kept: another
        time it's longer.
        """
        if self._room < 0:
            return
        self._room -= _estimate(chunk)
        if self._room < 0:
            self._chunks.clear()
            return
        self._chunks.append(chunk)
        if chunk.finish_reason is not None and chunk.stop_reason != TIMEOUT:
            self._use.keep(self._key, self._chunks)


def _estimate(chunk: Chunk) -> int:
    """Estimate the bytes that a chunk takes: it's written only once the whole answer fits."""
    entries = [entry for entry in (*(chunk.logprobs or ()), *(chunk.prompt_logprobs or ())) if entry is not None]
    candidates = sum(len(entry.top) for entry in entries)
    tokens = _TOKEN_BYTES * len(chunk.token_ids) + _ENTRY_BYTES * len(entries) + _CANDIDATE_BYTES * candidates
    return len(chunk.text) + tokens


def _piece(chunk: Chunk) -> _Piece:
    return _Piece(
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        prompt_logprobs=chunk.prompt_logprobs,
        finish_reason=chunk.finish_reason,
        stop_reason=chunk.stop_reason,
    )
