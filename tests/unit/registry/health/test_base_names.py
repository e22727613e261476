"""Name of the base in an adapter's config: compared sensibly, a warning where it is another's, a
refusal where that is wished.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from adapters_store import LocalStore
from loraserve.db.session import Database
from loraserve.errors import AdapterBaseMismatch
from loraserve.registry.health.base_names import BaseNames
from loraserve.registry.records import VersionRecord
from loraserve.registry.registry import Registry
from loraserve.types import BaseSpec, Digest, TenantId

DIGEST = "b" * 64


@pytest.fixture
def base(small_base: BaseSpec) -> BaseSpec:
    return msgspec.structs.replace(small_base, id="meta-llama/Llama-3.1-8B")


def status(base: BaseSpec, named: object, *names: str, source: str = "") -> str | None:
    checks = BaseNames(names, source=source).inspect({"base_model_name_or_path": named}, base)
    return checks[0]["status"] if checks else None


@pytest.mark.parametrize(
    "named",
    [
        "meta-llama/Llama-3.1-8B",
        " meta-llama/llama-3.1-8b ",
        "mirror/Llama-3.1-8B",
        "Llama-3.1-8B",
        "/data/models/Llama-3.1-8B/",
        "./Llama-3.1-8B/.",
        "C:\\models\\Llama-3.1-8B",
        "/root/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B/snapshots/0123abcd",
        DIGEST,
        f"sha256:{DIGEST.upper()}",
    ],
)
def test_base_name_passes_in_any_spelling(base: BaseSpec, named: str) -> None:
    assert status(base, named) == "passed"


@pytest.mark.parametrize(
    "named",
    [
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama",
        "meta-llama/Llama-3.1-8B/checkpoint-500",
        "Llama-3.1",
        "../../etc/passwd",
        "/",
        "models--",
        "c" * 64,
        "x" * 100_000,
    ],
)
def test_different_base_name_is_a_warning(base: BaseSpec, named: str) -> None:
    assert status(base, named) == "warned"


@pytest.mark.parametrize("named", [None, "", "  ", 7, ["meta-llama/Llama-3.1-8B"], {}])
def test_absent_base_name_adds_no_check(base: BaseSpec, named: object) -> None:
    assert BaseNames(is_strict=True).inspect({"base_model_name_or_path": named}, base) == ()
    assert BaseNames(is_strict=True).inspect({}, base) == ()


def test_base_accepts_configured_names_and_source_repository(base: BaseSpec) -> None:
    assert status(base, "unsloth/llama-8b", "llama", "UNSLOTH/Llama-8B") == "passed"
    hub = "/cache/models--acme--Secret-Base/snapshots/0123abcd"
    assert status(base, "acme/secret-base", source=hub) == "passed"
    # what a tenant is told doesn't say where on the server's disk it is
    (check,) = BaseNames(("llama",), source=hub).inspect({"base_model_name_or_path": "other\x1b[31m"}, base)
    assert check["detail"] == (
        r"base_model_name_or_path is 'other\x1b[31m'; this server serves meta-llama/Llama-3.1-8B, llama "
        r"(sha256:bbbbbbbbbbbb)"
    )


def test_strict_server_refuses_all_but_accepted_base_names(base: BaseSpec) -> None:
    strict = BaseNames(is_strict=True)
    with pytest.raises(AdapterBaseMismatch, match=r"'acme/other'; this server serves meta-llama/Llama") as caught:
        strict.inspect({"base_model_name_or_path": "acme/other"}, base)
    assert "--base-names" in (caught.value.hint or "")
    assert strict.inspect({"base_model_name_or_path": "x/llama-3.1-8b"}, base)[0]["status"] == "passed"


def _name_check(version: VersionRecord) -> dict[str, Any] | None:
    return next((dict(check) for check in version.checks if check["name"] == "base_name"), None)


async def _publish(registry: Registry, tenant: TenantId, files: tuple[bytes, bytes], named: str, **how: Any) -> Any:
    config = json.dumps({**json.loads(files[0]), "base_model_name_or_path": named}).encode()
    staged = await registry.uploads.stage(tenant)
    try:
        staged.write(files[1])
        return await registry.publisher.publish(tenant, "sql", config, staged, actor="test", **how)
    finally:
        await registry.uploads.release(tenant, staged)


async def test_version_with_base_name_warning_is_served(certified: Registry, acme: TenantId, make_upload: Any) -> None:
    for is_dry_run in (True, False):
        version = (await _publish(certified, acme, make_upload(), "acme/other", is_dry_run=is_dry_run)).version
        check = _name_check(version)
        assert check is not None
        assert (check["status"], check["named"]) == ("warned", "acme/other")
    assert (version.state, version.aliases) == ("ready", ("live",))


async def test_strict_registry_keeps_no_refused_upload(
    database: Database, store: LocalStore, small_base: BaseSpec, acme: TenantId, make_upload: Any
) -> None:
    registry = Registry(database, store, lambda: small_base, base_names=BaseNames(is_strict=True))
    for is_dry_run in (True, False):
        with pytest.raises(AdapterBaseMismatch, match="acme/other"):
            await _publish(registry, acme, make_upload(), "acme/other", is_dry_run=is_dry_run)
    assert (await registry.list(acme)).items == ()
    assert (await _publish(registry, acme, make_upload(), "org/base:1")).version.state == "ready"


async def test_moved_version_is_compared_with_new_base(
    database: Database,
    store: LocalStore,
    certified: Registry,
    small_base: BaseSpec,
    certifying: Any,
    acme: TenantId,
    make_upload: Any,
) -> None:
    other = msgspec.structs.replace(small_base, id="acme/other", digest=Digest("c" * 64))
    there = Registry(database, store, lambda: other, certify=certifying)
    await _publish(certified, acme, make_upload(), "acme/other")
    moved = await there.certificates.verify(acme, "sql", 1, actor="x", is_rebasing=True)
    check = _name_check(moved)
    assert check is not None
    assert check["status"] == "passed"
    back = await certified.certificates.verify(acme, "sql", 1, actor="x", is_rebasing=True)
    check = _name_check(back)
    assert check is not None
    assert check["status"] == "warned"
