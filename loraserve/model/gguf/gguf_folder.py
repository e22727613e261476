"""A directory as the loader reads it, of a GGUF file: config, tokenizer, template, and no weights.

The weights stay in their file. Directories are made once, in the user's cache, and made again when
the file changes. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from loraserve.errors import ConfigError, ModelError
from loraserve.model.gguf.gguf_config import make_config
from loraserve.model.gguf.gguf_file import is_gguf, read_gguf
from loraserve.model.gguf.gguf_tokenizer import GgufVocabulary

SOURCE_FILE = "gguf.json"
"""Names the file that has the weights."""
_VERSION = 1
"""Version of the directories: another one makes them again."""


def find_gguf(path: Path) -> Path | None:
    """Find the GGUF file that a path means, the first of its shards; None: it means none.

    A directory means its only GGUF file, where it has no safetensors.

    Raises:
        ConfigError: a directory has several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" or is_gguf(path) else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    # multimodal projectors lie next to their base
    files = sorted(file for file in path.glob("*.gguf") if not file.name.startswith("mmproj"))
    bases = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(bases) > 1:
        raise ConfigError(
            f"{path} has {len(bases)} GGUF files: {', '.join(file.name for file in bases[:6])}.",
            hint=f"Give one of them: --model {bases[0]}",
        )
    return bases[0] if bases else None


def gguf_folder(file: Path) -> Path:
    """Find or make the directory of a GGUF file.

    Raises:
        UnknownArchitecture, ModelError: what the file has that isn't implemented.
    """
    # a link keeps its own name, from which the other shards' follow
    file = file.absolute()
    folder = _cache() / _key(file)
    if (folder / SOURCE_FILE).is_file():
        return folder
    gguf = read_gguf(file)
    vocabulary, config = GgufVocabulary(gguf), make_config(gguf)
    if vocabulary.size > config["vocab_size"]:
        raise ModelError(
            f"{file} has {vocabulary.size} tokens, and its embedding {config['vocab_size']} rows.",
            hint="Convert the model again with a current llama.cpp.",
        )
    contents = {
        "config.json": config,
        "tokenizer.json": vocabulary.tokenizer(),
        "tokenizer_config.json": vocabulary.tokenizer_config(),
        "generation_config.json": vocabulary.generation_config(),
        SOURCE_FILE: {"files": [str(path) for path in gguf.files]},
    }
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for name, value in contents.items():
            (partial / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8", errors="replace")
        template = vocabulary.chat_template()
        if template is not None:
            (partial / "chat_template.jinja").write_text(template, encoding="utf-8", errors="replace")
        try:
            partial.rename(folder)
        except OSError:
            # another process was first
            if not (folder / SOURCE_FILE).is_file():
                raise
    except OSError as error:
        raise ModelError(
            f"The config and tokenizer of {file.name} can't be written to {folder}: {error.strerror}.",
            hint="Make room there, or set XDG_CACHE_HOME to a directory that can be written.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def source_files(folder: Path) -> Sequence[Path] | None:
    """List the GGUF files that a directory was made of; None: of none.

    Raises:
        ModelError: they aren't there any more.
    """
    source = folder / SOURCE_FILE
    if not source.is_file():
        return None
    try:
        files = [Path(name) for name in json.loads(source.read_bytes())["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{source} can't be read.", hint=f"Remove {folder}: it is made again.") from error
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}, which has the weights, isn't there any more.", hint="Give its new path.")
    return files


def _cache() -> Path:
    return platformdirs.user_cache_path("loraserve") / "gguf"


def _key(file: Path) -> str:
    try:
        found = file.stat()
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}.") from error
    facts = [_VERSION, str(file), found.st_size, found.st_mtime_ns]
    return f"{file.stem[:60]}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
