"""The result cache's bounds: bytes, shares, times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from stopped_clock import StoppedClock

from loraserve.api.result_cache import HIT, MISS, OFF, CacheUse, ResultCache
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.output import Chunk
from loraserve.limits import LIMITS
from loraserve.types import TIMEOUT, AdapterPart, AdapterRef, Digest, FinishReason, RequestId, SamplingParams, TenantId

KIB = 1 << 10
BASE = Digest("b" * 64)
ACME, OTHER = TenantId("acme"), TenantId("other")


def make_request(number: int, tenant: TenantId = ACME, adapter: AdapterRef | None = None) -> GenerateRequest:
    params = SamplingParams(temperature=0.0)
    return GenerateRequest(
        request_id=RequestId(f"r-{number}"), tenant=tenant, adapter=adapter, prompt_token_ids=(number,), params=params
    )


def make_adapter(name: str = "sql", tenant: TenantId = ACME, parts: tuple[AdapterPart, ...] = ()) -> AdapterRef:
    digest = Digest(name * 8)
    return AdapterRef(
        tenant=tenant, name=name, version=1, digest=digest, config_blob=digest, weights_blob=digest, parts=parts
    )


def make_chunk(text: str, *, stop_reason: str | None = None, reason: FinishReason | None = FinishReason.STOP) -> Chunk:
    return Chunk(
        text=text,
        token_ids=(1,),
        logprobs=None,
        prompt_logprobs=None,
        finish_reason=reason,
        stop_reason=stop_reason,
        num_cached_tokens=0,
        queue_s=1.0,
        adapter_s=1.0,
        prefill_s=1.0,
    )


def make_cache(max_bytes: int = 64 * KIB, *, share: float = 0.5, clock: StoppedClock | None = None) -> ResultCache:
    return ResultCache(max_bytes, limits=replace(LIMITS, result_cache_share=share), monotonic=clock or StoppedClock())


def use(
    cache: ResultCache, requests: Sequence[GenerateRequest], *, ttl_s: float = 60.0, allowed: int = 1 << 30
) -> CacheUse:
    return cache.begin(requests, BASE, ttl_s=ttl_s, tenant_bytes=allowed)


def keep(cache: ResultCache, request: GenerateRequest, chunk: Chunk | None = None, **options: float) -> None:
    recording = use(cache, [request], **options).record(request)  # type: ignore[arg-type]
    assert recording is not None
    recording.add(chunk or make_chunk("x" * 3000))


def is_kept(cache: ResultCache, request: GenerateRequest) -> bool:
    return use(cache, [request]).outcome == HIT


def test_answer_is_found_until_ttl_expires() -> None:
    clock = StoppedClock()
    cache = make_cache(clock=clock)
    keep(cache, make_request(1), ttl_s=10.0)
    clock.now_s = 9.0
    assert is_kept(cache, make_request(1))
    clock.now_s = 10.0
    assert not is_kept(cache, make_request(1))
    assert (cache.num_answers, cache.num_bytes) == (0, 0)


def test_tenant_over_share_loses_least_recently_used_answers() -> None:
    cache = make_cache(64 * KIB)
    for number in range(20):
        keep(cache, make_request(number))
        assert is_kept(cache, make_request(0))
    assert cache.num_bytes <= 32 * KIB
    assert is_kept(cache, make_request(19))
    assert not is_kept(cache, make_request(1))


def test_tenant_filling_cache_does_not_evict_smaller_tenant() -> None:
    cache = make_cache(64 * KIB, share=1.0)
    keep(cache, make_request(0, OTHER))
    for number in range(100):
        keep(cache, make_request(number))
        assert cache.num_bytes <= 64 * KIB
    assert is_kept(cache, make_request(0, OTHER))
    assert is_kept(cache, make_request(99))


def test_zero_server_or_tenant_capacity_disables_cache() -> None:
    for cache, allowed in ((make_cache(0), 1 << 20), (make_cache(), 0)):
        assert use(cache, [make_request(1)], allowed=allowed).outcome == OFF
        assert use(cache, [make_request(1)], allowed=allowed).record(make_request(1)) is None


def test_lowered_limit_evicts_answers_already_cached() -> None:
    cache = make_cache(64 * KIB)
    for number in range(8):
        keep(cache, make_request(number))
    keep(cache, make_request(9), allowed=8 * KIB)
    assert cache.num_bytes <= 8 * KIB
    assert is_kept(cache, make_request(9))


def test_large_unfinished_or_timed_out_answer_is_uncached() -> None:
    cache = make_cache(64 * KIB)
    keep(cache, make_request(1), make_chunk("x" * 40 * KIB))
    keep(cache, make_request(2), make_chunk("x", reason=None))
    keep(cache, make_request(3), make_chunk("x", stop_reason=TIMEOUT, reason=FinishReason.LENGTH))
    assert cache.num_answers == 0


def test_answers_are_found_only_for_all_choices_together() -> None:
    cache = make_cache()
    keep(cache, make_request(1))
    assert use(cache, [make_request(1), make_request(2)]).outcome == MISS
    keep(cache, make_request(2))
    assert use(cache, [make_request(1), make_request(2)]).outcome == HIT


@pytest.mark.parametrize("is_sum", [False, True])
def test_adapter_removal_drops_answers_of_all_askers(is_sum: bool) -> None:
    cache, adapter = make_cache(), make_adapter("sql")
    asked = make_adapter("sum", OTHER, (AdapterPart(adapter=adapter, weight=0.5),)) if is_sum else adapter
    keep(cache, make_request(1, OTHER, asked))
    keep(cache, make_request(1, OTHER, make_adapter("sqm")))
    keep(cache, make_request(1, OTHER))
    cache.drop_adapter(OTHER, "sql")
    assert (cache.num_answers, cache.num_dropped) == (3, 0)
    cache.drop_adapter(ACME, "sql")
    assert not is_kept(cache, make_request(1, OTHER, asked))
    assert (cache.num_answers, cache.num_dropped) == (2, 1)
    cache.drop_version(Digest("sqm" * 8))
    assert (cache.num_answers, cache.num_dropped) == (1, 2)


def test_answer_generated_during_adapter_removal_is_not_cached() -> None:
    cache, request = make_cache(), make_request(1, adapter=make_adapter("sql"))
    running = use(cache, [request])
    recording = running.record(request)
    assert recording is not None
    recording.add(make_chunk("a", reason=None))
    cache.drop_adapter(ACME, "sql")
    recording.add(make_chunk("b"))
    assert cache.num_answers == 0
