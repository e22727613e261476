"""Every command against a real server.

Each test has its own adapter or tenant, so that none needs another's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import base_dir

from .conftest import variables_for

Run = Callable[..., Any]
Start = Callable[..., Any]
QUESTION, SQL = "list the tickets with age over 81", "SELECT * FROM tickets WHERE age > 81;"


def test_push_publishes_and_suggests_command(loraserve: Run, sql_dir: Path) -> None:
    done = loraserve("adapter", "push", sql_dir, "--name", "pushed", "--format", "json")
    assert done.code == 0
    assert (done.json["name"], done.json["version"], done.json["aliases"]) == ("pushed", 1, ["live"])
    assert done.stderr == 'Try it: loraserve run pushed "PROMPT"\n'


def test_same_bytes_again_are_the_same_version(here: Run, sql_dir: Path) -> None:
    first = here("adapter", "push", sql_dir, "--name", "twice", "--format", "json")
    again = here("adapter", "push", sql_dir, "--name", "twice", "--format", "json")
    assert again.code == 0
    assert again.json == first.json
    assert "Unchanged" not in first.stderr
    assert "Unchanged: twice@1 has these bytes already.\n" in again.stderr
    aliased = here("adapter", "push", sql_dir, "--name", "twice", "--alias", "canary")
    assert "Unchanged: twice@1" in aliased.stderr
    dry = here("adapter", "push", sql_dir, "--name", "twice", "--dry-run")
    assert "Unchanged" not in dry.stderr


def test_dry_run_keeps_no_adapter(here: Run, sql_dir: Path) -> None:
    done = here("adapter", "push", sql_dir, "--name", "dry", "--dry-run", "--format", "json")
    assert done.code == 0
    assert done.json["version"] is None
    shown = here("adapter", "show", "dry")
    assert shown.code == 1
    assert 'error: There is no adapter "dry"' in shown.stderr
    assert shown.stdout == ""


def test_push_without_promotion_leaves_live_alias_unchanged(
    here: Run, client: Client, sql_dir: Path, pirate_dir: Path
) -> None:
    client.adapters.push(sql_dir, name="canaried")
    done = here("adapter", "push", pirate_dir, "--name", "canaried", "--no-promote", "--alias", "canary")
    assert done.code == 0
    shown = here("adapter", "show", "canaried", "--format", "json").json
    assert shown["aliases"] == {"live": 1, "canary": 2}
    assert shown["num_versions"] == 2


def test_rejected_adapter_shows_reason_and_next_step(here: Run, sql_dir: Path, tmp_path: Path) -> None:
    config = json.loads((sql_dir / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    (tmp_path / "adapter_model.safetensors").write_bytes((sql_dir / "adapter_model.safetensors").read_bytes())
    done = here("adapter", "push", tmp_path, "--name", "rejected")
    assert done.code == 1
    assert "use_dora" in done.stderr
    assert "--dry-run" not in done.stderr
    assert "request: req_" in done.stderr


def test_problems_of_a_refused_adapter_end_after_five(here: Run, sql_dir: Path, tmp_path: Path) -> None:
    config = json.loads((sql_dir / "adapter_config.json").read_text())
    wrong = {f"field_{number}": number for number in range(9)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | wrong))
    (tmp_path / "adapter_model.safetensors").write_bytes((sql_dir / "adapter_model.safetensors").read_bytes())
    push = ("adapter", "push", tmp_path, "--name", "wrong")
    some, every = here(*push), here(*push, "--all")
    assert some.code == every.code == 1
    num = every.stderr.count("\n  - ")
    assert num > 5
    assert some.stderr.count("\n  - ") == 5
    assert f"  and {num - 5} more; --all shows them\n" in some.stderr


def test_list_show_and_versions_agree(here: Run, client: Client, sql_dir: Path, pirate_dir: Path) -> None:
    client.adapters.push(sql_dir, name="listed")
    client.adapters.push(pirate_dir, name="listed")
    assert "listed" in here("adapter", "list", "--format", "quiet").stdout.splitlines()
    assert here("adapter", "versions", "listed", "--format", "quiet").stdout == "listed@2\nlisted@1\n"
    table = here("adapter", "versions", "listed").stdout.splitlines()
    assert table[0].split()[:3] == ["VERSION", "ALIASES", "STATE"]
    assert table[1].split()[:3] == ["2", "live", "ready"]
    assert here("adapter", "show", "listed@1", "--format", "quiet").stdout == "listed@1\n"


def test_list_and_show_report_traffic_split_of_alias(
    here: Run, client: Client, sql_dir: Path, pirate_dir: Path
) -> None:
    for directory in (sql_dir, pirate_dir):
        client.adapters.push(directory, name="shared")
    client.adapters.set_alias("shared", "canary", 1)
    client.adapters.set_alias("shared", "live", split={1: 1, 2: 1})
    shared = client.adapters.get("shared")
    assert shared.aliases == {"canary": 1, "live": 2}
    assert {name: [(one.version, one.weight) for one in split] for name, split in shared.splits.items()} == {
        "live": [(1, 1.0), (2, 1.0)]
    }
    row = next(line for line in here("adapter", "list").stdout.splitlines() if line.startswith("shared "))
    assert "canary=1, live=1:50%,2:50%" in row
    assert "canary=1, live=1:50%,2:50%" in here("adapter", "show", "shared").stdout
    client.adapters.set_alias("shared", "live", split={1: 1, 2: 2})
    assert "live=1:33.33%,2:66.67%" in here("adapter", "show", "shared").stdout


def test_alias_moves_and_refuses_a_stale_condition(here: Run, client: Client, sql_dir: Path, pirate_dir: Path) -> None:
    client.adapters.push(sql_dir, name="moved")
    client.adapters.push(pirate_dir, name="moved")
    done = here("adapter", "alias", "moved", "live", "1", "--format", "json")
    assert (done.code, done.json["version"]) == (0, 1)
    stale = here("adapter", "alias", "moved", "live", "2", "--if-match", '"r1"')
    assert stale.code == 1
    assert here("adapter", "show", "moved", "--format", "json").json["aliases"] == {"live": 1}


def test_rollback_of_unmoved_alias_names_working_command(
    here: Run, client: Client, sql_dir: Path, pirate_dir: Path
) -> None:
    client.adapters.push(sql_dir, name="unmoved")
    client.adapters.push(pirate_dir, name="unmoved", promote=False)
    refused = here("adapter", "rollback", "unmoved")
    assert refused.code == 1
    assert "it hasn't been moved since it was created" in refused.stderr
    advice = next(line for line in refused.stderr.splitlines() if "Try: loraserve " in line)
    assert advice.endswith("Try: loraserve adapter alias unmoved live VERSION")
    command = shlex.split(advice[advice.index("loraserve ") :])[1:]
    assert here(*["2" if word == "VERSION" else word for word in command]).code == 0
    assert client.adapters.get("unmoved").aliases == {"live": 2}
    assert here("adapter", "rollback", "unmoved").code == 0
    assert client.adapters.get("unmoved").aliases == {"live": 1}


def test_delete_takes_a_version_or_all(here: Run, client: Client, sql_dir: Path, pirate_dir: Path) -> None:
    client.adapters.push(sql_dir, name="deleted")
    client.adapters.push(pirate_dir, name="deleted")
    assert here("adapter", "delete", "deleted@2").code == 1  # live names it
    assert here("adapter", "delete", "deleted@1").code == 0
    assert here("adapter", "versions", "deleted", "--format", "quiet").stdout == "deleted@2\n"
    assert here("adapter", "delete", "deleted").code == 0
    assert here("adapter", "show", "deleted").code == 1


def test_tenant_lives_and_ends(here: Run) -> None:
    assert here("tenant", "create", "acme", "--max-adapters", "1").code == 0
    assert here("tenant", "show", "acme", "--format", "json").json["limits"]["max_adapters"] == 1
    assert "acme" in here("tenant", "list", "--format", "quiet").stdout.splitlines()
    again = here("tenant", "create", "acme")
    assert again.code == 1
    assert "See: loraserve tenant show acme" in again.stderr
    assert here("tenant", "delete", "acme").code == 0
    assert here("tenant", "show", "acme").code == 1


def test_key_opens_tenant_until_revoked(here: Run, client: Client, sql_dir: Path) -> None:
    client.tenants.create("keyed")
    secret = here("key", "create", "--tenant", "keyed", "--name", "ci", "--format", "quiet").stdout.strip()
    assert secret.startswith("sk-lora-")
    keyed = {"LORASERVE_API_KEY": secret}
    assert here("adapter", "push", sql_dir, "--name", "sql", **keyed).code == 0
    assert here("adapter", "list", "--tenant", "keyed", "--format", "quiet").stdout == "sql\n"
    refused = here("tenant", "list", **keyed)
    assert refused.code == 1
    assert "scope" in refused.stderr

    keys = here("key", "list", "--tenant", "keyed", "--format", "json")
    assert [key["name"] for key in keys.json] == ["ci"]
    assert secret not in keys.stdout
    assert here("key", "revoke", keys.json[0]["id"], "--tenant", "keyed").code == 0
    dead = here("adapter", "list", **keyed)
    assert dead.code == 1
    assert "next: export LORASERVE_API_KEY=" in dead.stderr


def test_foreign_adapter_reads_as_absent(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="private")
    client.tenants.create("stranger")
    secret = client.keys.create("stranger", name="ci").key
    foreign = here("adapter", "show", "private", LORASERVE_API_KEY=secret)
    absent = here("adapter", "show", "no-such", LORASERVE_API_KEY=secret)
    assert foreign.code == absent.code == 1
    assert foreign.stderr.splitlines()[0].replace("private", "no-such") == absent.stderr.splitlines()[0]


def test_run_answers_as_the_adapter_does(loraserve: Run, here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="asked")
    done = here("run", "asked", QUESTION)
    assert (done.code, done.stdout, done.stderr) == (0, f"{SQL}\n", "")
    assert here("run", "asked@1", QUESTION, "--raw").stdout == f"{SQL}\n"
    assert loraserve("run", "asked", "-", stdin=f"{QUESTION}\n").stdout == f"{SQL}\n"
    whole = here("run", "asked", QUESTION, "--format", "json", "--user", "ann", "--timeout", "30").json
    assert whole["choices"][0]["message"]["content"] == SQL


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose base has no chat template."""
    root = tmp_path_factory.mktemp("plain")
    model = shutil.copytree(base_dir(), root / "plain")
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    server = ServerProcess(root / "data", model=model).start()
    yield server
    server.kill()


