"""Evaluations that are kept with versions, and aliases that move by them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from adapters_store import LocalStore
from loraserve.db.session import Database
from loraserve.errors import (
    AdapterNotFound,
    AdapterOfAnotherBase,
    EngineUnavailable,
    InvalidRequest,
    NotBetter,
    NotEvaluated,
    VersionNotFound,
)
from loraserve.limits import LIMITS
from loraserve.registry.catalog.evaluations import MeasuredEvaluation
from loraserve.registry.records import AliasTarget, SplitPart
from loraserve.registry.registry import Registry
from loraserve.types import BaseSpec, TenantId

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class SteppingClock:
    """A clock that moves on by a second with each look."""

    def __init__(self) -> None:
        self.at = NOON

    def __call__(self) -> datetime:
        self.at += timedelta(seconds=1)
        return self.at


@pytest.fixture
def registry(database: Database, store: LocalStore, small_base: BaseSpec) -> Registry:
    return Registry(database, store, lambda: small_base, clock=SteppingClock())


def make_evaluation(data: int = 1, **fields: Any) -> MeasuredEvaluation:
    values: dict[str, Any] = {
        "data_sha256": f"{data:064x}",
        "data_name": f"data-{data}.jsonl",
        "num_lines": 40,
        "metrics": {"exact_match": 0.5},
        "base_metrics": {"exact_match": 0.1},
        "settings": {"max_tokens": "64"},
    }
    return MeasuredEvaluation(**(values | fields))


Keep = Callable[..., Any]


@pytest.fixture
async def keep(publish: Any, registry: Registry, acme: TenantId) -> Keep:
    """A function that keeps a version's value of exact_match on some data.

    There are three versions of sql, and `live` points to the first.
    """
    for seed in range(3):
        await publish(seed=seed)
    await registry.aliases.set(acme, "sql", "live", AliasTarget(1), actor="x")

    async def run(number: int, value: float, data: int = 1, **fields: Any) -> None:
        measured = make_evaluation(data, **({"metrics": {"exact_match": value}} | fields))
        await registry.evaluations.put(acme, "sql", number, measured, actor="key")

    return run


async def promote(registry: Registry, tenant: TenantId, number: int, metric: str = "exact_match") -> int:
    record, _ = await registry.aliases.set(tenant, "sql", "live", AliasTarget(number), actor="x", if_better=metric)
    return record.version


async def test_evaluation_is_kept_with_version_and_conditions(
    publish: Any, registry: Registry, acme: TenantId, small_base: BaseSpec
) -> None:
    await publish()
    assert (await registry.get_version(acme, "sql", 1)).evaluation is None
    record, is_new = await registry.evaluations.put(acme, "SQL", 1, make_evaluation(), actor="key")
    assert is_new
    assert (record.metrics, record.base_metrics) == ({"exact_match": 0.5}, {"exact_match": 0.1})
    assert (record.base_digest, record.arithmetic) == (small_base.digest, small_base.arithmetic)
    assert (record.created_by, record.num_lines) == ("key", 40)
    assert (await registry.get_version(acme, "sql", 1)).evaluation == record
    assert [one.evaluation for one in (await registry.list_versions(acme, "sql")).items] == [record]
    (entry,) = (row for row in (await registry.list_audit(acme)).items if row.action == "version.evaluate")
    assert (entry.target, entry.actor) == ("sql@1", "key")
    assert entry.detail == {"data_sha256": record.data_sha256, "num_lines": 40}


async def test_later_evaluation_replaces_earlier_on_same_data(keep: Keep, registry: Registry, acme: TenantId) -> None:
    await keep(1, 0.25, data=1)
    await keep(1, 0.5, data=2)
    await keep(1, 0.75, data=1, data_name="renamed.jsonl")
    found = (await registry.evaluations.list(acme, "sql", 1)).items
    assert [(one.data_name, one.metrics["exact_match"]) for one in found] == [
        ("renamed.jsonl", 0.75),
        ("data-2.jsonl", 0.5),
    ]
    newest = (await registry.get_version(acme, "sql", 1)).evaluation
    assert newest == found[0]
    assert (await registry.evaluations.list(acme, "sql", 2)).items == ()


async def test_list_of_evaluations_comes_in_pages(keep: Keep, registry: Registry, acme: TenantId) -> None:
    for data in range(1, 6):
        await keep(1, 0.5, data=data)
    found, cursor = [], None
    while True:
        page = await registry.evaluations.list(acme, "sql", 1, limit=2, cursor=cursor)
        found += [one.data_name for one in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == [f"data-{data}.jsonl" for data in (5, 4, 3, 2, 1)]
    with pytest.raises(InvalidRequest, match="of this list"):
        await registry.evaluations.list(acme, "sql", 1, cursor="bm90IG91cnM")


async def test_oldest_evaluations_make_room_for_new(keep: Keep, registry: Registry, acme: TenantId) -> None:
    for data in range(LIMITS.max_evaluations_per_version + 3):
        await keep(1, 0.5, data=data)
    await keep(2, 0.5)
    found = (await registry.evaluations.list(acme, "sql", 1, limit=LIMITS.max_page_size)).items
    assert len(found) == LIMITS.max_evaluations_per_version
    assert {one.data_name for one in found}.isdisjoint({"data-0.jsonl", "data-1.jsonl", "data-2.jsonl"})
    assert len((await registry.evaluations.list(acme, "sql", 2)).items) == 1


async def test_foreign_version_takes_and_shows_no_evaluation(
    keep: Keep, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    await keep(1, 0.5)
    for tenant, name, number, error in (
        (globex, "sql", 1, AdapterNotFound),
        (acme, "none", 1, AdapterNotFound),
        (acme, "sql", 9, VersionNotFound),
    ):
        with pytest.raises(error):
            await registry.evaluations.put(tenant, name, number, make_evaluation(), actor="x")
        with pytest.raises(error):
            await registry.evaluations.list(tenant, name, number)


async def test_version_of_foreign_base_takes_no_evaluation(
    keep: Keep, database: Database, store: LocalStore, acme: TenantId, small_base: BaseSpec
) -> None:
    other = Registry(database, store, lambda: msgspec.structs.replace(small_base, digest="f" * 64))
    with pytest.raises(AdapterOfAnotherBase, match="sql@1 was made for another base"):
        await other.evaluations.put(acme, "sql", 1, make_evaluation(), actor="x")

    def away() -> BaseSpec:
        raise EngineUnavailable("The base is loading.")

    with pytest.raises(EngineUnavailable):
        await Registry(database, store, away).evaluations.put(acme, "sql", 1, make_evaluation(), actor="x")


async def test_restored_version_has_earlier_evaluations(keep: Keep, registry: Registry, acme: TenantId) -> None:
    await keep(2, 0.5)
    await registry.delete_version(acme, "sql", 2, actor="x")
    with pytest.raises(VersionNotFound):
        await registry.evaluations.list(acme, "sql", 2)
    restored = await registry.restorer.restore_version(acme, "sql", 2, actor="x")
    assert restored.evaluation is not None
    assert restored.evaluation.metrics == {"exact_match": 0.5}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"data_sha256": "A" * 64}, "sha256"),
        ({"data_name": ""}, "data_name"),
        ({"data_name": "a\nb"}, "data_name"),
        ({"data_name": "x" * 256}, "data_name"),
        ({"num_lines": 0}, "num_lines"),
        ({"num_lines": 1 << 31}, "num_lines"),
        ({"metrics": {}}, "metrics"),
        ({"metrics": {"Exact Match": 1.0}}, "metrics"),
        ({"metrics": {"exact_match": float("nan")}}, "metrics.exact_match"),
        ({"metrics": {f"m{number}": 1.0 for number in range(LIMITS.max_evaluation_metrics + 1)}}, "metrics"),
        ({"base_metrics": {"exact_match": float("inf")}}, "base_metrics.exact_match"),
        ({"settings": {"": "x"}}, "settings"),
        ({"settings": {"stop": "x" * 257}}, "settings.stop"),
        ({"settings": {"stop": "\x1b"}}, "settings.stop"),
        ({"settings": {f"s{number}": "" for number in range(LIMITS.max_evaluation_settings + 1)}}, "settings"),
    ],
)
def test_invalid_evaluation_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_evaluation(**fields)
    assert caught.value.param == param


async def test_alias_moves_only_to_better_version(keep: Keep, registry: Registry, acme: TenantId) -> None:
    await keep(1, 0.5)
    await keep(2, 0.5)
    await keep(3, 0.75)
    with pytest.raises(NotBetter, match=r"sql@2 isn't better than sql@1, to which live points: exact_match on data-1"):
        await promote(registry, acme, 2)
    assert await promote(registry, acme, 3) == 3
    # a repeated move isn't refused
    assert await promote(registry, acme, 3) == 3
    with pytest.raises(NotBetter, match=r"is 0\.5, and 0\.75 for version 3"):
        await promote(registry, acme, 1)
    assert (await registry.aliases.get(acme, "sql", "live")).version == 3


async def test_better_version_is_worse_on_no_data(keep: Keep, registry: Registry, acme: TenantId) -> None:
    for data, values in ((1, (0.5, 0.9)), (2, (0.5, 0.4))):
        await keep(1, values[0], data=data)
        await keep(2, values[1], data=data)
    await keep(2, 0.0, data=3)
    with pytest.raises(NotBetter, match=r"data-2\.jsonl"):
        await promote(registry, acme, 2)
    await keep(2, 0.5, data=2)
    assert await promote(registry, acme, 2) == 2


async def test_unevaluated_version_is_not_promoted(keep: Keep, registry: Registry, acme: TenantId) -> None:
    with pytest.raises(NotEvaluated, match="sql@2 has no evaluation with exact_match") as caught:
        await promote(registry, acme, 2)
    assert "loraserve adapter eval sql@1,2 DATA.jsonl" in str(caught.value)
    await keep(2, 0.9, metrics={"exact_match": 0.9, "accuracy": 1.0})
    with pytest.raises(NotEvaluated, match="sql@1 has no evaluation with exact_match"):
        await promote(registry, acme, 2)
    await keep(1, 0.5)
    with pytest.raises(NotEvaluated, match="sql@1 has no evaluation with accuracy; it has exact_match"):
        await promote(registry, acme, 2, "accuracy")
    with pytest.raises(InvalidRequest) as refused:
        await promote(registry, acme, 2, "Exact Match")
    assert refused.value.param == "if_better"
    assert (await registry.aliases.get(acme, "sql", "live")).version == 1


async def test_evaluations_on_different_data_are_not_compared(keep: Keep, registry: Registry, acme: TenantId) -> None:
    await keep(1, 0.5, data=1)
    await keep(2, 0.9, data=2)
    with pytest.raises(NotEvaluated, match=r"on the same data: 2 has data-2\.jsonl") as caught:
        await promote(registry, acme, 2)
    assert "1 has data-1.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"settings": {"max_tokens": "8"}}, "setting max_tokens 8 and 64"),
        ({"settings": {}}, "setting max_tokens none and 64"),
        ({"num_lines": 39}, "lines 39 and 40"),
    ],
)
async def test_evaluations_under_different_conditions_are_not_compared(
    keep: Keep, registry: Registry, acme: TenantId, fields: dict[str, Any], named: str
) -> None:
    await keep(1, 0.5)
    await keep(2, 0.9, **fields)
    with pytest.raises(NotEvaluated, match=f"under other conditions: {named}"):
        await promote(registry, acme, 2)


async def test_evaluations_in_different_arithmetic_are_not_compared(
    keep: Keep, registry: Registry, database: Database, store: LocalStore, acme: TenantId, small_base: BaseSpec
) -> None:
    await keep(1, 0.5)
    rounded = Registry(database, store, lambda: msgspec.structs.replace(small_base, arithmetic="w4a16"))
    better = make_evaluation(metrics={"exact_match": 0.9})
    await rounded.evaluations.put(acme, "sql", 2, better, actor="x")
    with pytest.raises(NotEvaluated, match="arithmetic w4a16 and"):
        await promote(registry, acme, 2)


async def test_promotion_over_split_compares_each_version(keep: Keep, registry: Registry, acme: TenantId) -> None:
    split = AliasTarget.over([SplitPart(1, 90), SplitPart(2, 10)])
    await registry.aliases.set(acme, "sql", "live", split, actor="x")
    await keep(1, 0.5)
    await keep(2, 0.9)
    await keep(3, 0.7)
    with pytest.raises(NotBetter, match="sql@3 isn't better than sql@2"):
        await promote(registry, acme, 3)
    # the better of the two takes all
    assert await promote(registry, acme, 2) == 2
    with pytest.raises(InvalidRequest) as refused:
        await registry.aliases.set(acme, "sql", "live", split, actor="x", if_better="exact_match")
    assert refused.value.param == "if_better"


async def test_new_alias_has_no_version_to_compare(keep: Keep, registry: Registry, acme: TenantId) -> None:
    await keep(2, 0.9)
    with pytest.raises(NotEvaluated, match="sql@canary doesn't exist"):
        await registry.aliases.set(acme, "sql", "canary", AliasTarget(2), actor="x", if_better="exact_match")
