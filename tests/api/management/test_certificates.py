"""Certificates over HTTP: with an upload's answer, asked for again, and what a failed one means."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from loraserve.api import scopes
from loraserve.api.app import create_app
from loraserve.api.services import Services
from loraserve.errors import AdapterUnsupported, EngineUnavailable
from loraserve.types import Certificate

VERIFY = "/adapters/sql/versions/1/verify"
Connect = Callable[[str], httpx2.AsyncClient]


@pytest.fixture
def failed(make_certificate: Callable[..., Certificate]) -> Certificate:
    return make_certificate(verdict="failed", max_difference=0.31, tolerance=0.002, reason="The logits are far off.")


async def test_an_uploads_answer_has_the_certificate(push: Any, acme: httpx2.AsyncClient) -> None:
    parity = (await push(acme)).json()["checks"][-1]
    assert (parity["name"], parity["status"], parity["certificate"]["num_probe_tokens"]) == ("parity", "passed", 64)


async def test_upload_with_failed_certificate_is_stored_in_quarantine(
    push: Any, acme: httpx2.AsyncClient, engine: Any, failed: Certificate
) -> None:
    await push(acme, seed=1)
    engine.certificate = failed
    response = await push(acme, seed=2)
    version = response.json()
    assert (response.status_code, version["state"], version["aliases"]) == (201, "quarantined", [])
    assert (await acme.get("/adapters/sql")).json()["aliases"] == {"live": 1}
    assert [one["state"] for one in (await acme.get("/adapters/sql/versions")).json()["data"]] == [
        "quarantined",
        "ready",
    ]
    refused = await acme.put("/adapters/sql/aliases/live", json={"version": 2})
    assert (refused.status_code, refused.json()["code"]) == (409, "adapter_quarantined")
    assert refused.headers["x-should-retry"] == "false"
    assert "0.31" in refused.json()["detail"]


async def test_unsupported_adapter_gets_422_with_reason(push: Any, acme: httpx2.AsyncClient, engine: Any) -> None:
    engine.certificate = AdapterUnsupported("norms can't be served on a GPU")
    response = await push(acme)
    assert (response.status_code, response.json()["code"]) == (422, "adapter_unsupported")
    assert response.json()["errors"] == [{"detail": "norms can't be served on a GPU", "field": None}]
    assert (await acme.get("/adapters/sql")).status_code == 404


async def test_verification_returns_updated_version(
    push: Any, acme: httpx2.AsyncClient, engine: Any, failed: Certificate
) -> None:
    before = await push(acme)
    engine.certificate = failed
    response = await acme.post(VERIFY)
    assert (response.status_code, response.json()["state"]) == (200, "quarantined")
    found = await acme.get("/adapters/sql/versions/1")
    assert (found.json(), found.headers["etag"]) == (response.json(), response.headers["etag"])
    assert found.headers["etag"] != before.headers["etag"]
    assert (await acme.get("/audit")).json()["data"][0]["action"] == "version.verify"


async def test_quarantined_version_cannot_be_warmed_or_pinned(
    push: Any, acme: httpx2.AsyncClient, admin: httpx2.AsyncClient, engine: Any, failed: Certificate
) -> None:
    engine.certificate = failed
    await push(acme)
    for_acme = {"X-Tenant": "acme"}
    assert (await acme.post("/adapters/sql/versions/1/warm")).json()["code"] == "adapter_quarantined"
    assert (await admin.post("/adapters/sql/versions/1/pin", headers=for_acme)).status_code == 409
    assert (await admin.post("/adapters/sql/versions/1/unpin", headers=for_acme)).status_code == 200


async def test_verification_without_engine_gets_503_with_retry_after(
    push: Any, acme: httpx2.AsyncClient, engine: Any
) -> None:
    await push(acme)
    engine.certificate = EngineUnavailable("The engine isn't up; try again shortly.")
    response = await acme.post(VERIFY)
    assert (response.status_code, response.json()["code"]) == (503, "engine_unavailable")
    assert response.headers["retry-after"]
    assert (await acme.get("/adapters/sql/versions/1")).json()["state"] == "ready"


async def test_a_retried_verification_gets_the_first_answer(
    push: Any, acme: httpx2.AsyncClient, engine: Any, failed: Certificate
) -> None:
    await push(acme)
    first = await acme.post(VERIFY, headers={"Idempotency-Key": "v"})
    engine.certificate = failed
    again = await acme.post(VERIFY, headers={"Idempotency-Key": "v"})
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
    assert (await acme.get("/adapters/sql/versions/1")).json()["state"] == "ready"


async def test_degraded_upload_is_published_with_warning(
    push: Any, acme: httpx2.AsyncClient, engine: Any, make_certificate: Callable[..., Certificate]
) -> None:
    reason = "Rounding the base leaves 41% of the adapter's effect; at least 80% is expected."
    engine.certificate = make_certificate(verdict="degraded", reason=reason, effect_kept=0.41, min_effect_kept=0.8)
    version = (await push(acme)).json()
    assert (version["state"], version["aliases"], len(version["warnings"])) == ("ready", ["live"], 1)
    assert version["warnings"][0].startswith(reason.rstrip("."))
    assert version["checks"][-1]["status"] == "degraded"
    assert version["checks"][-1]["certificate"]["effect_kept"] == 0.41


@pytest.mark.parametrize("verdict", ["degraded", "not_possible"])
async def test_strict_server_answers_degraded_upload_with_422(
    verdict: str,
    push: Any,
    acme: httpx2.AsyncClient,
    services: Services,
    engine: Any,
    make_certificate: Callable[..., Certificate],
) -> None:
    services.registry.certificates.is_strict = True
    engine.certificate = make_certificate(verdict=verdict, reason="Rounding takes too much.")
    refused = await push(acme)
    assert (refused.status_code, refused.json()["code"]) == (422, "adapter_uncertified")
    assert "Rounding takes too much" in refused.json()["detail"]
    assert (await acme.get("/adapters/sql")).status_code == 404


async def test_certificates_are_counted(
    push: Any, acme: httpx2.AsyncClient, services: Services, engine: Any, failed: Certificate
) -> None:
    await push(acme)
    engine.certificate = failed
    await acme.post(VERIFY)
    transport = acme._transport
    async with httpx2.AsyncClient(transport=transport, base_url="http://loraserve") as client:
        text = (
            await client.get("/metrics", headers={"Authorization": "Bearer an admin key of enough characters"})
        ).text
    for line in (
        'loraserve_certificates_total{verdict="passed"} 1.0',
        'loraserve_certificates_total{verdict="failed"} 1.0',
        'loraserve_certificates_total{verdict="skipped"} 0.0',
        'loraserve_late_certificates_total{verdict="rejected"} 0.0',
        "loraserve_quarantined_refusals_total 0.0",
    ):
        assert line in text


async def test_each_management_route_requires_matching_scope(
    services: Services, connect: Connect, admin: httpx2.AsyncClient
) -> None:
    """Each route with no key, a bad key, and a tenant's key for each scope but the one that it
    takes.
    """
    await admin.post("/tenants", json={"name": "acme"})
    keys = {}
    for scope in (scopes.INFERENCE, scopes.ADAPTERS_READ, scopes.ADAPTERS_WRITE):
        keys[scope] = (await admin.post("/tenants/acme/keys", json={"scopes": [scope]})).json()["key"]
    routes = [
        (method, path.removeprefix("/api/v1").format_map(defaultdict(lambda: "x", number=1, tenant="acme")), scope)
        for path, methods, (scope,) in scopes.declared_scopes(create_app(services))
        if path.startswith("/api/v1")
        for method in sorted(methods - {"HEAD"})
    ]
    assert ("POST", "/adapters/x/versions/1/verify", scopes.ADAPTERS_WRITE) in routes
    nobody = connect("sk-lora-wrong")
    for method, path, scope in routes:
        assert (await nobody.request(method, path)).status_code == 401, (method, path)
        assert (await nobody.request(method, path, headers={"Authorization": ""})).status_code == 401, (method, path)
        for held, key in keys.items():
            if held != scope:
                status = (await connect(key).request(method, path)).status_code
                assert status == 403, (method, path, held, status)
