"""The command line backs a running server up, and another one starts from what is restored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

PROMPT = "list the tickets with age over 81"


def answer(server: ServerProcess, key: str) -> str:
    with Client(server.url, api_key=key) as client:
        return client.completions.create(model="sql", prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text


def test_running_server_is_backed_up_and_restored_elsewhere(tmp_path: Path, subtests: Any) -> None:
    one, two = ServerProcess(tmp_path / "one"), ServerProcess(tmp_path / "two")
    folder = str(tmp_path / "backups")
    try:
        one.start()
        key = one.make_tenant("acme")
        with Client(one.url, api_key=key) as client:
            client.adapters.push(str(adapter_dirs()["sql"]), name="sql")
        text = answer(one, key)
        done = one.run("backup", folder, "--data-dir", str(one.data_dir), "--format", "json")
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        assert (made["blobs"], made["copied"], made["damaged"]) == (2, 2, 0)
        again = one.run("backup", folder, "--data-dir", str(one.data_dir), "--keep", "1", "--format", "json")
        assert (json.loads(again.stdout)["copied"], json.loads(again.stdout)["removed"]) == (0, 1)
        listed = one.run("restore", folder, "--list", "--format", "quiet")
        assert listed.stdout.split() == [json.loads(again.stdout)["id"]]
        titles, row = one.run("restore", folder, "--list").stdout.splitlines()
        assert "BYTES" in titles
        assert re.search(r"\d+\.\d [KM]iB ", row)
        assert one.run("restore", folder, "--verify").returncode == 0
        refused = one.run("restore", folder, "--data-dir", str(one.data_dir))
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "isn't empty" in refused.stderr
        restored = two.run("restore", folder, "--data-dir", str(two.data_dir))
        assert restored.returncode == 0, restored.stderr
        assert "--rebase" in restored.stderr
        two.start()
        assert answer(two, key) == text == answer(one, key)
        assert (one.stop(), two.stop()) == (0, 0)
        for words, code, said in (
            (("backup", folder, "--data-dir", str(tmp_path / "absent")), 2, "doesn't exist"),
            (("backup", folder, "--keep", "0", "--data-dir", str(one.data_dir)), 2, "--keep"),
            (("backup", folder, "--keep", "x", "--data-dir", str(one.data_dir)), 2, "--keep"),
            (("backup", str(one.log), "--data-dir", str(one.data_dir)), 2, "can't be opened"),
            (("backup", str(one.data_dir), "--data-dir", str(one.data_dir), "--retention-s", "-1"), 2, "--retention-s"),
            (("restore", str(tmp_path)), 2, "isn't a folder of backups"),
            (("restore", folder, "--backup", "../x", "--data-dir", str(tmp_path / "three")), 2, "no backup"),
            (("restore", folder, "--list", "--verify"), 2, "exclude each other"),
            (("restore", folder, "--database-url", "mysql://x"), 2, "mysql"),
            (("db", "downgrade", "0001", "--data-dir", str(one.data_dir)), 2, "can't go back|no way back"),
        ):
            with subtests.test(" ".join(words)):
                run = one.run(*words)
                assert run.returncode == code, run.stderr
                assert any(part in run.stderr for part in said.split("|")), run.stderr
                assert "Traceback" not in run.stderr
    finally:
        one.kill()
        two.kill()
