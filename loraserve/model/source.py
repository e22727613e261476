"""Where a base model's files are: a directory, or a Hugging Face id that is brought to one. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from loraserve.errors import ConfigError

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]


def resolve_model_dir(model: str) -> Path:
    """Return the directory with the model's ``config.json``, downloading it when ``model`` is a hub id.

    Raises:
        ConfigError: no such directory and no such id, or the ``hub`` extra isn't installed.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"The directory {model} has no config.json.", hint="--model takes a Hugging Face directory."
            )
        return path.resolve()
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ConfigError(
            f"There is no directory {model}.", hint="--model takes a Hugging Face directory, or an id such as ORG/NAME."
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"There is no directory {model}, and hub ids need the package huggingface_hub.",
            hint='Try: pip install "loraserve[hub]"',
        ) from None
    try:
        return Path(snapshot_download(model, allow_patterns=_PATTERNS, token=os.environ.get("HF_TOKEN")))
    except Exception as error:  # the hub's client raises many kinds
        raise ConfigError(f"The model {model} can't be fetched: {type(error).__name__}: {error}") from error
