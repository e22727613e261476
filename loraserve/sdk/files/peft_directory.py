"""A directory as PEFT's `save_pretrained` makes it."""

from __future__ import annotations

import json
from pathlib import Path

from loraserve import errors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def find_files(directory: Path) -> tuple[Path, Path]:
    """Return the config's and the weights' path in a PEFT directory.

    Raises:
        AdapterFormatError: one of them isn't there; the message says what is.
    """
    expected = f"Expected a directory with {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT's save_pretrained() writes it."
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "doesn't exist"
        raise errors.AdapterFormatError(f"{directory} {found}.", hint=expected)
    config, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    if not weights.is_file() and (directory / "adapter_model.bin").exists():
        raise errors.AdapterFormatError(
            f"{directory} holds pickled weights (adapter_model.bin), which are never loaded: pickle can run any code.",
            hint="Save it again with model.save_pretrained(dir, safe_serialization=True).",
        )
    missing = [path.name for path in (config, weights) if not path.is_file()]
    if missing:
        there = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
        raise errors.AdapterFormatError(
            f"{directory} has no {' and no '.join(missing)}; it holds {there}.", hint=expected
        )
    return config, weights


def read_config(path: Path) -> str:
    """Return the file's text, which is one JSON object.

    Raises:
        AdapterFormatError: it isn't.
    """
    try:
        text = path.read_bytes().decode()
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise errors.AdapterFormatError(f"{path} isn't a JSON object in UTF-8.", hint="Save the adapter again.")
    return text
