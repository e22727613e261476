"""Which version a name means, who may use it, and what was used: against a real server."""

from __future__ import annotations

import csv
import io
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loraserve import Client

Run = Callable[..., Any]
QUESTION = "list the tickets with age over 81"


def push_two(client: Client, name: str, sql_dir: Path, pirate_dir: Path) -> None:
    """Version 1 answers in SQL, version 2 as a pirate; `live` is 2."""
    client.adapters.push(sql_dir, name=name)
    client.adapters.push(pirate_dir, name=name)


def test_alias_splits_traffic_and_rolls_back(here: Run, client: Client, sql_dir: Path, pirate_dir: Path) -> None:
    push_two(client, "split", sql_dir, pirate_dir)
    done = here("adapter", "alias", "split", "live", "--split", "1=90,2=10", "--format", "json")
    assert done.code == 0
    assert [(part["version"], part["weight"]) for part in done.json["split"]] == [(1, 90), (2, 10)]
    assert "90 % of 1, 10 % of 2" in here("adapter", "aliases", "split").stdout
    assert "90 % of 1, 10 % of 2" in here("adapter", "show", "split").stdout
    back = here("adapter", "rollback", "split", "--format", "json")
    assert (back.code, back.json["version"], back.json["split"]) == (0, 2, None)


def test_advised_undo_command_undoes_change(here: Run, client: Client, sql_dir: Path, pirate_dir: Path) -> None:
    push_two(client, "undone", sql_dir, pirate_dir)

    def advised(*words: str) -> list[list[str]]:
        done = here("adapter", "alias", "undone", *words)
        assert done.code == 0
        return [shlex.split(line.partition(": loraserve ")[2]) for line in done.stderr.splitlines() if ": " in line]

    # a new alias was never moved: there is nothing to roll back to
    (unalias,) = advised("canary", "1")
    assert here(*unalias).code == 0
    assert list(client.adapters.get("undone").aliases) == ["live"]
    # it leads where it led
    assert advised("live", "2") == []
    (rollback,) = advised("live", "1")
    assert here(*rollback).code == 0
    assert client.adapters.get("undone").aliases == {"live": 2}
    look, end = advised("live", "--shadow", "1=0.5")
    assert here(*look).code == 0
    assert client.adapters.alias("undone", "live").shadow is not None
    assert here(*end).code == 0
    assert client.adapters.alias("undone", "live").shadow is None


def test_shadow_on_answering_version_is_reported_as_unset(
    here: Run, client: Client, sql_dir: Path, pirate_dir: Path
) -> None:
    push_two(client, "itself", sql_dir, pirate_dir)
    done = here("adapter", "alias", "itself", "live", "--shadow", "2=0.5")
    assert (done.code, "No shadow was set: version 2 answers every request itself." in done.stderr) == (0, True)
    assert "adapter shadow" not in done.stderr
    assert client.adapters.alias("itself", "live").shadow is None


def test_alias_without_a_version_is_shown(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="pointed")
    shown = here("adapter", "alias", "pointed", "live")
    assert (shown.code, shown.stderr) == (0, "")
    assert "version" in shown.stdout
    assert here("adapter", "alias", "pointed", "live", "--format", "quiet").stdout == "1\n"


def test_shadow_is_set_and_ended_without_moving_alias(
    here: Run, client: Client, sql_dir: Path, pirate_dir: Path
) -> None:
    push_two(client, "shadowed", sql_dir, pirate_dir)
    here("adapter", "alias", "shadowed", "live", "--split", "1=1,2=3")
    done = here("adapter", "alias", "shadowed", "live", "--shadow", "1=0.5", "--format", "json")
    assert done.json["shadow"] == {"version": 1, "share": 0.5}
    assert [part["version"] for part in done.json["split"]] == [1, 2]
    assert "loraserve adapter shadow shadowed live" in done.stderr
    ended = here("adapter", "alias", "shadowed", "live", "--shadow", "none", "--format", "json").json
    assert (ended["shadow"], len(ended["split"])) == (None, 2)


def test_traffic_compares_answering_versions(here: Run, client: Client, sql_dir: Path, pirate_dir: Path) -> None:
    push_two(client, "busy", sql_dir, pirate_dir)
    idle = here("adapter", "traffic", "busy")
    assert (idle.code, idle.stdout, idle.stderr) == (0, "", "No version of busy answered a request.\n")
    for model in ("busy@1", "busy@2", "busy@2"):
        client.completions.create(model=model, prompt="list", max_tokens=3)
    assert [
        (row["version"], row["num_requests"]) for row in here("adapter", "traffic", "busy", "--format", "json").json
    ] == [
        (1, 1),
        (2, 2),
    ]
    shown = here("adapter", "traffic", "busy", "--minutes", "10")
    assert "TTFT P50" in shown.stdout
    assert "Requests since" in shown.stderr


def test_rollback_of_unmoved_alias_is_refused(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="unmoved")
    done = here("adapter", "rollback", "unmoved")
    assert done.code == 1
    assert done.stdout == ""


def test_unalias_takes_the_name_and_leaves_the_version(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="named", alias="canary")
    assert here("adapter", "unalias", "named", "canary").code == 0
    assert here("adapter", "aliases", "named", "--format", "quiet").stdout == "live\n"
    assert here("adapter", "versions", "named", "--format", "quiet").stdout == "named@1\n"


