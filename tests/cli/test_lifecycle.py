"""Which version a name means, who may use it, and what was used: against a real server."""

from __future__ import annotations

import csv
import io
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


def test_alias_splits_its_traffic_and_rolls_back(here: Run, client: Client, sql_dir: Path, pirate_dir: Path) -> None:
    push_two(client, "split", sql_dir, pirate_dir)
    done = here("adapter", "alias", "split", "live", "--split", "1=90,2=10", "--format", "json")
    assert done.code == 0
    assert [(part["version"], part["weight"]) for part in done.json["split"]] == [(1, 90), (2, 10)]
    assert "90 % of 1, 10 % of 2" in here("adapter", "aliases", "split").stdout
    back = here("adapter", "rollback", "split", "--format", "json")
    assert (back.code, back.json["version"], back.json["split"]) == (0, 2, None)


def test_alias_without_a_version_is_shown(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="pointed")
    shown = here("adapter", "alias", "pointed", "live")
    assert (shown.code, shown.stderr) == (0, "")
    assert "version" in shown.stdout
    assert here("adapter", "alias", "pointed", "live", "--format", "quiet").stdout == "1\n"


def test_shadow_is_set_and_ended_where_the_alias_stands(
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


def test_rollback_of_an_alias_that_never_moved_says_so(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="unmoved")
    done = here("adapter", "rollback", "unmoved")
    assert done.code == 1
    assert done.stdout == ""


def test_unalias_takes_the_name_and_leaves_the_version(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="named", alias="canary")
    assert here("adapter", "unalias", "named", "canary").code == 0
    assert here("adapter", "aliases", "named", "--format", "quiet").stdout == "live\n"
    assert here("adapter", "versions", "named", "--format", "quiet").stdout == "named@1\n"


def test_usage_is_summed_as_asked_and_written_as_csv(here: Run, client: Client, sql_dir: Path) -> None:
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
