"""Source of a base model's files: a directory, or a repository on the Hugging Face hub.

Imports no torch.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from loraserve.adapter_folder import CONFIG_FILE
from loraserve.errors import ConfigError
from loraserve.hub import HubAddress, fetch, is_hub
from loraserve.model.gguf.gguf_folder import find_gguf, gguf_folder

_MAX_CONFIG_BYTES = 1 << 20


def local_model_dir(path: Path) -> Path:
    """Find the directory that means a base on this machine: a path itself, or a GGUF file's.

    What ``hf:`` names on the hub is fetched first.

    Raises:
        ConfigError: a directory has several GGUF files, or as `HubAddress.parse` and `fetch`.
        UnknownArchitecture, ModelError: what a GGUF file has that isn't implemented.
    """
    if is_hub(str(path)):
        path = fetch(HubAddress.parse(str(path)), "base").path
    file = find_gguf(path)
    return path if file is None else gguf_folder(file)


def local_draft_dir(path: Path | None) -> Path | None:
    """Find the path of a draft base, fetched first where ``hf:`` names it; None: there is none.

    Raises:
        ConfigError: as `HubAddress.parse` and `fetch`.
    """
    if path is None or not is_hub(str(path)):
        return path
    return fetch(HubAddress.parse(str(path)), "base").path


def resolve_model_dir(model: str) -> Path:
    """Find the absolute path of the directory that holds the model's ``config.json``.

    Where `model` names no directory and no GGUF file, it is fetched from the hub.

    Args:
        model: a directory, a GGUF file, ``hf:`` and what `loraserve.hub` reads, or ``org/name``
            with an optional ``@revision``. A path goes first.

    Raises:
        ConfigError: there's no such directory or repository, it holds no ``config.json``, or the
            hub can't be reached (or isn't installed).
        UnknownArchitecture, ModelError: as `local_model_dir`.
    """
    path = local_model_dir(Path(model).expanduser())
    if path.is_dir():
        return _with_config(path, model)
    if path.exists() or not _could_be_on_hub(model):
        found = "is a file" if path.exists() else "doesn't exist"
        raise ConfigError(
            f"The model {model!r} {found}; expected a directory with config.json, a GGUF file, or hf:ORG/NAME."
        )
    try:
        return _with_config(local_model_dir(Path(f"hf:{model}")), model)
    except ConfigError as error:
        raise ConfigError(f"The directory {model!r} doesn't exist, and {error.message}", hint=error.hint) from error


def _could_be_on_hub(model: str) -> bool:
    if model.startswith("/"):
        return False
    try:
        return HubAddress.parse(f"hf:{model}").part is None
    except ConfigError:
        return False


def _with_config(path: Path, model: str) -> Path:
    if not (path / "config.json").is_file():
        if (path / CONFIG_FILE).is_file():
            raise ConfigError(
                f"The model {model!r} is an adapter's folder (it has {CONFIG_FILE}), and serve takes a base.",
                hint=f"Serve its base{_base_named_in(path / CONFIG_FILE)}, then push it. "
                f"Try: loraserve adapter push {shlex.quote(model)}",
            )
        raise ConfigError(
            f"The model {model!r} has no config.json (looked in {path}).",
            hint="Give the directory that holds config.json and the safetensors files.",
        )
    return path.resolve()


def _base_named_in(config: Path) -> str:
    """Format the base that an adapter's config names; empty: it names none."""
    try:
        value = json.loads(config.read_bytes()[:_MAX_CONFIG_BYTES])
        base = value["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f" ({base[:200]!r})" if isinstance(base, str) and base else ""
