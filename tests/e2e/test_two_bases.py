"""Another base on the same data: its versions are refused, listed and found by doctor, taken over
by an explicit word, and given back by it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx2
import pytest
from command_line import Done, run_here
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client
from loraserve.demo.frames import fresh_prompts
from loraserve.demo.pack import BASE_NAME, adapter_dirs, base_dir
from loraserve.errors import AdapterOfAnotherBase, AdapterRejected

FLAGS = ("--memory-budget", "32MiB", "--host-cache", "32MiB", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
PROMPT = fresh_prompts(1, 77)[0].prompt


def swap_layers(source: Path, target: Path) -> Path:
    """Save a base of the same shapes and the same tokenizer, which computes something else: its
    first layer is the second, and the other way round.
    """
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    places = {"model.layers.0.": "model.layers.1.", "model.layers.1.": "model.layers.0."}
    swapped = {}
    for name, entry in header.items():
        old = next((prefix for prefix in places if name.startswith(prefix)), "")
        swapped[places.get(old, "") + name.removeprefix(old)] = entry
    text = json.dumps(swapped).encode()
    path.chmod(0o600)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return target


def ask(server: ServerProcess, key: str, model: str) -> httpx2.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    return httpx2.post(
        f"{server.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
    )


def text(server: ServerProcess, key: str, model: str) -> str:
    answer = ask(server, key, model)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def run(server: ServerProcess, key: str, *arguments: str) -> Done:
    """Run a command of the real command line, against the server."""
    variables = {"LORASERVE_URL": server.url, "LORASERVE_API_KEY": key, "LORASERVE_DATA_DIR": str(server.data_dir)}
    return run_here(*arguments, **variables)


def bases_check(server: ServerProcess) -> dict[str, str]:
    done = run(server, ADMIN_KEY, "doctor", "--model", str(server.model), "--format", "json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    found: dict[str, str] = checks["bases"]
    return found


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_swapped_base_serves_no_adapter_of_previous_base(
    tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    flags = FLAGS
    if database == "postgres":
        flags = (*flags, "--database-url", request.getfixturevalue("make_postgres_url")())
    base_a, base_b = base_dir(), swap_layers(base_dir(), tmp_path / "other-base")
    a = ServerProcess(tmp_path / "data", model=base_a, flags=(*flags, "--base-names", BASE_NAME))
    b = ServerProcess(tmp_path / "data", model=base_b, flags=flags)
    try:
        a.start()
        key = a.make_tenant("acme")
        sql, french = (str(adapter_dirs()[name]) for name in ("sql", "french"))
        for name, folder in (("sql", sql), ("french", french)):
            done = run(a, key, "adapter", "push", folder, "--name", name)
            assert done.code == 0, done.stderr
            assert "Warning" not in done.stderr
        with Client(a.url, api_key=key) as client:
            client.adapters.set_fallback("french", "base")
            digest_a = client.base().digest
        before = {name: text(a, key, name) for name in ("sql", "french", a.model.name)}
        assert a.stop() == 0

        # another base, the same data
        b.start()
        refused = ask(b, key, "sql")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (409, "adapter_base_mismatch", "sql@1")
        assert digest_a[:12] in error["message"]
        assert refused.headers["x-should-retry"] == "false"
        with Client(b.url, api_key=key) as client:
            with pytest.raises(AdapterOfAnotherBase):
                client.completions.create(model="sql", prompt=PROMPT, max_tokens=1)
            with pytest.raises(AdapterOfAnotherBase):
                client.adapters.verify("sql", 1)
            with pytest.raises(AdapterOfAnotherBase):
                client.adapters.push(sql, name="sql")
            with pytest.raises(AdapterOfAnotherBase):
                client.adapters.warm("sql", 1)
            assert client.adapters.version("sql", 1).state == "other_base"
        fallen_back = ask(b, key, "french")
        assert fallen_back.status_code == 200
        assert fallen_back.headers["x-loraserve-adapter"] == (
            f"{base_b.name}; fallback-from=french@1; reason=adapter_base_mismatch"
        )
        assert fallen_back.json()["choices"][0]["text"] == text(b, key, base_b.name)
        assert ask(b, key, "sql+0.5*french").status_code == 409
        listed = run(b, key, "adapter", "list")
        assert "2 versions were made for another base" in listed.stderr
        assert "other_base" in run(b, key, "adapter", "versions", "sql").stdout
        shown = run(b, key, "adapter", "show", "sql@1")
        assert (digest_a in shown.stdout, "--rebase" in shown.stderr) == (True, True)
        if database == "sqlite":
            assert bases_check(b)["status"] == "warn"
            assert "2 aren't served" in bases_check(b)["found"]

        # nothing moves without the word; with it what passes does
        plain = run(b, key, "adapter", "verify", "sql")
        assert plain.code == 1
        assert "loraserve adapter verify sql@1 --rebase" in plain.stderr
        taken = run(b, key, "adapter", "verify", "sql", "--rebase")
        assert taken.code == 0, taken.stderr
        # its config still calls it the other base's
        assert f"Warning: base_model_name_or_path is '{BASE_NAME}'" in taken.stderr
        answered = ask(b, key, "sql")
        assert (answered.status_code, answered.headers["x-loraserve-adapter"]) == (200, "sql@1")
        # certificates say nothing of which base the adapter was trained on
        with Client(b.url, api_key=key) as client:
            entries = [entry for entry in client.audit() if entry.action == "version.verify"]
        assert entries[0].detail["base_before"] == digest_a
        assert b.stop() == 0

        # and back: what was never taken answers as ever, the other one once it is given back
        a.start()
        assert text(a, key, "french") == before["french"]
        assert text(a, key, a.model.name) == before[a.model.name]
        assert ask(a, key, "sql").status_code == 409
        assert run(a, key, "adapter", "verify", "sql", "--rebase").code == 0
        assert text(a, key, "sql") == before["sql"]
        if database == "sqlite":
            assert bases_check(a)["status"] == "ok"
        assert a.stop() == 0
    finally:
        a.kill()
        b.kill()


@pytest.mark.campaign
def test_foreign_base_name_warns_or_fails_strict_server(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", flags=FLAGS)
    folder = str(adapter_dirs()["sql"])
    try:
        server.start()
        key = server.make_tenant("acme")
        pushed = run(server, key, "adapter", "push", folder, "--name", "sql", "--format", "json")
        assert pushed.code == 0
        assert f"Warning: base_model_name_or_path is '{BASE_NAME}'; this server serves base" in pushed.stderr
        version = json.loads(pushed.stdout)
        (check,) = (check for check in version["checks"] if check["name"] == "base_name")
        assert (version["state"], check["status"], version["warnings"]) == ("ready", "warned", [check["detail"]])
        assert server.stop() == 0
        server.flags = (*FLAGS, "--strict-base")
        server.start()
        refused = run(server, key, "adapter", "push", folder, "--name", "strict")
        assert refused.code == 1
        assert BASE_NAME in refused.stderr
        assert "--base-names" in refused.stderr
        with Client(server.url, api_key=key) as client:
            with pytest.raises(AdapterRejected):
                client.adapters.push(folder, name="strict", dry_run=True)
            assert [adapter.name for adapter in client.adapters.list()] == ["sql"]
        # what is there already is served
        assert ask(server, key, "sql").status_code == 200
        assert server.stop() == 0
        server.flags = (*server.flags, "--base-names", f"other,{BASE_NAME.upper()}")
        server.start()
        accepted = run(server, key, "adapter", "push", folder, "--name", "strict")
        assert (accepted.code, "Warning" in accepted.stderr) == (0, False)
        assert server.stop() == 0
    finally:
        server.kill()
