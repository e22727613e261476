"""The shipped demo pack: a tiny base model and its seven adapters. Imports no torch.

pack/base/                config.json, model.safetensors, tokenizer.json, tokenizer_config.json,
                          generation_config.json
pack/adapters/<style>/    adapter_config.json, adapter_model.safetensors
pack/card.json, CARD.md   how it was made, and how often it is right
"""

from __future__ import annotations

from pathlib import Path

from loraserve.demo.frames import ADAPTERS
from loraserve.errors import ConfigError

BASE_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
CARD_FILES = ("card.json", "CARD.md")
BASE_NAME = "loraserve-demo-base"
"""Name of the base in the adapters' configs."""


def pack_dir() -> Path:
    """Locate the shipped pack's root."""
    return Path(__file__).resolve().parent / "pack"


def base_dir(pack: Path | None = None) -> Path:
    """Locate the base model's directory, in `pack` or else in the shipped one."""
    return (pack or pack_dir()) / "base"


def adapter_dirs(pack: Path | None = None) -> dict[str, Path]:
    """Adapter name → PEFT directory, in the order of the styles."""
    root = (pack or pack_dir()) / "adapters"
    return {style: root / style for style in ADAPTERS}


def pack_files(pack: Path | None = None) -> tuple[Path, ...]:
    """List the files of a pack.

    Raises:
        ConfigError: one of them isn't there.
    """
    root = pack or pack_dir()
    files = [base_dir(root) / name for name in BASE_FILES]
    files += [directory / name for directory in adapter_dirs(root).values() for name in ADAPTER_FILES]
    files += [root / name for name in CARD_FILES]
    missing = [str(path.relative_to(root)) for path in files if not path.is_file()]
    if missing:
        raise ConfigError(
            f"The demo pack in {root} is incomplete; missing: {', '.join(missing)}.",
            hint="Install loraserve again, or make a pack with `loraserve demo train`.",
        )
    return tuple(files)