def test_run_sends_raw_prompt_without_chat_template(run_here: Run, plain_server: ServerProcess) -> None:
    variables = variables_for(plain_server)
    raw = run_here("run", "plain", QUESTION, "--raw", **variables)
    assert (raw.code, raw.stderr) == (0, "")
    assert raw.stdout
    done = run_here("run", "plain", QUESTION, **variables)
    note = "This model has no chat template: the prompt is sent as it is.\n"
    assert (done.code, done.stdout, done.stderr) == (0, raw.stdout, note)
    whole = run_here("run", "plain", QUESTION, "--format", "json", **variables).json
    assert f"{whole['choices'][0]['text']}\n" == raw.stdout


@pytest.mark.parametrize("asked", [["--chat"], ["--system", "Be brief."]])
def test_run_with_chat_option_requires_chat_template(
    run_here: Run, plain_server: ServerProcess, asked: list[str]
) -> None:
    variables = variables_for(plain_server)
    done = run_here("run", "plain", QUESTION, *asked, **variables)
    assert (done.code, done.stdout) == (1, "")
    assert "no chat template" in done.stderr
    assert f"next: loraserve run plain '{QUESTION}' --raw" in done.stderr


def test_run_of_unknown_model_names_listing_command(here: Run) -> None:
    done = here("run", "nobody", "hello")
    assert done.code == 1
    assert done.stdout == ""
    assert "next: loraserve adapter list" in done.stderr


