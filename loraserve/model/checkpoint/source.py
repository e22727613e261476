"""Source of a base model's files: a directory, or a repository on the Hugging Face hub.

Imports no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from loraserve.errors import ConfigError
from loraserve.model.gguf.gguf_folder import find_gguf, gguf_folder

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?)(@(?P<revision>[\w./-]{1,200}))?")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
"""Pickled weights are never fetched."""


def local_model_dir(path: Path) -> Path:
    """Return the directory that means a base on this machine: a path itself, or a GGUF file's.

    Raises:
        ConfigError: a directory has several GGUF files.
        UnknownArchitecture, ModelError: what a GGUF file has that isn't implemented.
    """
    file = find_gguf(path)
    return path if file is None else gguf_folder(file)


def resolve_model_dir(model: str) -> Path:
    """Return the absolute path of the directory that holds the model's ``config.json``.

    Where `model` names no directory and no GGUF file, it is fetched from the hub.

    Args:
        model: a directory, a GGUF file, or ``org/name`` with an optional ``@revision``. A path goes
            first.

    Raises:
        ConfigError: there's no such directory or repository, it holds no ``config.json``, or the
            hub can't be reached (or isn't installed).
        UnknownArchitecture, ModelError: as `local_model_dir`.
    """
    path = local_model_dir(Path(model).expanduser())
    if path.is_dir():
        return _with_config(path, model)
    match = _HUB_ID.fullmatch(model)
    if path.exists() or match is None or model.startswith((".", "~", "/")):
        found = "is a file" if path.exists() else "doesn't exist"
        raise ConfigError(
            f"The model {model!r} {found}; expected a directory with config.json, a GGUF file, or org/name on the hub."
        )
    return _with_config(_fetch(match["repo"], match["revision"]), model)


def _with_config(path: Path, model: str) -> Path:
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"The model {model!r} has no config.json (looked in {path}).",
            hint="Give the directory that holds config.json and the safetensors files.",
        )
    return path.resolve()


def _fetch(repo: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"The directory {repo!r} doesn't exist, and huggingface_hub isn't installed, "
            "so it can't be fetched from the hub.",
            hint='Give a directory, or run: pip install "loraserve[hub]".',
        ) from None
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"The directory {repo!r} doesn't exist, and it can't be fetched from the hub: {reason}",
            hint="Check the name, the network, and HF_TOKEN for gated models.",
        ) from error