def test_usage_sums_are_grouped_and_exported_as_csv(here: Run, client: Client, sql_dir: Path) -> None:
    client.tenants.create("metered", prices={"currency": "EUR", "prompt": "1000000", "completion": "1000000"})
    key = client.keys.create("metered", name="ci").key
    with Client(client.url, api_key=key) as tenant:
        tenant.adapters.push(sql_dir, name="sql")
        used = tenant.completions.create(model="sql", prompt=QUESTION, max_tokens=4).usage
        assert used is not None
        deadline = time.monotonic() + 10
        while not list(tenant.usage.sums()) and time.monotonic() < deadline:
            time.sleep(0.1)
    (row,) = here("usage", "--group-by", "adapter,version", "--format", "json", LORASERVE_API_KEY=key).json
    assert (row["adapter"], row["version"], row["num_requests"]) == ("sql", 1, 1)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (used.prompt_tokens, used.completion_tokens)
    table = here("usage", "--tenant", "metered", "--group-by", "tenant").stdout.splitlines()
    assert table[0].split()[:3] == ["TENANT", "REQUESTS", "PROMPT"]
    assert table[1].split()[0] == "metered"
    text = here("usage", "--tenant", "metered", "--group-by", "adapter", "--csv").stdout
    (line,) = csv.DictReader(io.StringIO(text))
    assert (line["adapter"], line["completion_tokens"]) == ("sql", str(used.completion_tokens))


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_pull_returns_pushed_files(here: Run, client: Client, sql_dir: Path, pirate_dir: Path, tmp_path: Path) -> None:
    push_two(client, "pulled", sql_dir, pirate_dir)
    done = here("adapter", "pull", "pulled@1", tmp_path / "one", "--format", "json")
    assert (done.code, done.json["version"]) == (0, 1)
    found, pushed = files_in(tmp_path / "one"), files_in(sql_dir)
    assert sorted(found) == ["adapter_config.json", "adapter_model.safetensors"]
    assert found["adapter_model.safetensors"] == pushed["adapter_model.safetensors"]
    assert json.loads(found["adapter_config.json"]) == json.loads(pushed["adapter_config.json"])
    again = here("adapter", "pull", "pulled", tmp_path / "one")
    assert again.code == 1
    assert "--force" in again.stderr
    assert here("adapter", "pull", "pulled", tmp_path / "one", "--force").code == 0
    weights = files_in(tmp_path / "one")["adapter_model.safetensors"]
    assert weights == files_in(pirate_dir)["adapter_model.safetensors"]


def test_notes_tags_and_fallback_are_set_and_removed(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="noted", tags={"team": "search", "stage": "one"})
    done = here(
        "adapter", "set", "noted", "--notes", "-", "--tag", "owner=ann", "--fallback", "base", stdin="Mind it.\n"
    )
    assert done.code == 0
    shown = here("adapter", "show", "noted", "--format", "json").json
    assert (shown["notes"], shown["tags"], shown["fallback"]) == ("Mind it.", {"owner": "ann"}, "base")
    version = here("adapter", "set", "noted@1", "--tag", "stage=two", "--untag", "team", "--format", "json").json
    assert version["tags"] == {"stage": "two"}
    assert here("adapter", "set", "noted", "--fallback", "none", "--format", "json").json["fallback"] is None
    assert "stage=two" in here("adapter", "show", "noted@1").stdout


def test_deleted_adapter_is_restored_with_versions_and_aliases(
    here: Run, client: Client, sql_dir: Path, pirate_dir: Path
) -> None:
    push_two(client, "revived", sql_dir, pirate_dir)
    client.adapters.set_alias("revived", "canary", 1)
    done = here("adapter", "delete", "revived")
    assert "loraserve adapter restore revived" in done.stderr
    back = here("adapter", "restore", "revived", "--format", "json")
    assert (back.code, back.json["aliases"]) == (0, {"canary": 1, "live": 2})
    client.adapters.delete_alias("revived", "canary")
    client.adapters.delete("revived", 1)
    assert here("adapter", "restore", "revived@1", "--format", "json").json["version"] == 1


def test_grant_permits_only_inference_by_grantee(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="lent")
    client.tenants.create("borrower")
    key = client.keys.create("borrower", name="ci").key
    assert here("grant", "add", "lent", "borrower").code == 0
    assert here("grant", "list", "lent", "--format", "quiet").stdout == "borrower\n"
    with Client(client.url, api_key=key) as borrower:
        (model,) = (one.id for one in borrower.models.list() if one.id.endswith("/lent"))
    asked = here("run", model, QUESTION, "--raw", "--max-tokens", "2", LORASERVE_API_KEY=key)
    assert (asked.code, bool(asked.stdout)) == (0, True)
    assert here("adapter", "show", "lent", LORASERVE_API_KEY=key).code == 1
    assert here("grant", "remove", "lent", "borrower").code == 0
    missing = here("grant", "remove", "lent", "borrower")
    assert (missing.code, "loraserve grant list lent" in missing.stderr) == (1, True)
    # whether there is such a tenant isn't the owner's to know
    assert here("grant", "add", "lent", "nobody").code == 0
    assert here("grant", "list", "lent", "--format", "quiet").stdout == "nobody\n"
    assert here("grant", "remove", "lent", "nobody").code == 0
