"""Source of a base model's files: a directory, or a repository on the Hugging Face hub.

Imports no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from loraserve.errors import ConfigError

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?)(@(?P<revision>[\w./-]{1,200}))?")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
"""Pickled weights are never fetched."""


def resolve_model_dir(model: str) -> Path:
    """Return the absolute path of the directory that holds the model's ``config.json``.

    Where `model` names no directory, it is fetched from the hub.

    Args:
        model: a directory, or ``org/name`` with an optional ``@revision``. A directory goes first.

    Raises:
        ConfigError: there's no such directory or repository, it holds no ``config.json``, or the
            hub can't be reached (or isn't installed).
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _with_config(path, model)
    match = _HUB_ID.fullmatch(model)
    if path.exists() or match is None or model.startswith((".", "~", "/")):
        found = "is a file" if path.exists() else "doesn't exist"
        raise ConfigError(
            f"The model {model!r} {found}; expected a directory with config.json, or org/name on the hub."
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
