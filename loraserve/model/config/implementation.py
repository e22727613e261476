"""Choice of the code that computes a base: this package's decoder, or transformers'.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from loraserve.errors import ConfigError, UnknownArchitecture
from loraserve.model.config.model_config import read_config

NATIVE, TRANSFORMERS = "native", "transformers"


def choose_implementation(model_dir: Path, asked: str) -> str:
    """Choose ``native`` or ``transformers``.

    Args:
        asked: one of them, or ``auto``: native for each architecture of the table.

    Raises:
        UnknownArchitecture: the architecture isn't in the table, and either transformers isn't
            installed or native code is requested.
        ConfigError: transformers is requested, and isn't installed.
        ModelError: what else is wrong with the config of a base of the table.
    """
    is_installed = importlib.util.find_spec("transformers") is not None
    install = "Install transformers, whose code may serve it: pip install 'loraserve[transformers]'"
    if asked == TRANSFORMERS:
        if not is_installed:
            raise ConfigError("--model-impl transformers needs transformers, which isn't installed.", hint=install)
        return TRANSFORMERS
    try:
        read_config(model_dir)
    except UnknownArchitecture as error:
        if asked == NATIVE:
            hint = "Use --model-impl auto, which may serve it by transformers' code."
            raise UnknownArchitecture(error.message, hint=hint) from error
        if not is_installed:
            raise UnknownArchitecture(error.message, hint=install) from error
        return TRANSFORMERS
    return NATIVE
