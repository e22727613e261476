"""A directory as PEFT's `save_pretrained` makes it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loraserve import errors
from loraserve.adapter_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    MAX_INDEX_BYTES,
    WEIGHTS_FILE,
    find_weights,
    foreign_files,
    holds_config,
    is_base,
    shard_names,
)
from loraserve.tokenizer_identity import TokenizerSummary

EXTRA_FILES: Mapping[str, str] = {
    "chat_template": "chat_template.jinja",
    "generation_config": "generation_config.json",
    "tokenizer": "tokenizer_summary.json",
}
"""Field of a publish → file whose text it is."""
PARSER_FILES = ("tool_parser", "reasoning_parser")
"""Files, and fields of a publish, that hold a parser's name."""
INDEX = "index"
"""Field of a publish with the text of `INDEX_FILE`."""
VARIABLES, VARIABLES_FILE = "chat_template_kwargs", "chat_template_kwargs.json"
"""Field of a publish, and file, that set variables of the chat template."""
_MAX_EXTRA_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Files of an adapter in a directory.

    Attributes:
        config: None where the weights' file holds it.
        weights: several are the shards that `index` names.
        index: None where there is one file of weights.
    """

    config: Path | None
    weights: tuple[Path, ...]
    index: Path | None = None


def find_files(directory: Path) -> AdapterFiles:
    """Return the paths of the config and of the weights in an adapter's directory.

    It may be a GGUF file too.

    Raises:
        AdapterFormatError: one of them isn't there; the message says what is.
    """
    expected = f"Expected a directory with {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT's save_pretrained() writes it."
    if directory.is_file() and holds_config(directory.name):
        return AdapterFiles(None, (directory,))
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "doesn't exist"
        raise errors.AdapterFormatError(f"{directory} {found}.", hint=expected)
    names = [path.name for path in directory.iterdir() if path.is_file()]
    name = find_weights(names) or WEIGHTS_FILE
    if holds_config(name):
        return AdapterFiles(None, (directory / name,))
    missing = [wanted for wanted in (CONFIG_FILE, name) if wanted not in names]
    if missing:
        if is_base(names):
            raise errors.AdapterFormatError(
                f"{directory} has no {' and no '.join(missing)}; it holds a whole model, which is served as a base.",
                hint=f"Try: loraserve serve {shlex.quote(str(directory))}",
            )
        foreign = foreign_files(names)
        there = foreign or ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
        raise errors.AdapterFormatError(
            f"{directory} has no {' and no '.join(missing)}; it holds {there}.", hint=expected
        )
    config, weights = directory / CONFIG_FILE, directory / name
    if name != INDEX_FILE:
        return AdapterFiles(config, (weights,))
    shards = shard_names(read_index_file(weights))
    absent = [shard for shard in shards if shard not in names]
    if absent:
        raise errors.AdapterFormatError(
            f"{directory} has no {absent[0]}, which {INDEX_FILE} names.", hint="Copy every shard next to the index."
        )
    return AdapterFiles(config, tuple(directory / shard for shard in shards), weights)


def read_index_file(path: Path) -> bytes:
    """Return the bytes of an index.

    Raises:
        AdapterFormatError: it has too many.
    """
    with path.open("rb") as file:
        data = file.read(MAX_INDEX_BYTES + 1)
    if len(data) > MAX_INDEX_BYTES:
        raise errors.AdapterFormatError(f"{path} has more than {MAX_INDEX_BYTES:,} bytes.")
    return data


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


def read_extra_files(directory: Path) -> dict[str, str]:
    """Return the texts of the extra files that the directory has, by the fields of a publish.

    Of a tokenizer it is the summary.

    Raises:
        AdapterFormatError: one isn't text, or is far too large; or the tokenizer's files can't be
            read.
    """
    found: dict[str, str] = {}
    others = {**{name: name for name in PARSER_FILES}, VARIABLES: VARIABLES_FILE}
    for field, name in {**EXTRA_FILES, **others}.items():
        path = directory / name
        if not path.is_file():
            continue
        if path.stat().st_size > _MAX_EXTRA_BYTES:
            raise errors.AdapterFormatError(f"{path} has more than {_MAX_EXTRA_BYTES} bytes.")
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise errors.AdapterFormatError(f"{path} isn't UTF-8: byte {error.start} is invalid.") from error
        found[field] = text.strip() if field in PARSER_FILES else text
    try:
        tokenizer = TokenizerSummary.read(directory)
    except (OSError, ValueError) as error:
        raise errors.AdapterFormatError(
            f"The tokenizer in {directory} can't be read: {error}.",
            hint="Save it again with tokenizer.save_pretrained(), or remove its files if training used the base's.",
        ) from error
    if tokenizer is not None:
        # the files themselves may have megabytes, most of them the base's
        found["tokenizer"] = tokenizer.text()
    return found
