"""Versions that the server fetches by itself, against a real server and a hub on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from loraserve import Client
from loraserve.errors import PermissionDenied
from loraserve.registry.publishing.sources import check_allowed, parse_source
from loraserve.settings import Settings

Run = Callable[..., Any]


def test_server_pulls_version_from_source(here: Run) -> None:
    done = here("adapter", "pull", "fetched", "--from", "hf://acme/sql", "--format", "json")
    assert (done.code, done.json["state"], done.json["result"]["version"]) == (0, "done", 1)
    assert here("adapter", "show", "fetched", "--format", "json").json["aliases"] == {"live": 1}
    operation = done.json["id"]
    assert operation in here("operation", "list", "--format", "quiet").stdout.splitlines()
    assert "fetched@1" in here("operation", "show", operation).stdout
    assert here("operation", "cancel", operation, "--format", "json").json["state"] == "done"


def test_failed_pull_reports_reason_and_exits_1(here: Run) -> None:
    begun = here("adapter", "pull", "unfetched", "--from", "hf://acme/nobody", "--no-wait", "--format", "quiet")
    assert begun.code == 0
    done = here("operation", "wait", begun.stdout.strip(), "--timeout", "30")
    assert done.code == 1
    assert "hf://acme/nobody can't be read: RepositoryNotFoundError" in done.stderr


def test_pull_from_disallowed_source_is_refused(here: Run) -> None:
    done = here("adapter", "pull", "foreign", "--from", "hf://elsewhere/sql")
    assert done.code == 1
    # it isn't the key's doing: this one is an admin's
    assert "scope" not in done.stderr
    assert "LORASERVE_API_KEY" not in done.stderr
    advice = next(line for line in done.stderr.splitlines() if "--pull-allow" in line)
    _, flag = shlex.split(advice[advice.index("--pull-allow") :])
    allowed = Settings.load(model="m", pull_allow=f"hf://acme/*, {flag}").pull_allow
    check_allowed(parse_source("hf://elsewhere/sql"), allowed)
    with pytest.raises(PermissionDenied):
        check_allowed(parse_source("hf://elsewhere/sql2"), allowed)


def test_pull_with_tenant_key_names_admin_key(here: Run, client: Client) -> None:
    client.tenants.create("pulling")
    key = client.keys.create("pulling", name="test").key
    done = here("adapter", "pull", "fetched", "--from", "hf://acme/sql", LORASERVE_API_KEY=key)
    assert done.code == 1
    assert "Use an admin key: the server's LORASERVE_ADMIN_KEY" in done.stderr
    assert "key create" not in done.stderr
    # the tests' server takes the admin's key, as the message says
    pulled = ("adapter", "pull", "fetched-for", "--tenant", "pulling", "--from", "hf://acme/sql", "--format", "json")
    assert here(*pulled).json["state"] == "done"


def test_unknown_operation_names_listing_command(here: Run) -> None:
    done = here("operation", "show", "01NOBODY")
    assert done.code == 1
    assert "loraserve operation list" in done.stderr