def test_ps_shows_adapter_tiers_and_running_work(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="resident")
    assert here("adapter", "pin", "resident", "--format", "json").json["is_done"] is True
    shown = here("ps", "--format", "json").json
    (row,) = (row for row in shown["adapters"] if row["name"] == "resident")
    assert (row["tier"], row["is_pinned"], row["dtype"], row["precision_loss"]) == ("device", True, "bf16", 0.0)
    assert shown["engine"]["kv_blocks"] > 0
    base = shown["base"]
    assert (base["quantization"], base["arithmetic"], base["device"]) == ("none", "fp32", "cpu")
    assert base["instructions"]
    memory = shown["memory"]
    parts = ("kv_used_bytes", "kv_idle_bytes", "adapters_used_bytes", "adapters_idle_bytes", "free_bytes")
    assert memory["budget_bytes"] == sum(memory[part] for part in parts) > 0
    assert here("adapter", "unpin", "resident@1").code == 0
    human = here("ps").stdout
    for word in ("fp32 (", "requests", "device", "found", "evicted", "resident@1", "DTYPE"):
        assert word in human


def test_ps_counts_shared_weights_once(here: Run, client: Client, sql_dir: Path) -> None:
    for name in ("shared-1", "shared-2"):
        client.adapters.push(sql_dir, name=name)
    assert here("adapter", "pin", "shared-1").code == 0
    found = [row for row in client.residency() if row.name.startswith("shared-")]
    assert len({row.digest for row in found}) == 1
    every = list(client.residency(resident=False))
    lines = here("ps", "--all").stdout.splitlines()
    assert sum(line.split().count("shared") == 3 for line in lines) == len(every) - len({row.digest for row in every})
    assert here("adapter", "unpin", "shared-1@1").code == 0


