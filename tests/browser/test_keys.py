"""A tenant's keys in the console, made, rotated and revoked by one of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client, errors

from .conftest import Console

pytestmark = pytest.mark.browser
Open = Callable[..., Console]


@pytest.fixture
def maker(server: ServerProcess, request: pytest.FixtureRequest) -> str:
    """A key that manages keys, and can't upload, of a tenant of the test's own."""
    tenant = request.node.name.replace("_", "-")[5:50]
    server.make_tenant(tenant)
    with Client(server.url, api_key=ADMIN_KEY) as admin:
        scopes = ["inference", "adapters:read", "keys:write"]
        admin.keys.create(tenant, name="wider", scopes=["adapters:write"])
        return admin.keys.create(tenant, name="maker", scopes=scopes).key


def test_tenant_makes_key_within_own_scopes(open_console: Open, server: ServerProcess, maker: str) -> None:
    console = open_console(maker)
    page = console.page
    console.show("tenants", "Tenant")
    page.get_by_role("button", name="Make a key").wait_for()
    assert page.get_by_role("checkbox", name="adapters:write").count() == 0
    page.get_by_label("Name of a new key").fill("robot")
    page.get_by_label("Works for").select_option("30 days")
    page.get_by_role("checkbox", name="adapters:read").uncheck()
    page.get_by_role("button", name="Make a key").click()
    secret = page.locator(".note code").inner_text()
    assert console.violations() == []
    with Client(server.url, api_key=maker) as client:
        made = next(key for key in client.keys.list() if key.name == "robot")
    assert made.scopes == ["inference"]
    assert made.expires_at is not None
    assert abs(made.expires_at - datetime.now(UTC) - timedelta(days=30)) < timedelta(minutes=5)
    with Client(server.url, api_key=secret) as robot, pytest.raises(errors.PermissionDenied):
        list(robot.adapters.list())
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_tenant_rotates_and_revokes_keys(open_console: Open, server: ServerProcess, maker: str) -> None:
    with Client(server.url, api_key=maker) as client:
        old = client.keys.create(name="robot")
    console = open_console(maker)
    page = console.page
    console.show("tenants", "Tenant")
    # what its scopes don't cover has no buttons
    row = page.get_by_role("row", name="wider")
    row.wait_for()
    assert row.get_by_role("button").count() == 0
    page.get_by_role("button", name="Rotate robot").click()
    console.dialog().get_by_label("The old one").select_option("works for another hour")
    assert console.violations() == []
    console.dialog().get_by_role("button", name="Rotate").click()
    secret = page.locator(".note code").inner_text()
    with Client(server.url, api_key=secret) as new, Client(server.url, api_key=old.key) as still:
        assert list(new.adapters.list()) == list(still.adapters.list()) == []
    page.get_by_role("button", name="Revoke robot").first.click()
    console.dialog().get_by_role("button", name="Revoke").click()
    page.get_by_role("row", name="revoked").wait_for()
    with Client(server.url, api_key=secret) as gone, pytest.raises(errors.AuthenticationError):
        list(gone.adapters.list())


def test_own_key_stays_while_successor_is_read(open_console: Open, server: ServerProcess, maker: str) -> None:
    console = open_console(maker)
    page = console.page
    console.show("tenants", "Tenant")
    page.get_by_role("button", name="Rotate maker").click()
    console.dialog().get_by_text("sign in with the new one").wait_for()
    assert console.dialog().get_by_label("The old one").get_by_text("ends at once").count() == 0
    console.dialog().get_by_role("button", name="Rotate").click()
    secret = page.locator(".note code").inner_text()
    with Client(server.url, api_key=secret) as new, Client(server.url, api_key=maker) as old:
        assert {key.name for key in new.keys.list()} == {key.name for key in old.keys.list()}


def test_key_without_scope_sees_no_keys(open_console: Open, acme: str) -> None:
    console = open_console(acme)
    console.show("tenants", "Tenant")
    console.page.get_by_text("or by a key with the scope").wait_for()
    assert console.page.get_by_role("button", name="Make a key").count() == 0
