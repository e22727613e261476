"""Fills a PostgreSQL registry with as many versions as are asked for, by COPY.

A tenant, an adapter and its version are published by the product itself; all other rows are copies
of what it wrote, column by column of its models, with other ids, names, digests, times and states.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import numpy as np
from safetensors.numpy import save
from sqlalchemy import JSON, select
from ulid import ULID

from adapters_store import LocalStore
from loraserve.db.models import Adapter, AdapterVersion, Alias, AuditRow, Base, Grant, ServerRow, Tenant, UsageHour
from loraserve.db.session import Database, utc_now
from loraserve.registry.health.checks import FAILED, PASSED, replace_check, state_of
from loraserve.registry.health.outcome import CertificateOutcome
from loraserve.registry.registry import Registry
from loraserve.registry.storage_totals import set_right
from loraserve.tenancy.identity.tenants import Tenants
from loraserve.types import AdapterRef, BaseSpec, Certificate, Digest, TenantId

ACTOR = "benchmark"
NUM_CONFIGS = 200
"""Different adapter_config.json files: most trainers' are equal."""
NUM_GARBAGE = 1000
"""Blobs in the store that no row refers to."""
NUM_SERVERS = 1000
"""Rows of other servers on the same database."""
VERSIONS_PER_ADAPTER = ((1, 0.6), (2, 0.2), (3, 0.1), (5, 0.07), (10, 0.03))
TRAINERS_SHARE = 0.1
"""Of a tenant's versions, those of its first adapter: a trainer's checkpoints."""
DELETED_ADAPTERS, DELETED_VERSIONS, QUARANTINED_VERSIONS = 0.05, 0.03, 0.002
YEAR_S = 365 * 86_400
_LINES_AT_ONCE = 2000

BASE = BaseSpec(
    id="base",
    digest=Digest("b" * 64),
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=8,
    vocab_size=32,
    max_model_len=64,
    modules={"q_proj": (8, 8), "v_proj": (4, 8)},
    module_paths={"q_proj": "self_attn.q_proj", "v_proj": "self_attn.v_proj"},
    layers_path="model.layers",
    eos_token_ids=(0,),
    dtype="float32",
    quantization="none",
    arithmetic="fp32",
    kernels="onednn",
    instructions="avx2",
    device="cpu",
)


def upload(seed: int, rank: int = 2) -> tuple[bytes, bytes]:
    """A tiny adapter of `BASE`: its config and its weights."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(BASE.num_layers):
        for module, (out_features, in_features) in BASE.modules.items():
            prefix = f"base_model.model.{BASE.layers_path}.{layer}.self_attn.{module}"
            tensors[f"{prefix}.lora_A.weight"] = rng.standard_normal((rank, in_features), dtype=np.float32)
            tensors[f"{prefix}.lora_B.weight"] = rng.standard_normal((out_features, rank), dtype=np.float32)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(BASE.modules)}
    return json.dumps(config).encode(), save(tensors)


async def certify(_: AdapterRef) -> Certificate:
    """A certificate as the engine's are."""
    return Certificate(
        verdict=PASSED,
        max_difference=1.2e-5,
        mean_difference=1.1e-6,
        base_difference=2.3e-5,
        tolerance=1e-3,
        max_effect=3.2,
        top1_agreement=1.0,
        precision_loss=0.0,
        num_probe_tokens=64,
        seconds=0.25,
    )


def make_registry(database: Database, store: LocalStore) -> Registry:
    return Registry(database, store, lambda: BASE, certify=certify)


async def publish(registry: Registry, tenant: TenantId, name: str, seed: int) -> None:
    """Publish an adapter as the HTTP side does."""
    config, weights = upload(seed)
    staged = await registry.uploads.stage(tenant)
    try:
        staged.write(weights)
        await registry.publisher.publish(tenant, name, config, staged, actor=ACTOR)
    finally:
        await registry.uploads.release(tenant, staged)


def weights_blob(number: int) -> Digest:
    return Digest(hashlib.sha256(b"weights %d" % number).hexdigest())


def config_blob(number: int) -> Digest:
    return Digest(hashlib.sha256(b"config %d" % (number % NUM_CONFIGS)).hexdigest())


