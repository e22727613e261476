from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loraserve.errors import ConfigError
from loraserve.model.checkpoint.source import resolve_model_dir


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_directory_resolves_to_same_directory(model_dir: Path) -> None:
    assert resolve_model_dir(str(model_dir)) == model_dir


def test_relative_directory_becomes_absolute(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_dir.parent)
    assert resolve_model_dir("model") == model_dir


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model_dir(str(tmp_path))


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent-model", "a/b/c", "a b", "", "a//b", "../x"])
def test_missing_path_is_never_looked_up_on_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.model.checkpoint.source.fetch", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError):
        # an empty name is the current directory, which has no config.json
        resolve_model_dir(name)


def test_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model_dir(str(tmp_path / "model.safetensors"))


def test_without_the_hub_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"loraserve\[hub\]"):
        resolve_model_dir("org/name")


def test_source_loads_no_torch() -> None:
    code = "import sys, loraserve.model.checkpoint.source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
