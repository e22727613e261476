"""The base's generation_config.json, from a server's start to its answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import base_dir

CONFIG = {"do_sample": False, "max_new_tokens": 5, "top_p": 2, "eos_token_id": 3}


@pytest.mark.parametrize(
    ("mode", "defaults"), [("auto", {"temperature": 0, "max_tokens": 5}), ("none", {})], ids=["auto", "none"]
)
def test_server_takes_defaults_of_base(tmp_path: Path, mode: str, defaults: dict[str, int]) -> None:
    model = shutil.copytree(base_dir(), tmp_path / "base")
    (model / "generation_config.json").write_text(json.dumps(CONFIG))
    flags = ("--memory-budget", "64MiB", "--host-cache", "64MiB", "--generation-config", mode)
    server = ServerProcess(tmp_path / "data", model=model, flags=flags)
    server.start()
    try:
        with Client(server.url, api_key=server.make_tenant("acme")) as client:
            shown = client.base()
            assert shown.generation_defaults == defaults
            asked = [
                client.completions.create(model=shown.id, prompt="Once", extra_body={"ignore_eos": True})
                for _ in range(3)
            ]
        texts = {answer.choices[0].text for answer in asked}
        lengths = {answer.usage.completion_tokens for answer in asked if answer.usage is not None}
        assert lengths == ({5} if defaults else {16})
        assert (len(texts) == 1) == bool(defaults)
        log = server.log.read_text()
        assert ("from the base's generation_config.json: temperature 0, max_tokens 5" in log) == bool(defaults)
        assert ("top_p is 2; expected a number from 0 to 1" in log) == bool(defaults)
    finally:
        assert server.stop() == 0
