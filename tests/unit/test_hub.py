"""Bases and adapters on a hub: what an address means, and what the real client fetches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, running_hub
from huggingface_hub import constants

from loraserve.errors import AdapterFormatError, ConfigError
from loraserve.hub import HubAddress, fetch, select
from loraserve.model.checkpoint.source import resolve_model_dir

BASE = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "model-00001-of-00002.safetensors": b"a" * 300_000,
    "model-00002-of-00002.safetensors": b"b" * 10,
    "model.safetensors.index.json": b"{}",
    # not read, and large where they are
    "consolidated.safetensors": b"c",
    "pytorch_model.bin": b"d",
    "onnx/model.onnx": b"e",
    "original/params.json": b"f",
    "README.md": b"g",
}
ADAPTER = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"a",
    "tokenizer.json": b"{}",
    "optimizer.pt": b"b",
    "checkpoint-9/adapter_config.json": b"{}",
    "checkpoint-9/adapter_model.safetensors": b"c",
}
GGUF = {
    "tiny-Q4_K_M.gguf": b"1",
    "tiny.q8_0.gguf": b"2",
    "tiny-F16-00001-of-00002.gguf": b"3",
    "tiny-F16-00002-of-00002.gguf": b"4",
    "mmproj-tiny-Q4_K_M.gguf": b"5",
    "README.md": b"6",
}
LARGE = bytes(range(256)) * 100_000
REPOSITORIES = {
    "org/large": {"config.json": b"{}", "model.safetensors": LARGE},
    "org/base": BASE,
    "org/adapter": ADAPTER,
    "org/files": GGUF,
    "org/one": {"only.gguf": b"1", "config.json": b"{}"},
    "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"x"},
    "org/merged": {"config.json": b"{}", "model.safetensors": b"x"},
    "private/base": BASE,
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(REPOSITORIES) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        # read from the environment once, at their import
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf:org/name", ("org/name", None, None)),
        ("hf://org/name", ("org/name", None, None)),
        ("hf:/org/name", ("org/name", None, None)),
        ("hf:gpt2", ("gpt2", None, None)),
        ("hf:org/name@v1.0", ("org/name", "v1.0", None)),
        ("hf:org/name@refs/pr/3", ("org/name", "refs/pr/3", None)),
        ("hf:org/name:Q4_K_M", ("org/name", None, "Q4_K_M")),
        ("hf:org/a.b-c@main:checkpoints/9", ("org/a.b-c", "main", "checkpoints/9")),
    ],
)
def test_address_has_repository_revision_and_part(text: str, parts: tuple[str, ...]) -> None:
    address = HubAddress.parse(text)
    assert (address.repo, address.revision, address.part) == parts
    assert HubAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["hf:", "hf:org/", "hf:a/b/c", "hf:org/name@", "hf:org/name:", "hf:org/..", "hf:o/n:../x", "hf:o/n@a@b"]
)
def test_malformed_hub_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"hf:ORG/NAME"):
        HubAddress.parse(text)


@pytest.mark.parametrize(
    ("repo", "part", "wanted", "kind", "place", "names"),
    [
        (
            "org/base",
            None,
            "base",
            "base",
            "",
            {
                "config.json",
                "tokenizer.json",
                "chat_template.jinja",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
            },
        ),
        (
            "org/adapter",
            None,
            None,
            "adapter",
            "",
            {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"},
        ),
        (
            "org/adapter",
            "checkpoint-9",
            "adapter",
            "adapter",
            "checkpoint-9",
            {"checkpoint-9/adapter_config.json", "checkpoint-9/adapter_model.safetensors"},
        ),
        ("org/files", "q4_k_m", "base", None, "tiny-Q4_K_M.gguf", {"tiny-Q4_K_M.gguf"}),
        ("org/files", "Q8_0", None, None, "tiny.q8_0.gguf", {"tiny.q8_0.gguf"}),
        ("org/files", "tiny-Q4_K_M.gguf", "adapter", None, "tiny-Q4_K_M.gguf", {"tiny-Q4_K_M.gguf"}),
        (
            "org/files",
            "F16",
            "base",
            None,
            "tiny-F16-00001-of-00002.gguf",
            {"tiny-F16-00001-of-00002.gguf", "tiny-F16-00002-of-00002.gguf"},
        ),
        ("org/one", None, "base", None, "only.gguf", {"only.gguf"}),
    ],
)
def test_files_are_chosen_by_requested_kind(
    repo: str, part: str | None, wanted: str | None, kind: str | None, place: str, names: set[str]
) -> None:
    found = select(REPOSITORIES[repo], HubAddress(repo, None, part), wanted)
    assert (found.kind, found.place, set(found.names)) == (kind, place, names)


@pytest.mark.parametrize(
    ("repo", "part", "wanted", "found", "cure"),
    [
        ("org/files", None, "base", "has GGUF files tiny-F16.gguf, tiny-Q4_K_M.gguf", "hf:ORG/NAME:Q4_K_M"),
        ("org/files", "Q2_K", "base", "nothing named 'Q2_K'; it has GGUF files tiny-F16.gguf", "hf:ORG/NAME"),
        ("org/base", "Q2_K", "base", "nothing named 'Q2_K'; it has no GGUF file", "Name one"),
        ("org/adapter", None, "base", "is an adapter, not a base", "loraserve adapter push hf:org/adapter"),
        ("org/merged", None, "adapter", "a whole model: serve it as a base", "hf:ORG/NAME:FOLDER"),
        ("org/pickled", None, "base", "pickled weights alone", "save_pretrained"),
        ("org/base", "onnx", "base", "has no model; it holds model.onnx", "Expected config.json"),
    ],
)
def test_repository_without_requested_kind_is_refused_listing_files(
    repo: str, part: str | None, wanted: str, found: str, cure: str
) -> None:
    with pytest.raises((ConfigError, AdapterFormatError)) as caught:
        select(REPOSITORIES[repo], HubAddress(repo, None, part), wanted)
    assert found in caught.value.message
    assert caught.value.hint is not None
    assert cure in caught.value.hint


def test_base_is_fetched_once_without_unused_files(hub: Hub) -> None:
    found = fetch(HubAddress.parse("hf:org/base"), "base")
    names = {path.name for path in found.path.iterdir()}
    assert names == {name for name in BASE if "/" not in name} - {
        "consolidated.safetensors",
        "pytorch_model.bin",
        "README.md",
    }
    assert (found.path / "model-00001-of-00002.safetensors").read_bytes() == BASE["model-00001-of-00002.safetensors"]
    assert (found.kind, found.commit) == ("base", COMMIT)
    num_downloads = len(hub.downloads())
    assert fetch(HubAddress.parse("hf:org/base@main")) == found
    assert len(hub.downloads()) == num_downloads


def test_interrupted_fetch_resumes_at_cutoff(hub: Hub) -> None:
    # the client writes ten megabytes at a time
    hub.cut_after = 21_000_000
    found = fetch(HubAddress.parse("hf:org/large"), "base")
    assert (found.path / "model.safetensors").read_bytes() == LARGE
    assert [first for _, path, first in hub.asked if path.endswith("model.safetensors") and first] == [
        "bytes=20971520-"
    ]


def test_fetched_base_is_found_without_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fetch(HubAddress.parse("hf:org/base"), "base")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    again = fetch(HubAddress.parse("hf:org/base"), "base")
    assert again == found
    with pytest.raises(ConfigError, match="can't be fetched from the hub"):
        fetch(HubAddress.parse("hf:org/adapter"))


def test_private_repository_needs_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
        fetch(HubAddress.parse("hf:private/base"), "base")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert fetch(HubAddress.parse("hf:private/base"), "base").kind == "base"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="of a gated or private one, HF_TOKEN") as caught:
        fetch(HubAddress.parse("hf:private/base@v1.0"), "base")
    assert "hf_wrong" not in str(caught.value)


@pytest.mark.parametrize("address", ["hf:org/base@v9", "hf:org/absent"])
def test_absent_repository_or_revision_is_named(hub: Hub, address: str) -> None:
    with pytest.raises(ConfigError, match=f"{address} can't be fetched from the hub: "):
        fetch(HubAddress.parse(address), "base")


def test_local_directory_precedes_hub_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fetched = resolve_model_dir("org/base@v1.0")
    assert json.loads((fetched / "config.json").read_text()) == {}
    assert resolve_model_dir("hf:org/base@v1.0") == fetched
    (tmp_path / "org" / "base").mkdir(parents=True)
    (tmp_path / "org" / "base" / "config.json").write_text("{}")
    assert resolve_model_dir("org/base") == tmp_path / "org" / "base"
    with pytest.raises(ConfigError, match="The directory 'org/absent' doesn't exist, and hf:org/absent can't be"):
        resolve_model_dir("org/absent")


@pytest.mark.parametrize("part", [None, "Q4_K_M"])
def test_names_outside_of_repository_are_ignored(part: str | None) -> None:
    names = ["../../a-Q4_K_M.gguf", "/etc/b-Q4_K_M.gguf", "c/../../d-Q4_K_M.gguf", "e-Q4_K_M.gguf"]
    assert select(names, HubAddress("acme/x", None, part), None).names == ("e-Q4_K_M.gguf",)
