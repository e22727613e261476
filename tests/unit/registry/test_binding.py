"""What a request is bound to: a split's version by who asks, a fallback where the version is in
quarantine, a shadow beside it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from loraserve.errors import AdapterOfAnotherBase, AdapterQuarantined
from loraserve.registry.binding import Fallback, Route, Shadow, SplitTarget, Target
from loraserve.registry.records import QUARANTINED, READY
from loraserve.types import AdapterRef, BaseSpec, Digest, TenantId

SERVED = BaseSpec(
    id="org/base",
    digest=Digest("b" * 64),
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=8,
    vocab_size=32,
    max_model_len=64,
    modules={},
    module_paths={},
    layers_path="model.layers",
    eos_token_ids=(0,),
    dtype="float32",
    quantization="none",
)
OTHER = Digest("c" * 64)


def make_target(version: int, state: str = READY, base: Digest | None = None) -> Target:
    digest = Digest(f"{version:064x}")
    ref = AdapterRef(
        tenant=TenantId("t"), name="sql", version=version, digest=digest, config_blob=digest, weights_blob=digest
    )
    return Target(ref, datetime(2026, 1, 1, tzinfo=UTC), state, (), SERVED.digest if base is None else base, SERVED)


def make_split(**weights: float) -> Route:
    split = tuple(SplitTarget(make_target(int(name[1:])), weight) for name, weight in weights.items())
    return Route("an adapter", "live", max(split, key=lambda part: part.weight).target, split)


def never() -> float:
    raise AssertionError("nothing is drawn for who is known")


def test_user_keeps_version_while_split_is_unchanged() -> None:
    route = make_split(v3=90, v4=10)
    chosen = {user: route.choose(user, never).ref.version for user in map(str, range(200))}
    assert {user: route.choose(user, never).ref.version for user in chosen} == chosen
    assert set(chosen.values()) == {3, 4}


def test_users_are_spread_by_the_weights() -> None:
    route = make_split(v1=5, v2=3, v3=2)
    counts = Counter(route.choose(f"user-{number}", never).ref.version for number in range(10_000))
    # four standard deviations of a binomial of 10,000
    assert [abs(counts[version] - 10_000 * share) < 200 for version, share in ((1, 0.5), (2, 0.3), (3, 0.2))] == [
        True
    ] * 3


def test_growing_canary_only_gains_users() -> None:
    users = list(map(str, range(500)))
    on_canary = [
        {user for user in users if make_split(v3=100 - share, v4=share).choose(user, never).ref.version == 4}
        for share in (10, 25, 60)
    ]
    assert all(before < after for before, after in pairwise(on_canary))


def test_user_assignment_differs_across_aliases_and_adapters() -> None:
    route = make_split(v1=50, v2=50)

    def placed(route: Route) -> list[int]:
        return [route.choose(str(user), never).ref.version for user in range(64)]

    assert len({tuple(placed(one)) for one in (route, replace(route, alias="b"), replace(route, adapter_id="c"))}) == 3


def test_without_a_user_each_request_is_drawn() -> None:
    route = make_split(v3=90, v4=10)
    assert [route.choose(None, lambda x=x: x).ref.version for x in (0.0, 0.89, 0.91, 0.999_999)] == [3, 3, 4, 4]


def test_quarantined_version_yields_to_fallback_naming_version() -> None:
    route = Route("a", "", make_target(2, QUARANTINED), fallback=make_target(1), shadow=make_target(3))
    binding = route.bind(None, never)
    assert (binding.adapter, binding.fell_back_from) == (make_target(1).ref, make_target(2).ref)
    assert (binding.fell_back_for, binding.fallback, binding.shadow) == ("adapter_quarantined", None, None)
    to_base = replace(route, fallback=None, is_base_fallback=True).bind(None, never)
    assert (to_base.adapter, to_base.fell_back_from) == (None, make_target(2).ref)


@pytest.mark.parametrize("fallback", [None, make_target(1, QUARANTINED), make_target(2, QUARANTINED)])
def test_a_quarantine_without_a_usable_fallback_is_refused(fallback: Target | None) -> None:
    route = Route("a", "", make_target(2, QUARANTINED), fallback=fallback)
    with pytest.raises(AdapterQuarantined, match="sql@2"):
        route.bind(None, never)
    assert not route.has_fallback


def test_servable_version_keeps_fallback_for_failed_load() -> None:
    route = Route("a", "", make_target(2), fallback=make_target(1))
    assert route.bind(None, never).fallback == Fallback(make_target(1).ref)
    assert replace(route, fallback=make_target(2)).bind(None, never).fallback is None
    assert replace(route, is_base_fallback=True).bind(None, never).fallback == Fallback(None)


def test_shadow_is_different_version_outside_quarantine() -> None:
    route = Route("a", "live", make_target(2), shadow=make_target(3), shadow_share=0.25)
    assert route.bind(None, never).shadow == Shadow(make_target(3).ref, "a", "live", 0.25)
    assert replace(route, shadow=make_target(3, QUARANTINED)).bind(None, never).shadow is None
    assert replace(route, shadow=make_target(2)).bind(None, never).shadow is None


def test_version_of_other_base_yields_to_fallback() -> None:
    route = Route("a", "", make_target(2, base=OTHER), fallback=make_target(1), shadow=make_target(3))
    binding = route.bind(None, never)
    assert (binding.adapter, binding.fell_back_from) == (make_target(1).ref, make_target(2).ref)
    assert (binding.fell_back_for, binding.fallback, binding.shadow) == ("adapter_base_mismatch", None, None)
    assert route.has_fallback


@pytest.mark.parametrize("state", [READY, QUARANTINED])
def test_base_mismatch_is_reported_before_version_state(state: str) -> None:
    for fallback in (None, make_target(1, base=OTHER)):
        with pytest.raises(AdapterOfAnotherBase, match="sql@2"):
            Route("a", "", make_target(2, state, base=OTHER), fallback=fallback).bind(None, never)


def test_fallback_and_shadow_of_other_base_are_ignored() -> None:
    other = make_target(3, base=OTHER)
    binding = Route("a", "live", make_target(2), fallback=other, shadow=other, shadow_share=1.0).bind(None, never)
    assert (binding.adapter, binding.fallback, binding.shadow) == (make_target(2).ref, None, None)