class ListedStore(LocalStore):
    """A store that lists the blobs of all rows, and holds only those that are written to it.

    A million files would measure the file system, not the registry.
    """

    num_versions = 0
    num_listed = 0
    """Blobs that were listed since this was last set to 0."""

    def exists(self, digest: str) -> bool:
        return True

    def iter_digests(self) -> Iterator[Digest]:
        for digest in self._all():
            self.num_listed += 1
            yield digest

    def _all(self) -> Iterator[Digest]:
        yield from super().iter_digests()
        # A store lists its blobs by digest: the few configs are among the weights.
        num_configs = min(NUM_CONFIGS, self.num_versions)
        every = max(1, self.num_versions // num_configs) if num_configs else 1
        for number in range(self.num_versions):
            if number % every == 0 and number // every < num_configs:
                yield config_blob(number // every)
            yield weights_blob(number)
        yield from (Digest(hashlib.sha256(b"garbage %d" % number).hexdigest()) for number in range(NUM_GARBAGE))


@dataclass(slots=True)
class OneAdapter:
    """An adapter that is to be written."""

    id: str
    tenant: str
    name: str
    num_versions: int
    first_at: float
    deleted_at: float | None
    has_canary: bool = False
    """Whether it has an alias that splits requests between two versions."""


@dataclass(slots=True)
class Filled:
    """What was written: the tenants from the largest to the smallest, and the numbers of rows."""

    tenants: list[tuple[TenantId, str]]
    adapters_of: dict[str, list[OneAdapter]]
    num_rows: dict[str, int] = field(default_factory=dict)

    def live(self, tenant: TenantId) -> list[OneAdapter]:
        return [one for one in self.adapters_of[tenant] if one.deleted_at is None]


def tenant_sizes(num_versions: int, num_tenants: int) -> list[int]:
    """Versions of each tenant by Zipf's law; each has one at least."""
    weights = [1 / rank for rank in range(1, num_tenants + 1)]
    left = num_versions - num_tenants
    sizes = [1 + int(left * weight / sum(weights)) for weight in weights]
    sizes[0] += num_versions - sum(sizes)
    return sizes


def version_counts(size: int, rng: random.Random) -> Iterator[int]:
    """Numbers of versions of a tenant's adapters, `size` in all."""
    trainers = max(1, int(size * TRAINERS_SHARE))
    yield trainers
    left = size - trainers
    numbers, weights = zip(*VERSIONS_PER_ADAPTER, strict=True)
    while left:
        count = min(left, rng.choices(numbers, weights)[0])
        yield count
        left -= count


def _id(at: float) -> str:
    return str(ULID.from_timestamp(at))


def _time(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


class Copy:
    """Rows of one table as COPY's text, by the columns of its model."""

    def __init__(self, model: type[Base]) -> None:
        table = model.__table__
        self.name = str(table.name)
        # the database numbers audit rows itself
        self.columns = [column for column in table.columns if column.autoincrement is not True]
        self._encoders = [_encoder(column.type) for column in self.columns]
        self._keys = [table_key(model, column) for column in self.columns]
        self.num_rows = 0

    def line(self, row: dict[str, Any]) -> str:
        self.num_rows += 1
        values = (
            "\\N" if (value := row[key]) is None else encode(value)
            for key, encode in zip(self._keys, self._encoders, strict=True)
        )
        return "\t".join(values) + "\n"

    async def run(self, connection: asyncpg.Connection, rows: Iterable[dict[str, Any]]) -> None:
        async def source() -> AsyncIterator[bytes]:
            lines: list[str] = []
            for row in rows:
                lines.append(self.line(row))
                if len(lines) >= _LINES_AT_ONCE:
                    yield "".join(lines).encode()
                    lines.clear()
            yield "".join(lines).encode()

        names = [str(column.name) for column in self.columns]
        await connection.copy_to_table(self.name, source=source(), columns=names, format="text")


def table_key(model: type[Base], column: Any) -> str:
    """The model's attribute of a column."""
    return str(model.__mapper__.get_property_by_column(column).key)


def _encoder(kind: Any) -> Callable[[Any], str]:
    if isinstance(kind, JSON):
        return lambda value: json.dumps(value).replace("\\", "\\\\")
    if kind.python_type is datetime:
        return lambda value: value.isoformat()
    if kind.python_type is bool:
        return lambda value: "t" if value else "f"
    return lambda value: str(value).replace("\\", "\\\\")


async def templates(database: Database, registry: Registry) -> dict[type[Base], list[dict[str, Any]]]:
    """The rows that the product wrote for a tenant and its first published adapter."""
    record = await Tenants(database, lambda _: None).create("template", actor=ACTOR)
    await publish(registry, record.id, "template", 0)
    found: dict[type[Base], list[dict[str, Any]]] = {}
    async with database.read() as session:
        for model in (Tenant, Adapter, AdapterVersion, Alias, AuditRow):
            keys = [column.key for column in model.__mapper__.column_attrs]
            query = select(model).order_by(*model.__mapper__.primary_key)
            found[model] = [{key: getattr(row, key) for key in keys} for row in await session.scalars(query)]
    return found


async def fill(url: str, database: Database, registry: Registry, num_versions: int, num_tenants: int) -> Filled:
    """Write tenants, adapters, versions, aliases, grants, audit, usage and servers; analyzed."""
    found = await templates(database, registry)
    rng = random.Random(1)
    now = utc_now().timestamp()
    tenants = [(TenantId(_id(now - YEAR_S - number)), f"tenant-{number:05d}") for number in range(num_tenants)]
    adapters_of: dict[str, list[OneAdapter]] = {}
    for (tenant, _), size in zip(tenants, tenant_sizes(num_versions, num_tenants), strict=True):
        adapters_of[tenant] = []
        for number, count in enumerate(version_counts(size, rng)):
            at = now - YEAR_S + rng.random() * 0.9 * YEAR_S
            is_deleted = number > 0 and rng.random() < DELETED_ADAPTERS
            # half of them can be restored
            deleted_at = now - rng.random() * 14 * 86_400 if is_deleted else None
            adapters_of[tenant].append(OneAdapter(_id(at), tenant, f"adapter-{number:06d}", count, at, deleted_at))
    filled = Filled(tenants, adapters_of)
    connection = await asyncpg.connect(url)
    try:
        for model, rows in _tables(filled, found, rng, now):
            copy = Copy(model)
            await copy.run(connection, rows)
            filled.num_rows[copy.name] = copy.num_rows
        await _write_totals(database)
        await connection.execute("VACUUM (ANALYZE)")
    finally:
        await connection.close()
    return filled


async def _write_totals(database: Database) -> None:
    """Write the tenants' totals of the rows that were copied past the product."""
    after: str | None = ""
    while after is not None:
        async with database.write() as session:
            _, after = await set_right(session, after)


def _tables(
    filled: Filled, found: dict[type[Base], list[dict[str, Any]]], rng: random.Random, now: float
) -> Iterator[tuple[type[Base], Iterable[dict[str, Any]]]]:
    tenant, adapter = found[Tenant][0], found[Adapter][0]
    # quotas are checked only where there is one
    limits = {**tenant["limits"], "max_stored_bytes": 1 << 50}
    yield Tenant, ({**tenant, "id": ident, "name": name, "limits": limits} for ident, name in filled.tenants)
    everyone = [one for tenant_id, _ in filled.tenants for one in filled.adapters_of[tenant_id]]
    yield Adapter, (_adapter(adapter, one, now) for one in everyone)
    del everyone
    versions = _version_times(filled, now)
    yield AdapterVersion, _versions(found[AdapterVersion][0], versions, rng, now)
    yield Alias, _aliases(found[Alias][0], filled, rng)
    yield Grant, _grants(filled, now)
    yield AuditRow, _audit(found[AuditRow], versions)
    yield UsageHour, _usage(filled, now)
    yield ServerRow, _servers(now)


def _servers(now: float) -> Iterator[dict[str, Any]]:
    for number in range(NUM_SERVERS):
        yield {"id": _id(now - number), "num_beats": 1, "started_at": _time(now), "rates": {}}


def _adapter(row: dict[str, Any], one: OneAdapter, now: float) -> dict[str, Any]:
    changed: dict[str, Any] = {"id": one.id, "tenant_id": one.tenant, "name": one.name, "name_key": one.name}
    changed |= {"last_version": one.num_versions, "revision": 3 * one.num_versions}
    changed |= {"created_at": _time(one.first_at), "updated_at": _time(now), "deleted_at": _time(one.deleted_at)}
    # a tenth has a version to fall back to
    return {**row, **changed, "fallback": "1" if one.num_versions > 1 and one.first_at % 10 < 1 else None}


def _version_times(filled: Filled, now: float) -> list[tuple[float, int, OneAdapter]]:
    """All versions in the order in which they were published: a tenant's are apart in the table."""
    found = []
    for adapters in filled.adapters_of.values():
        for one in adapters:
            step = 0.1 * YEAR_S / one.num_versions
            found += [(one.first_at + step * index, index + 1, one) for index in range(one.num_versions)]
    found.sort(key=lambda item: item[0])
    return found


def _versions(
    row: dict[str, Any], versions: list[tuple[float, int, OneAdapter]], rng: random.Random, now: float
) -> Iterator[dict[str, Any]]:
    failed = replace_check(row["checks"], CertificateOutcome(FAILED, "logits differ by 3").as_check())
    bad = {"checks": failed, "state": state_of(failed)}
    for number, (at, index, one) in enumerate(versions):
        is_spare = 1 < index < one.num_versions
        deleted_at = one.deleted_at
        if deleted_at is None and is_spare and rng.random() < DELETED_VERSIONS:
            deleted_at = now - rng.random() * 14 * 86_400
        state = bad if is_spare and rng.random() < QUARANTINED_VERSIONS / TRAINERS_SHARE else {}
        blob = weights_blob(number)
        yield {
            **row,
            **state,
            "id": _id(at),
            "adapter_id": one.id,
            "number": index,
            # another hash, as a canonical digest isn't the file's
            "digest": blob[::-1],
            "config_blob": config_blob(number),
            "weights_blob": blob,
            "chat_template_blob": config_blob(number) if number % 50 == 0 else None,
            "chat_template_bytes": 2048 if number % 50 == 0 else None,
            "size_bytes": 20 << 20,
            "created_at": _time(at),
            "deleted_at": _time(deleted_at),
        }


def _aliases(row: dict[str, Any], filled: Filled, rng: random.Random) -> Iterator[dict[str, Any]]:
    for adapters in filled.adapters_of.values():
        for one in adapters:
            last = one.num_versions
            yield {**row, "adapter_id": one.id, "version": last, "revision": 3 * last}
            if last > 1 and rng.random() < 0.2:
                split = [{"version": last, "weight": 9.0}, {"version": 1, "weight": 1.0}]
                shadow = {"version": 1, "share": 0.1} if rng.random() < 0.5 else None
                one.has_canary = True
                yield {**row, "adapter_id": one.id, "name": "canary", "version": last, "split": split, "shadow": shadow}


def _grants(filled: Filled, now: float) -> Iterator[dict[str, Any]]:
    """The largest tenant's first adapters are granted to ten others each."""
    others = [ident for ident, _ in filled.tenants[1:11]]
    for one in filled.adapters_of[filled.tenants[0][0]][:500]:
        for other in others:
            yield {"adapter_id": one.id, "tenant_id": other, "created_at": _time(now), "created_by": ACTOR}


def _audit(rows: list[dict[str, Any]], versions: list[tuple[float, int, OneAdapter]]) -> Iterator[dict[str, Any]]:
    """What each publish writes: of the version, and of the alias that moves to it."""
    kinds = [row for row in rows if row["action"] in ("version.publish", "alias.move")]
    for at, index, one in versions:
        for row in kinds:
            name = f"{one.name}@{index}" if row["action"] == "version.publish" else f"{one.name}@live"
            yield {**row, "at": _time(at), "tenant_id": one.tenant, "target": name}


def _usage(filled: Filled, now: float) -> Iterator[dict[str, Any]]:
    """Half as many hours of use as a tenant has versions, in the last thirty days."""
    last = datetime.fromtimestamp(now, UTC).replace(minute=0, second=0, microsecond=0)
    counts = {"num_requests": 9, "prompt_tokens": 900, "cached_tokens": 90, "completion_tokens": 450}
    counts |= {"undelivered_tokens": 3, "num_cached_requests": 0, "cached_completion_tokens": 0}
    for tenant, adapters in filled.adapters_of.items():
        for number in range(sum(one.num_versions for one in adapters) // 2):
            turn, place = divmod(number, len(adapters))
            one, hour = adapters[place], last - timedelta(hours=(place + turn) % 720)
            key = {"tenant_id": tenant, "hour": hour, "owner": "", "adapter": one.name}
            yield {**key, "version": one.num_versions, "price": "EUR 0.5 0.05 1.5", **counts}