def test_ps_keeps_watching_until_interrupted(start_cli: Start) -> None:
    watching = start_cli("ps", "--watch", "--interval", "0.1", "--format", "json")
    looks = [json.loads(watching.stdout.readline()) for _ in range(3)]
    watching.send_signal(signal.SIGINT)
    _, stderr = watching.communicate(timeout=20)
    assert watching.returncode == 130
    assert stderr == ""
    assert all("adapters" in look for look in looks)


def test_ps_redraws_in_place_on_terminal_until_interrupted(
    variables_of: Callable[[], dict[str, str]],
) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "loraserve.cli.main", "ps", "--watch", "--interval", "0.1"]
    variables = variables_of() | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    watching = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=variables,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(theirs)
    shown = b""
    try:
        while shown.count(b"running,") < 3:
            shown += os.read(ours, 65_536)
        watching.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while part := os.read(ours, 65_536):
                shown += part
        assert watching.wait(20) == 130
        assert watching.stderr is not None
        assert watching.stderr.read() == b""
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)
        if watching.stderr is not None:
            watching.stderr.close()
    # up over the last frame, and the cursor is there again at the end
    assert shown.count(b"\x1b[1A") > 2
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


def test_early_reader_exit_ends_command_quietly(start_cli: Start) -> None:
    watching = start_cli("ps", "--watch", "--interval", "0.1", "--format", "json")
    watching.stdout.readline()
    watching.stdout.close()
    assert watching.stderr.read() == ""
    assert watching.wait(20) == 1


def test_wrong_key_is_refused_and_not_shown(here: Run) -> None:
    done = here("adapter", "list", LORASERVE_API_KEY="sk-lora-wrong")
    assert done.code == 1
    assert "sk-lora-wrong" not in done.stderr
    assert "next: export LORASERVE_API_KEY=" in done.stderr


def test_taken_port_is_said_and_exits_2(run_cli: Run, real_server: ServerProcess, tmp_path: Path) -> None:
    port = real_server.url.rsplit(":", 1)[1]
    done = run_cli("serve", "--model", base_dir(), "--port", port, "--data-dir", tmp_path / "data")
    assert done.code == 2
    assert f"port {port}" in done.stderr


def test_revoking_unknown_key_names_working_command(here: Run) -> None:
    done = here("key", "revoke", "--tenant", "default", "nobody")
    assert done.code == 1
    assert "loraserve key list --tenant default" in done.stderr
