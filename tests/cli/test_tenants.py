"""Tenants, keys and the audit, against a real server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from loraserve import Client
from loraserve.errors import AuthenticationError, PermissionDenied

Run = Callable[..., Any]


def test_tenant_set_changes_only_given_fields(here: Run, client: Client) -> None:
    client.tenants.create("limited", limits={"max_adapters": 3, "requests_per_minute": 60}, weight=2)
    done = here("tenant", "set", "limited", "--max-adapters", "none", "--max-kv-share", "0.5", "--format", "json")
    assert done.code == 0
    limits = {name: value for name, value in done.json["limits"].items() if value is not None}
    assert limits == {"requests_per_minute": 60, "max_kv_share": 0.5}
    assert done.json["weight"] == 2
    shown = here("tenant", "show", "limited").stdout
    assert "requests_per_minute=60" in shown


def test_tenant_set_reads_and_removes_prices(here: Run, client: Client, tmp_path: Path) -> None:
    client.tenants.create("priced")
    prices = {"currency": "EUR", "prompt": "0.50", "cached": "0.05", "completion": "1.50"}
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    assert here("tenant", "set", "priced", "--prices", tmp_path / "prices.json").code == 0
    assert "EUR 0.50 / 0.05 / 1.50" in here("tenant", "show", "priced").stdout
    assert here("tenant", "set", "priced", "--prices", "none", "--format", "json").json["prices"] is None
    again = here("tenant", "set", "priced", "--prices", "-", "--format", "json", stdin=json.dumps(prices))
    assert again.json["prices"]["completion"] == "1.50"


def test_limit_refused_by_server_is_named(here: Run, client: Client) -> None:
    client.tenants.create("refused")
    done = here("tenant", "set", "refused", "--max-kv-share", "7")
    assert done.code == 1
    assert "max_kv_share" in done.stderr


def test_unknown_tenant_names_listing_command(here: Run) -> None:
    done = here("tenant", "set", "nobody", "--weight", "2")
    assert done.code == 1
    assert "loraserve tenant list" in done.stderr


def test_expiring_key_has_expiry_instant(here: Run, client: Client) -> None:
    client.tenants.create("lasting")
    done = here("key", "create", "--tenant", "lasting", "--expires-in", "30d", "--format", "json")
    assert done.code == 0
    ends = datetime.fromisoformat(done.json["expires_at"])
    assert abs(ends - datetime.now(UTC) - timedelta(days=30)) < timedelta(minutes=1)


def test_missing_scope_error_explains_key_creation(here: Run, client: Client, sql_dir: Path) -> None:
    client.tenants.create("scoped")
    reader = client.keys.create("scoped", name="reader", scopes=["adapters:read"]).key
    push = ("adapter", "push", sql_dir, "--name", "sql")
    refused = here(*push, LORASERVE_API_KEY=reader)
    assert refused.code == 1
    assert "'adapters:write'" in refused.stderr
    advice = next(line for line in refused.stderr.splitlines() if "loraserve key create" in line)
    command = shlex.split(advice[advice.index("loraserve ") :])[1:]
    made = here(*command, "--format", "quiet").stdout.strip()
    assert here(*push, LORASERVE_API_KEY=made).code == 0


def test_tenant_key_manages_own_keys(here: Run, client: Client) -> None:
    client.tenants.create("selfish")
    scopes = ["inference", "adapters:read", "keys:write"]
    maker = client.keys.create("selfish", name="maker", scopes=scopes).key
    as_tenant = {"LORASERVE_API_KEY": maker}
    made = here("key", "create", "--name", "ci", "--scope", "adapters:read", "--format", "json", **as_tenant)
    assert (made.code, made.json["scopes"]) == (0, ["adapters:read"])
    assert {one["name"] for one in here("key", "list", "--format", "json", **as_tenant).json} == {"maker", "ci"}
    rotated = here("key", "rotate", made.json["id"], "--overlap", "1h", "--format", "json", **as_tenant)
    assert rotated.json["name"] == "ci"
    assert here("key", "revoke", rotated.json["id"], **as_tenant).code == 0
    beyond = here("key", "create", "--scope", "adapters:write", **as_tenant)
    assert beyond.code == 1
    assert "adapters:write" in beyond.stderr
    absent = here("key", "revoke", "01J00000000000000000000000", **as_tenant)
    assert "loraserve key list" in absent.stderr
    assert "--tenant" not in absent.stderr
    with Client(client.url, api_key=rotated.json["key"]) as gone, pytest.raises(AuthenticationError):
        list(gone.adapters.list())


def test_prometheus_key_reads_only_metrics(here: Run, client: Client) -> None:
    command = ("key", "create", "--tenant", "default", "--name", "prometheus", "--scope", "metrics:read")
    secret = here(*command, "--format", "quiet").stdout.strip()
    with Client(client.url, api_key=secret) as scraper:
        assert "loraserve_engine_up 1.0" in scraper.metrics()
        for refused in (scraper.base, lambda: list(scraper.keys.list("default")), lambda: list(scraper.models.list())):
            with pytest.raises(PermissionDenied):
                refused()
    both = here(*command, "--scope", "inference")
    assert both.code == 1
    assert "metrics:read alone" in both.stderr


def test_audit_lists_newest_entries_first_up_to_limit(here: Run, client: Client) -> None:
    for name in ("audited-1", "audited-2"):
        client.tenants.create(name)
    entries = here("audit", "-n", "2", "--format", "json").json
    assert [entry["target"] for entry in entries] == ["audited-2", "audited-1"]
    assert here("audit", "-n", "1").stdout.splitlines()[0].split() == [
        "AT",
        "TENANT",
        "ACTOR",
        "ACTION",
        "TARGET",
        "DETAIL",
    ]
    assert here("audit", "--since", "2999-01-01").stderr == "No audit entries.\n"


def test_deletion_is_json_where_json_was_asked_for(here: Run, client: Client) -> None:
    client.tenants.create("leaving")
    done = here("tenant", "delete", "leaving", "--format", "json")
    assert (done.code, done.json, done.stderr) == (0, {"deleted": "leaving"}, "")


def test_operators_keys_are_made_listed_rotated_and_revoked(here: Run, client: Client) -> None:
    secret = here("admin-key", "create", "--role", "operator:read", "--name", "on-call", "--format", "quiet").stdout
    with Client(client.url, api_key=secret.strip()) as reader:
        names = {key.name: key for key in reader.admin_keys.list()}
        assert names["on-call"].role == "operator:read"
        assert list(reader.tenants.list())
        with pytest.raises(PermissionDenied):
            reader.tenants.create("mine")
        listed = here("admin-key", "list")
        assert "operator:read" in listed.stdout
        assert secret.strip() not in listed.stdout
        rotated = here("admin-key", "rotate", names["on-call"].id, "--overlap", "1h", "--format", "quiet")
        assert list(reader.tenants.list())
    with Client(client.url, api_key=rotated.stdout.strip()) as reader:
        last = list(reader.admin_keys.list())[-1]
        assert here("admin-key", "revoke", last.id).code == 0
        with pytest.raises(AuthenticationError):
            list(reader.tenants.list())
    for words in (
        ("create",),
        ("create", "--role", "root"),
        ("create", "--role", "admin", "--expires-in", "soon"),
        ("rotate", "absent"),
        ("rotate", last.id, "--overlap", "x"),
        ("rotate", last.id, "--overlap", "52w"),
        ("revoke", "../x"),
    ):
        refused = here("admin-key", *words)
        assert refused.code in (1, 2), words
        assert "Traceback" not in refused.stderr
